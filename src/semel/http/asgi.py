"""The middleware for ASGI applications: Starlette, FastAPI, Litestar, Quart, Django and plain ones.

    app = IdempotencyMiddleware(app, once=once, principal=user_id, authorize=may_proceed)

A request without a key, or of a route that did not opt in, passes untouched and unbuffered. A replay never enters the
application. A first execution runs detached from its connection: a client that leaves changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final, NoReturn

from semel.errors import StoreUnavailable
from semel.http.body import Body, TooLarge
from semel.http.config import Plan, configure
from semel.http.guard import Admitted, Guard
from semel.http.intake import Asked, identify, keyed_of
from semel.http.problem import Problem
from semel.http.reply import first_headers, problem_reply, replay_reply
from semel.http.rules import Word
from semel.http.snapshot import Snapshot
from semel.points import reach
from semel.run import Run, _current

__all__ = ["IdempotencyMiddleware", "PlainRequest"]

_log = logging.getLogger("semel.http")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# Ways around the body that we must see.
_BYPASSES: Final = frozenset(
    {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}
)
_GONE: Final[Message] = {"type": "http.disconnect"}


class IdempotencyMiddleware:
    """See `semel.http.config` for the options; `once` is an AsyncSemel."""

    def __init__(self, app: App, *, once: Any, **options: Any) -> None:
        self.app = app
        self._plan: Plan = configure(once, "async", options, guarded=False)
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked = identify(self._plan, _Incoming(scope))
            if asked is None:
                await self.app(scope, receive, send)
            elif isinstance(asked, Problem):
                await _send_problem(send, self._problem_base(scope), asked)
            else:
                await self._keyed(asked, scope, receive, send)
        elif scope["type"] == "lifespan":
            await self.app(scope, self._draining(receive), send)
        else:
            await self.app(scope, receive, send)

    def _problem_base(self, scope: Scope) -> str:
        found = self._plan.guard_for(scope["method"], _Incoming(scope).routed)
        assert found is not None  # noqa: S101 - a problem has a guard that said so
        return found[0].rules.problem_base

    async def _keyed(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        guard = asked.guard
        base = guard.rules.problem_base
        try:
            known = await keyed_of(self._plan, asked, _Incoming(scope), lambda: _read(guard, scope, receive))
        except _ClientLeft:
            return
        if isinstance(known, Problem):
            await _send_problem(send, base, known)
        elif isinstance(known, Body):
            with known:
                await self.app(scope, _Replayed(known, receive).receive, send)
        else:
            keyed, body = known
            admitted = await guard.admit(keyed)
            if isinstance(admitted, Admitted):
                await self._detached(self._run(guard, admitted, scope, body, send))
                return
            with body:
                if admitted is None:  # fail_open
                    await self.app(scope, _Replayed(body, receive).receive, send)
                elif isinstance(admitted, Snapshot):
                    await _answer(send, admitted.status, *replay_reply(guard.rules, admitted))
                else:
                    await _send_problem(send, base, admitted)

    async def _detached(self, running: Any) -> None:
        task = asyncio.get_running_loop().create_task(running)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_looked_at)  # the caller has left; the handler goes on
            raise

    async def _run(self, guard: Guard, admitted: Admitted, scope: Scope, body: Body, send: Send) -> None:
        run = guard.begin(admitted)
        with body:
            if (problem := await guard.resumed(run)) is not None:
                await _send_problem(send, guard.rules.problem_base, problem)
            else:
                await _Capture(guard, run, send, body).around(self.app, _plain(scope))

    def _draining(self, receive: Receive) -> Receive:
        async def receive_lifespan() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self._running:
                # Handlers whose clients have left: let them end, so that their outcomes are recorded.
                await asyncio.wait(set(self._running), timeout=10.0)
            return message

        return receive_lifespan


# ------------------------------------------------------------------------------------------------------ requests


class _Incoming:
    __slots__ = ("_scope", "method", "path", "query", "routed")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        root = scope.get("root_path", "").rstrip("/")
        self.routed = self.path[len(root) :] if root and self.path.startswith(f"{root}/") else self.path
        self.query: bytes = scope.get("query_string", b"")

    def lines(self, name: str) -> list[bytes]:
        wanted = name.encode("latin-1")
        return [value for known, value in self._scope["headers"] if known == wanted]

    def request(self) -> Any:
        return _Request(self._scope)


class PlainRequest:
    """What resolvers get where Starlette is not installed: `scope`, `method`, `path` and `headers`."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


try:
    from starlette.requests import Request as _Request
except ModuleNotFoundError:
    _Request = PlainRequest  # type: ignore[assignment,misc]


class _ClientLeft(Exception):
    """Before the body was complete: there is nothing to do, and nobody to tell."""


async def _read(guard: Guard, scope: Scope, receive: Receive) -> Body | Problem:
    del scope
    body = Body(guard.rules.max_body)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            body.close()
            raise _ClientLeft
        try:
            body.feed(message.get("body", b""))
        except TooLarge:
            return Problem.of("body-too-large", limit=guard.rules.max_body)
        if not message.get("more_body", False):
            return body


class _Replayed:
    """The body again, for the application; then whatever the connection says."""

    def __init__(self, body: Body, rest: Receive) -> None:
        self._chunks: Iterator[bytes] | None = body.chunks()
        self._rest = rest

    async def receive(self) -> Message:
        if self._chunks is not None:
            chunk = next(self._chunks, None)
            if chunk is not None:
                return {"type": "http.request", "body": chunk, "more_body": True}
            self._chunks = None
            return {"type": "http.request", "body": b"", "more_body": False}
        return await self._rest()


