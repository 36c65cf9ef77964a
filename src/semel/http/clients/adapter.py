"""The adapter for requests: `session.mount("https://pay.example/", IdempotentAdapter())`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final, Unpack

from semel.errors import ConfigurationError
from semel.http.clients.answers import MAX_PROBLEM, Answer, is_problem, lower, read_problem
from semel.http.clients.bodies import Parcel, Steps, pack
from semel.http.clients.delivery import Delivered, Delivery, Loss, carry, marked
from semel.http.clients.errors import BodyNotRepeatable, is_about_certificate
from semel.http.clients.keys import DurableKeys, opened
from semel.http.clients.options import ClientOptions, settings_from
from semel.once import Semel
from semel.runtime import run_sync

try:
    import requests
    from requests.adapters import HTTPAdapter
    from requests.exceptions import ChunkedEncodingError, ConnectTimeout, ProxyError, ReadTimeout, SSLError
    from urllib3.exceptions import ConnectTimeoutError, MaxRetryError, NewConnectionError
except ImportError as missing:
    raise ConfigurationError('this adapter needs requests: pip install "semel[requests]"') from missing

__all__ = ["IdempotentAdapter"]

_CHUNK: Final = 1 << 16


class IdempotentAdapter(HTTPAdapter):
    """One key per request of the session, kept over all its attempts; options and errors as for IdempotentTransport.

    What concerns one request is said around it: `with sending(action="charge order 7"): session.post(…)`. `pool` are
    the options of `requests.adapters.HTTPAdapter`; its own `max_retries` is left at none, since it knows no keys.
    """

    def __init__(
        self,
        *,
        keys: DurableKeys | str | Semel | None = None,
        pool: Mapping[str, Any] | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = settings_from(options)
        self._given: dict[str, Any] = {"keys": keys, "pool": pool, **options}
        if pool is not None and pool.get("max_retries"):
            raise ConfigurationError("max_retries would repeat requests below their keys: use attempts=")
        self._owned, self._book = opened(keys, "sync")
        self._last = threading.local()
        super().__init__(**(pool or {}))

    def send(self, request: Any, stream: bool = False, *args: Any, **more: Any) -> Any:  # noqa: FBT002 - of requests
        """As HTTPAdapter's, with attempts. `request` is a PreparedRequest."""
        timeout, *others = args or (more.pop("timeout", None),)
        given = dict(zip(("verify", "cert", "proxies"), others, strict=False)) | more

        def attempt(prepared: Any, limit: Any) -> Any:
            return HTTPAdapter.send(self, prepared, stream=stream, timeout=limit, **given)

        wire = _Wire(attempt, request, stream=stream, timeout=timeout, last=self._last)
        return run_sync(carry(wire, self._settings, self._book))

    def __reduce__(self) -> tuple[Any, ...]:
        """A session may be copied, also for another process: there it is made anew, of the same options."""
        return partial(type(self), **self._given), ()

    def close(self) -> None:
        super().close()
        if self._owned is not None:
            self._owned.close()


class _Wire:
    def __init__(self, attempt: Any, request: Any, *, stream: bool, timeout: Any, last: Any) -> None:
        self._send = attempt
        self.native = request
        self._stream = stream
        self._timeout = timeout
        self._last = last
        self._header = ""
        self._rest: Iterator[bytes] | None = None

    @property
    def method(self) -> str:
        return str(self.native.method).upper()

    @property
    def url(self) -> str:
        return str(self.native.url)

    def header(self, name: str) -> str | None:
        value = self.native.headers.get(name)
        return value.decode("latin-1") if isinstance(value, bytes) else value

    def mark(self, name: str, value: str | None) -> None:
        marked(self.native.headers, name, value)

    def wishes(self) -> Mapping[str, Any]:
        return {}

    def earlier(self, header: str) -> Delivery | None:
        """Redirects and authentication rounds come in the same thread, with the headers of the request before."""
        self._header = header
        last: tuple[str | None, Delivery] | None = getattr(self._last, "delivery", None)
        own = self.header(header)
        return last[1] if last is not None and own is not None and last[0] == own else None

    def remember(self, delivery: Delivery) -> None:
        self._last.delivery = (self.header(self._header), delivery)

    async def pack(self, most: int) -> Parcel:
        body = self.native.body
        if body is None or isinstance(body, bytes | bytearray):
            return Parcel(raw=bytes(body or b""))
        if isinstance(body, str):
            return Parcel(raw=body.encode())
        self._rest = _chunks(body)
        parcel = await pack(Steps(self._rest), most)
        if not hasattr(body, "seek"):
            # It is spent, and requests would send what is left of it after a redirect or a challenge: nothing.
            kept = parcel.in_memory
            self.native.body = _Spent() if kept is None else kept
        return parcel

    async def pass_on(self) -> Any:
        return self._send(self.native, self._timeout)

    async def send(self, parcel: Parcel, patience: float) -> Any:
        request = self.native
        if parcel.raw is None:
            request = request.copy()
            request.body = chain(parcel.chunks(), self._rest or ())
        return self._send(request, _shorter(self._timeout, patience))

    async def look(self, response: Any, most: int) -> tuple[Any, Answer]:
        headers = lower(response.headers)
        problem = response.status_code >= 400 and is_problem(headers.get("content-type", ""))
        length = headers.get("content-length", "")
        small = length.isdecimal() and int(length) <= (MAX_PROBLEM if problem else most)
        seen = None
        if not self._stream or (problem and small):
            try:
                body = response.content  # kept by the response
            except BaseException:
                response.close()
                raise
            seen = read_problem(body) if problem and len(body) <= MAX_PROBLEM else None
        return response, Answer(response.status_code, headers, seen)

    async def drop(self, response: Any) -> None:
        response.close()

    def hand(self, response: Any, delivered: Delivered) -> Any:
        response.semel = delivered
        response.request = self.native  # not the copy of one attempt: requests answers challenges with it
        return response

    def loss(self, error: Exception) -> Loss | None:
        if isinstance(error, SSLError):
            return None if is_about_certificate(error) else "lost"
        if isinstance(error, ConnectTimeout | ProxyError):
            return "unsent"
        if isinstance(error, requests.ConnectionError):
            cause = error.args[0] if error.args else None
            reason = cause.reason if isinstance(cause, MaxRetryError) else cause
            return "unsent" if isinstance(reason, NewConnectionError | ConnectTimeoutError) else "lost"
        return "lost" if isinstance(error, ReadTimeout | ChunkedEncodingError) else None

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - the blocking colour


class _Spent:
    """In place of a long stream that was sent."""

    def __iter__(self) -> Iterator[bytes]:
        raise BodyNotRepeatable(
            "the server asked for the request at another place or with credentials, and its body was a stream that is spent: "
            "pass bytes or an open file"
        )


def _chunks(body: Any) -> Iterator[bytes]:
    pieces = iter(lambda: body.read(_CHUNK), None) if hasattr(body, "read") else iter(body)
    for piece in pieces:
        if not piece and hasattr(body, "read"):
            return
        yield piece.encode() if isinstance(piece, str) else piece


def _shorter(timeout: Any, most: float) -> Any:
    if most > 1e9:
        return timeout
    most = max(most, 0.001)
    if timeout is None:
        return most
    if isinstance(timeout, tuple):
        return tuple(most if each is None else min(each, most) for each in timeout)
    return min(timeout, most) if isinstance(timeout, int | float) else timeout
