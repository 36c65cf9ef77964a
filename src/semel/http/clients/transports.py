"""The transports for httpx: put one below a client, and its POST and PATCH requests are safe to repeat, and repeated."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self, Unpack

from semel.errors import ConfigurationError
from semel.http.clients.answers import MAX_PROBLEM, Answer, is_problem, lower, read_problem
from semel.http.clients.bodies import Parcel, Steps, pack
from semel.http.clients.delivery import Delivered, Delivery, Loss, carry, marked
from semel.http.clients.errors import is_about_certificate
from semel.http.clients.keys import DurableKeys, opened
from semel.http.clients.options import ClientOptions, settings_from
from semel.once import AsyncSemel, Semel
from semel.runtime import run_sync

try:
    import anyio
    import httpx
except ImportError as missing:
    raise ConfigurationError('these transports need httpx: pip install "semel[httpx]"') from missing

__all__ = ["AsyncIdempotentTransport", "IdempotentTransport"]

_DELIVERY: Final = "semel.delivery"
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_LOST: Final = (httpx.ReadTimeout, httpx.WriteTimeout, httpx.NetworkError, httpx.RemoteProtocolError)


class IdempotentTransport(httpx.BaseTransport):
    """`httpx.Client(transport=IdempotentTransport())`: one key per request, kept over all its attempts.

    `transport` is what sends (an `httpx.HTTPTransport()` if not given; TLS, proxies and limits are its options). `keys`
    is a store for the keys of business actions (`DurableKeys`, a URL, a Semel): with it a request that names its action
    has the same key after a restart. The other options are those of `ClientOptions`.

    An answer that is final is returned as it is, whatever its status; when attempts or the deadline run out, the last
    answer is returned or the last error raised. Raises RetentionOver and BodyNotRepeatable where nothing more can be
    done safely, KeyMismatch for another request under a known action. Thread-safe.
    """

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        keys: DurableKeys | str | Semel | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = settings_from(options)
        if transport is not None and not isinstance(transport, httpx.BaseTransport):
            raise ConfigurationError(
                f"IdempotentTransport goes around a transport for httpx.Client, not {type(transport).__name__}"
            )
        self._owned, self._book = opened(keys, "sync")
        self._inner = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return run_sync(carry(_ThreadWire(self._inner, request), self._settings, self._book))

    def close(self) -> None:
        self._inner.close()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._inner.__exit__(exc_type, exc_value, traceback)
        if self._owned is not None:
            self._owned.close()


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """The same for `httpx.AsyncClient`; it waits with anyio, as httpx does. `keys` need asyncio."""

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        keys: DurableKeys | str | AsyncSemel | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = settings_from(options)
        if transport is not None and not isinstance(transport, httpx.AsyncBaseTransport):
            raise ConfigurationError(
                f"AsyncIdempotentTransport goes around a transport for httpx.AsyncClient, not {type(transport).__name__}"
            )
        self._owned, self._book = opened(keys, "async")
        self._inner = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await carry(_LoopWire(self._inner, request), self._settings, self._book)

    async def aclose(self) -> None:
        await self._inner.aclose()
        if self._owned is not None:
            await self._owned.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._inner.__aexit__(exc_type, exc_value, traceback)
        if self._owned is not None:
            await self._owned.aclose()


class _Stream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """What was read already, and behind it the rest of the stream it came from."""

    def __init__(self, first: Parcel | bytes, rest: Any = None, source: Any = None) -> None:
        self._first = first
        self._rest = rest
        self._source = source

    def _begin(self) -> Iterator[bytes]:
        return iter((self._first,)) if isinstance(self._first, bytes) else self._first.chunks()

    def __iter__(self) -> Iterator[bytes]:
        yield from self._begin()
        if self._rest is not None:
            yield from self._rest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._begin():
            yield chunk
        if self._rest is not None:
            async for chunk in self._rest:
                yield chunk

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    async def aclose(self) -> None:
        if self._source is not None:
            await self._source.aclose()


class _Wire(ABC):
    """A request of httpx; the colours differ in how they send, iterate, close and wait."""

    def __init__(self, inner: Any, request: httpx.Request) -> None:
        self._inner = inner
        self.native = request
        self._rest: Any = None  # of a body that is too long to be kept

    @property
    def method(self) -> str:
        return self.native.method

    @property
    def url(self) -> str:
        return str(self.native.url)

    def header(self, name: str) -> str | None:
        value: str | None = self.native.headers.get(name)
        return value

    def mark(self, name: str, value: str | None) -> None:
        marked(self.native.headers, name, value)

    def wishes(self) -> Mapping[str, Any]:
        wishes: Mapping[str, Any] = self.native.extensions.get("semel") or {}
        return wishes

    def earlier(self, header: str) -> Delivery | None:
        del header
        delivery: Delivery | None = self.native.extensions.get(_DELIVERY)
        return delivery

    def remember(self, delivery: Delivery) -> None:
        # httpx copies the extensions of a request to the one that a redirect leads to.
        self.native.extensions = {**self.native.extensions, _DELIVERY: delivery}

    def loss(self, error: Exception) -> Loss | None:
        if isinstance(error, _UNSENT):
            return None if is_about_certificate(error) else "unsent"
        return "lost" if isinstance(error, _LOST) else None

    def hand(self, response: httpx.Response, delivered: Delivered) -> httpx.Response:
        response.extensions["semel"] = delivered
        return response

    @abstractmethod
    def _pieces(self, stream: Any) -> AsyncIterator[bytes]: ...

    @abstractmethod
    async def _post(self, request: httpx.Request) -> httpx.Response: ...

    @abstractmethod
    async def _close(self, what: Any) -> None:
        """Also of somebody who was cancelled."""
        ...

    async def pack(self, most: int) -> Parcel:
        stream = self.native.stream
        if isinstance(stream, httpx.ByteStream):
            return Parcel(raw=b"".join(stream))
        self._rest = self._pieces(stream)
        parcel = await pack(self._rest, most)
        if (kept := parcel.in_memory) is not None:
            self.native.stream = httpx.ByteStream(
                kept
            )  # httpx sends it again after a redirect or a challenge
        return parcel

    async def pass_on(self) -> httpx.Response:
        return await self._post(self._attempt(None))

    async def send(self, parcel: Parcel, patience: float) -> httpx.Response:
        return await self._post(self._attempt(parcel, patience))

    async def look(self, response: httpx.Response, most: int) -> tuple[httpx.Response, Answer]:
        wanted = _how_much(response, most)
        if not wanted:
            return response, _answer(response, None)
        source = response.stream
        chunks, read = self._pieces(source), bytearray()
        try:
            async for chunk in chunks:
                read += chunk
                if len(read) > wanted:
                    return _again(response, _Stream(bytes(read), chunks, source)), _answer(response, None)
        except BaseException:
            await self._close(source)
            raise
        await self._close(source)
        return _again(response, httpx.ByteStream(bytes(read))), _answer(response, bytes(read))

    async def drop(self, response: httpx.Response) -> None:
        await self._close(response)

    def _attempt(self, parcel: Parcel | None, patience: float | None = None) -> httpx.Request:
        request = self.native
        kept = {name: value for name, value in request.extensions.items() if name not in ("semel", _DELIVERY)}
        if patience is not None and patience < 1e9:
            kept["timeout"] = _shorter(kept.get("timeout") or {}, max(patience, 0.001))
        stream: Any = request.stream
        if parcel is not None:
            stream = httpx.ByteStream(parcel.raw) if parcel.raw is not None else _Stream(parcel, self._rest)
        return httpx.Request(
            request.method, request.url, headers=request.headers, stream=stream, extensions=kept
        )


def _shorter(timeout: Mapping[str, float | None], most: float) -> dict[str, float]:
    given = {name: timeout.get(name) for name in ("connect", "read", "write", "pool")}
    return {name: most if value is None else min(value, most) for name, value in given.items()}


def _how_much(response: httpx.Response, most: int) -> int:
    """How much of a response is read before it is judged: none of a long one or a stream that goes on."""
    kind, length = response.headers.get("content-type", ""), response.headers.get("content-length", "")
    if is_problem(kind) and response.status_code >= 400:
        return MAX_PROBLEM
    return (
        most if length.isdecimal() and int(length) <= most and not kind.startswith("text/event-stream") else 0
    )


def _answer(response: httpx.Response, raw: bytes | None) -> Answer:
    seen = None
    if (
        raw is not None
        and response.status_code >= 400
        and is_problem(response.headers.get("content-type", ""))
    ):
        try:
            seen = read_problem(httpx.Response(200, headers=response.headers, content=raw).content)
        except httpx.DecodingError:
            seen = None  # a broken encoding: no problem that could be read
    return Answer(response.status_code, lower(response.headers), seen)


def _again(response: httpx.Response, stream: Any) -> httpx.Response:
    return httpx.Response(
        response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
    )


class _ThreadWire(_Wire):
    def _pieces(self, stream: Any) -> AsyncIterator[bytes]:
        return Steps(iter(stream))

    async def _post(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = self._inner.handle_request(request)
        return response

    async def _close(self, what: Any) -> None:
        what.close()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - the blocking colour


class _LoopWire(_Wire):
    def _pieces(self, stream: Any) -> AsyncIterator[bytes]:
        return aiter(stream)

    async def _post(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = await self._inner.handle_async_request(request)
        return response

    async def _close(self, what: Any) -> None:
        with anyio.CancelScope(shield=True):
            await what.aclose()

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)