def _plain(scope: Scope) -> Scope:
    extensions = scope.get("extensions")
    if not extensions or _BYPASSES.isdisjoint(extensions):
        return scope
    kept = {name: value for name, value in extensions.items() if name not in _BYPASSES}
    return {**scope, "extensions": kept}


# ----------------------------------------------------------------------------------------------------- responses


class _Capture:
    """Stands between the application and its connection: nothing is sent before the outcome is recorded.

    A response of one piece is recorded whole, then sent. Of a longer one it is recorded that it has begun, then it is
    sent piece by piece and kept meanwhile, and recorded whole before its last piece is sent (H19).
    """

    def __init__(self, guard: Guard, run: Run, send: Send, body: Body) -> None:
        self.settled = False
        self._guard = guard
        self._run = run
        self._send = send
        self._chunks = body.chunks()
        self._body_read = False
        self._finished: asyncio.Event | None = None
        self._over = False
        self._status = 0
        self._headers: Headers = []
        self._streaming = False
        self._kept: list[bytes] | None = []
        self._size = 0
        self._left = False
        self._sender: asyncio.Task[Any] | None = None
        self._scope: Scope = {}
        self._word: Word = "release"

    async def around(self, app: App, scope: Scope) -> None:
        """Run an application, or a response, to its end, and settle what became of it."""
        guard, run = self._guard, self._run
        self._scope = scope
        token = _current.set(run.weak)
        try:
            await app(scope, self.receive, self.send)
            if not self.settled:
                raise RuntimeError("the application returned without a complete response")
        except Exception as error:
            if not self.settled:
                self.settled = True
                await guard.fail(run, error)
            raise
        except BaseException as error:
            if not self.settled:
                self.settled = True
                await guard.lose(run, error)
            raise
        finally:
            _current.reset(token)
            self.finish()

    async def receive(self) -> Message:
        if not self._body_read:
            chunk = next(self._chunks, None)
            if chunk is not None:
                return {"type": "http.request", "body": chunk, "more_body": True}
            self._body_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        if not self._over:
            # The client's leaving is not told: it must not change the outcome.
            if self._finished is None:
                self._finished = asyncio.Event()
            await self._finished.wait()
        return _GONE

    def finish(self) -> None:
        self._over = True
        if self._finished is not None:
            self._finished.set()

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self._status = message["status"]
            self._headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
        elif kind == "http.response.body":
            await self._piece(bytes(message.get("body", b"")), more=bool(message.get("more_body", False)))
        else:
            await self._forward(message)

    async def _piece(self, piece: bytes, *, more: bool) -> None:
        if self.settled:
            raise RuntimeError("the response is complete: nothing may follow it")
        self._keep(piece)
        if more:
            if not self._streaming:
                problem = await self._guard.started(self._run, self._status, self._headers)
                if problem is not None:
                    await self._instead(problem)
                self._streaming = True
                self._word = self._guard.word(self._status, self._headers, None)
                await self._start()
            await self._forward({"type": "http.response.body", "body": piece, "more_body": True})
            return
        body = None if self._kept is None else b"".join(self._kept)
        self._kept = None
        passing = self._is_unmatched()
        self._word = self._guard.word(self._status, self._headers, body, passing=passing)
        problem = await self._guard.settle(self._run, self._status, self._headers, body, passing=passing)
        self.settled = True
        if problem is not None:
            await self._instead(problem)
        if not self._streaming:
            await self._start()
        await self._forward({"type": "http.response.body", "body": piece})
        reach("http.sent")
        self.finish()

    def _is_unmatched(self) -> bool:
        """Starlette's router found no route: nothing of the application has run (H13)."""
        return "router" in self._scope and "endpoint" not in self._scope

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._guard.rules.max_response:
            self._kept = None
        elif self._kept is not None and piece:
            self._kept.append(piece)

    async def _start(self) -> None:
        headers = first_headers(self._guard.rules, self._word, self._headers)
        await self._forward({"type": "http.response.start", "status": self._status, "headers": headers})

    async def _instead(self, problem: Problem) -> NoReturn:
        """The response must not be taken for the outcome: answer the problem, or leave a stream unfinished.

        Raises: what would follow the response (background tasks, the rest of a stream) must not happen here.
        """
        self.settled = True
        if not self._streaming:
            headers, body = problem_reply(self._guard.rules.problem_base, problem)
            await self._forward({"type": "http.response.start", "status": problem.status, "headers": headers})
            await self._forward({"type": "http.response.body", "body": body})
        self.finish()
        raise StoreUnavailable(
            f"semel answered {problem.kind.name} in place of the response: {problem.kind.detail}"
        )

    async def _forward(self, message: Message) -> None:
        """Send, as long as somebody listens. Whatever the connection says, it is not the handler's outcome."""
        if self._left:
            return
        sender = self._sender = asyncio.current_task()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if sender is None or not self._is_leaving():  # not by `leave`: the process is ending
                raise
            sender.uncancel()
        except OSError:
            self._left = True
        except Exception:  # noqa: BLE001 - whatever the connection says, it is not the handler's outcome
            self._left = True
            _log.warning("the connection failed while a keyed response was sent", exc_info=True)
        finally:
            self._sender = None

    def _is_leaving(self) -> bool:
        return self._left

    def leave(self) -> None:
        """The caller was cancelled: nothing more is sent, also not what is being sent now."""
        self._left = True
        if self._sender is not None:
            self._sender.cancel()


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_problem(send: Send, base: str, problem: Problem) -> None:
    await _answer(send, problem.status, *problem_reply(base, problem))


def _looked_at(task: asyncio.Task[None]) -> None:
    """The caller has left: its server will not report what the handler raises."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a keyed handler failed after its client had left", exc_info=error)
