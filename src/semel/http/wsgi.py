"""The middleware for WSGI applications: Flask, Django, Bottle and plain ones.

    app = IdempotencyMiddleware(app, once=once, principal=user_id, authorize=may_proceed)

As the ASGI one, without a loop: requests without a key pass untouched, a replay never enters the application, and a
client that leaves changes nothing, because the response is read to its end either way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final, Unpack

from semel.errors import StoreUnavailable
from semel.http.body import Body, TooLarge
from semel.http.config import Plan, configure
from semel.http.guard import Admitted, Guard
from semel.http.intake import First, enter
from semel.http.kept import Kept
from semel.http.options import MiddlewareOptions
from semel.http.problem import Problem
from semel.http.reply import Reply
from semel.http.routers import wsgi_unrouted
from semel.http.views import attended
from semel.once import Semel
from semel.points import reach
from semel.run import Run, _current
from semel.runtime import run_sync

__all__ = ["EnvironRequest", "IdempotencyMiddleware", "PlainRequest", "read_body"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]
Headers = list[tuple[bytes, bytes]]
_CHUNK: Final = 1 << 16
_log = logging.getLogger("semel.http")
_NOT_STARTED: Final = "the application answered without calling start_response"


class IdempotencyMiddleware:
    """See `semel.http.config` for the options; `once` is a Semel."""

    def __init__(self, app: App, *, once: Semel, **options: Unpack[MiddlewareOptions]) -> None:
        self.app = app
        self._plan: Plan = configure(once, "sync", options, guarded=False)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        entered = run_sync(enter(self._plan, EnvironRequest(environ)))
        if entered is None:
            return self.app(environ, start_response)
        if isinstance(entered, First):
            first = _First(entered.guard, entered.admitted, entered.body)
            return first.run(self.app, environ, start_response)
        if isinstance(entered, Reply):
            return _answer(start_response, entered)
        return _Closing(self.app(_again(environ, entered), start_response), entered)


# ------------------------------------------------------------------------------------------------------ requests


class EnvironRequest:
    """See `semel.http.intake.Incoming`."""

    __slots__ = ("_environ", "method", "path", "query", "routed")

    def __init__(self, environ: Environ) -> None:
        self._environ = environ
        # Browsers send "patch" as it was written; Flask and Bottle run it as PATCH.
        self.method: str = environ["REQUEST_METHOD"].upper()
        raw = environ.get("PATH_INFO", "").encode("latin-1")
        self.routed: str = raw.decode("utf-8", "surrogateescape")
        root = environ.get("SCRIPT_NAME", "").encode("latin-1")
        self.path: str = (root + raw).decode("utf-8", "surrogateescape")
        self.query: bytes = environ.get("QUERY_STRING", "").encode("latin-1")

    def lines(self, name: bytes) -> list[bytes]:
        """A WSGI server has joined several lines with commas, which no key has."""
        field = name.decode("latin-1").upper().replace("-", "_")
        value = self._environ.get(field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}")
        return [] if value is None else [value.encode("latin-1")]

    def has_any(self, names: frozenset[bytes]) -> bool:
        return any(self.lines(name) for name in names)

    def request(self) -> Any:
        if _Request is None:
            return PlainRequest(self._environ)
        return _Request(self._environ, populate_request=False, shallow=True)

    async def read(self, limit: int) -> Body | Problem:
        return read_body(limit, self._environ)


class PlainRequest:
    """What resolvers get where Werkzeug is not installed: `environ`, `method`, `path` and `headers`."""

    def __init__(self, environ: Environ) -> None:
        self.environ = environ
        self.method: str = environ["REQUEST_METHOD"]
        self.path: str = environ.get("PATH_INFO", "")
        self.headers = {
            name[5:].replace("_", "-").lower(): value
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }


try:
    from werkzeug.wrappers import Request as _Request
except ModuleNotFoundError:
    _Request = None  # type: ignore[assignment,misc]  # absent without the framework


def read_body(limit: int, environ: Environ) -> Body | Problem:
    """All of a body that nobody has read yet."""
    length = environ.get("CONTENT_LENGTH") or ""
    left = int(length) if length.isdecimal() else None
    if left is None and not environ.get("wsgi.input_terminated"):
        if environ.get("HTTP_TRANSFER_ENCODING"):
            return Problem.of("body-incomplete", reason="this server does not say where a chunked body ends")
        left = 0  # without a length and without an end there is no body
    if left is not None and left > limit:
        return Problem.of("body-too-large", limit=limit)
    body, stream = Body(limit), environ["wsgi.input"]
    try:
        while left is None or left > 0:
            chunk = stream.read(_CHUNK if left is None else min(left, _CHUNK))
            if not chunk:
                break
            body.feed(chunk)
            left = None if left is None else left - len(chunk)
    except TooLarge:
        return Problem.of("body-too-large", limit=limit)
    if left:  # the client has left in the middle of it
        body.close()
        return Problem.of("body-incomplete")
    return body


def _again(environ: Environ, body: Body) -> Environ:
    changed = {**environ, "wsgi.input": body.file(), "CONTENT_LENGTH": str(body.size)}
    changed.pop("HTTP_TRANSFER_ENCODING", None)
    return changed


# ----------------------------------------------------------------------------------------------------- responses


class _First:
    """A first execution: nothing is sent before its outcome is recorded, and all of it is read whoever listens."""

    def __init__(self, guard: Guard, admitted: Admitted, body: Body) -> None:
        self._guard = guard
        self._body = body
        self._environ: Environ = {}
        """As the application has it."""
        self._unrouted = False
        self._run: Run = guard.begin(admitted)
        self._status = 0
        self._headers: Headers = []
        self._written: list[bytes] = []
        self._settled = False
        self._begun = False
        """The first byte of a stream has left, or is about to. Before that a second start replaces the first."""

    def run(self, app: App, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        guard, run = self._guard, self._run
        token = _current.set(run.weak)
        try:
            if (problem := run_sync(guard.resumed(run))) is not None:
                self._settled = True
                return _answer(start_response, guard.replies.problem(problem))
            self._environ = _again(environ, self._body)
            result = app(self._environ, self._start)
            if isinstance(result, list | tuple) or getattr(result, "__len__", lambda: 2)() <= 1:
                return self._whole(result, start_response)
            return _Stream(self, self._pieces(result, start_response))
        except BaseException as error:
            reply = self._failed(error)
            if reply is None:
                raise
            _log.error("a keyed handler failed, and its failure is kept", exc_info=error)
            return _answer(start_response, reply)
        finally:
            _current.reset(token)
            if self._settled:
                self._body.close()

    def _start(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], None]:
        if exc_info and self._begun:  # PEP 3333: it is too late for another response
            raise exc_info[1].with_traceback(exc_info[2])
        self._status = int(status.partition(" ")[0])
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self._unrouted = wsgi_unrouted(self._environ, self._status)  # later Flask has forgotten it
        return self._written.append

    def _failed(self, error: BaseException) -> Reply | None:
        """Settle it. A Reply: what every repetition will get, and what is to be said now, if that is possible."""
        if self._settled:
            return None
        self._settled = True
        self._body.close()
        if isinstance(error, Exception):
            return run_sync(self._guard.fail(self._run, error))
        run_sync(self._guard.lose(self._run, error))
        return None

    def _settle(self, body: bytes | None) -> Headers | Problem:
        if not self._status:
            raise RuntimeError(_NOT_STARTED)
        status, headers = self._status, self._headers
        sent = run_sync(self._guard.settle(self._run, status, headers, body, passing=self._unrouted))
        self._settled = True
        return sent

    def _problem(self, start_response: StartResponse, problem: Problem) -> list[bytes]:
        return _answer(start_response, self._guard.replies.problem(problem))

    def _whole(self, result: Iterable[bytes], start_response: StartResponse) -> Iterable[bytes]:
        try:
            body = b"".join([*self._written, *result])
        finally:
            _close(result)
        sent = self._settle(body)
        if isinstance(sent, Problem):
            return self._problem(start_response, sent)
        start_response(_status_line(self._status), _text(sent))
        return [body]

    def _pieces(self, result: Iterable[bytes], start_response: StartResponse) -> Iterator[bytes]:
        """One piece behind the application, so that the last one leaves after the outcome is recorded."""
        kept, begun = Kept(self._guard.most), False
        try:
            for piece in _joined(self._written, attended(self._run, result)):
                last = kept.push(piece)
                if last is None:
                    continue
                if not begun:
                    begun = True
                    if (refused := self._begin_stream(start_response)) is not None:
                        yield from self._problem(start_response, refused)
                        return
                yield last
            sent: Headers | Problem | Reply = self._settle(kept.whole)
        except BaseException as error:
            reply = self._failed(error)
            if reply is None or begun:
                raise
            _log.error("a keyed handler failed, and its failure is kept", exc_info=error)
            sent = reply
        finally:
            _close(result)
            if self._settled:
                self._body.close()
        if isinstance(sent, Reply):
            yield from _answer(start_response, sent)
            return
        if isinstance(sent, Problem):
            if begun:
                raise StoreUnavailable(
                    sent.kind.detail
                )  # cut off: its client must not take it for the outcome
            yield from self._problem(start_response, sent)
            return
        if not begun:
            start_response(_status_line(self._status), _text(sent))
        yield kept.last or b""

    def _begin_stream(self, start_response: StartResponse) -> Problem | None:
        if not self._status:
            raise RuntimeError(_NOT_STARTED)
        sent = run_sync(self._guard.started(self._run, self._status, self._headers))
        if isinstance(sent, Problem):
            self._settled = True
            return sent
        self._begun = True
        start_response(_status_line(self._status), _text(sent))
        return None


class _Stream:
    """What a server iterates and closes. Closed early (the client has left), it reads on to the end by itself."""

    def __init__(self, first: _First, pieces: Iterator[bytes]) -> None:
        self._first = first
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        for _ in self._pieces:
            pass
        reach("http.sent")


class _Closing:
    """A response that passes through, and the body to be closed after it."""

    def __init__(self, result: Iterable[bytes], body: Body) -> None:
        self._result = result
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._result)

    def close(self) -> None:
        _close(self._result)
        self._body.close()


def _joined(written: list[bytes], result: Iterable[bytes]) -> Iterator[bytes]:
    for piece in result:
        yield from written
        written.clear()
        yield piece
    yield from written


def _close(result: Any) -> None:
    close = getattr(result, "close", None)
    if close is not None:
        close()


def _status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


def _text(headers: Headers) -> list[tuple[str, str]]:
    return [(name.decode("latin-1").title(), value.decode("latin-1")) for name, value in headers]


def _answer(start_response: StartResponse, reply: Reply) -> list[bytes]:
    start_response(_status_line(reply.status), _text(reply.headers))
    return [reply.body]
