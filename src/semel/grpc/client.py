"""Client interceptors: one key for each logical call, made above whatever retries it.

gRPC's own retries (a service config) happen below interceptors, so every attempt carries the same key. A retry loop of
one's own must stand below, too, or name the action: `with idempotent_operation("order-7"):`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio

from semel.errors import ConfigurationError, InvalidKey
from semel.grpc.methods import Methods
from semel.grpc.requests import own_key
from semel.grpc.rules import DEFAULT_FIELDS, DEFAULT_NAME, Method, checked_fields, checked_names
from semel.http.keys import read_key
from semel.http.problem import Problem

__all__ = [
    "AsyncClientIdempotencyInterceptor",
    "ClientIdempotencyInterceptor",
    "idempotent_operation",
    "leg_key",
]


def leg_key(operation: str, leg: int) -> str:
    """The key of the n-th call of one business action: `{operation}/{leg}`, the same when the action is repeated."""
    if leg < 1:
        raise InvalidKey(f"legs are counted from 1, not {leg}")
    return _checked(f"{operation}/{leg}")


def _checked(key: str) -> str:
    found = _read(key)
    if isinstance(found, Problem):
        raise InvalidKey(found.kind.detail)
    return key


def _is_key(text: str) -> bool:
    return not isinstance(_read(text), Problem)


def _read(text: str) -> str | Problem:
    return read_key([text.encode("utf-8", "surrogateescape")])


class _Legs:
    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._count = 0

    def next(self) -> str:
        self._count += 1
        return leg_key(self._operation, self._count)


_operation: ContextVar[_Legs | None] = ContextVar("semel_grpc_operation", default=None)


@contextmanager
def idempotent_operation(operation: str) -> Iterator[None]:
    """Calls inside, made through an interceptor, get the keys `{operation}/1`, `{operation}/2`, … in their order.

    Repeat the whole block with the same name, also after a crash, and each call is the one that it was.
    """
    leg_key(operation, 1)
    token = _operation.set(_Legs(operation))
    try:
        yield
    finally:
        _operation.reset(token)


def _new_key() -> str:
    # Not a UUIDv7: a server refuses one that looks too old, and a client's clock may be wrong.
    return str(uuid.uuid4())


_DEFAULT: Final = _new_key


def _streaming(methods: Iterable[str] | None) -> Any:
    """A client records nothing, so a stream needs no second word here: to name it is enough."""
    if methods is None or isinstance(methods, str):
        return methods
    return {name: Method(stream=not str(name).endswith("/*")) for name in methods}


class _Keys:
    """Which calls get a key, and which one."""

    def __init__(
        self,
        methods: Iterable[str] | None,
        exclude: Iterable[str],
        metadata: str,
        request_id: str | Iterable[str] | None,
        mint: Callable[[], str] | None,
    ) -> None:
        self._methods = Methods(_streaming(methods), exclude)
        (self.name,) = checked_names("metadata", metadata)
        self._fields = checked_fields(request_id)
        self._mint = mint

    def added(
        self, method: str | bytes, metadata: Any, request: Any
    ) -> tuple[tuple[str, str | bytes], ...] | None:
        """The metadata with a key, None if it stays as it is."""
        name = method.decode() if isinstance(method, bytes) else method
        given = tuple((key, value) for key, value in metadata or ())
        if any(key == self.name for key, _ in given) or self._methods.find(name) is None:
            return None  # the caller's own key wins
        if (own := own_key(self._fields, request)) is not None:
            # Also where it is a field of the request. What is no key is left to the server, which says why.
            return (*given, (self.name, own)) if _is_key(own) else None
        legs = _operation.get()
        if legs is not None:
            return (*given, (self.name, legs.next()))
        if self._mint is None:
            raise ConfigurationError(
                f"{name} was called without a key and mint=None: a retry of it could run twice. Pass the metadata "
                f"{self.name!r}, call inside idempotent_operation(...), or let the interceptor mint keys"
            )
        return (*given, (self.name, _checked(self._mint())))


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class ClientIdempotencyInterceptor(  # the methods of gRPC's interfaces, which share no type
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamUnaryClientInterceptor
):
    """Adds a key to each call that has none: `grpc.intercept_channel(channel, ClientIdempotencyInterceptor())`.

    `methods` and `exclude` choose; methods declared NO_SIDE_EFFECTS and calls that stream both ways get none. With
    `mint=None` a call without a key is refused, so that nothing retries it unprotected. A key that the caller has set, in
    the metadata or in a field of the request (`request_id`, as the server's option), wins.
    """

    def __init__(
        self,
        *,
        methods: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        metadata: str = DEFAULT_NAME,
        request_id: str | Iterable[str] | None = DEFAULT_FIELDS,
        mint: Callable[[], str] | None = _DEFAULT,
    ) -> None:
        self._keys = _Keys(methods, exclude, metadata, request_id, mint)

    def _keyed(self, details: Any, request: Any) -> Any:
        metadata = self._keys.added(details.method, details.metadata, request)
        if metadata is None:
            return details
        return _Details(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._keyed(client_call_details, request), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._keyed(client_call_details, request), request)

    def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return continuation(self._keyed(client_call_details, None), request_iterator)


class _AsyncKeyed:
    def __init__(self, keys: _Keys) -> None:
        self._keys = keys

    async def _go_on(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = self._keys.added(details.method, details.metadata, request)
        if metadata is not None:
            details = grpc.aio.ClientCallDetails(
                details.method,
                details.timeout,
                grpc.aio.Metadata(*metadata),
                details.credentials,
                details.wait_for_ready,
            )
        return await continuation(details, request)


class AsyncClientIdempotencyInterceptor(_AsyncKeyed, grpc.aio.UnaryUnaryClientInterceptor):
    """The same for grpc.aio: `grpc.aio.insecure_channel(target, interceptors=AsyncClientIdempotencyInterceptor().all())`.

    grpc.aio takes one interceptor for each kind of call: `all()` gives those that this one stands for; alone it serves
    calls that do not stream.
    """

    def __init__(
        self,
        *,
        methods: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        metadata: str = DEFAULT_NAME,
        request_id: str | Iterable[str] | None = DEFAULT_FIELDS,
        mint: Callable[[], str] | None = _DEFAULT,
    ) -> None:
        super().__init__(_Keys(methods, exclude, metadata, request_id, mint))

    def all(self) -> list[grpc.aio.ClientInterceptor]:
        return [self, _UnaryStream(self._keys), _StreamUnary(self._keys)]

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._go_on(continuation, client_call_details, request)


class _UnaryStream(_AsyncKeyed, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._go_on(continuation, client_call_details, request)


class _StreamUnary(_AsyncKeyed, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await self._go_on(continuation, client_call_details, request_iterator)
