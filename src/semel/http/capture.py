"""Between an ASGI application and its connection: nothing is sent before the outcome is recorded.

A response of one piece is recorded whole, then sent. Of a longer one it is recorded that it has begun, then it is sent
piece by piece and kept meanwhile, and recorded whole before its last piece is sent (H19).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Iterator
from typing import Any, Final, NoReturn

from semel.errors import StoreUnavailable
from semel.flow import Engine
from semel.http.body import Body
from semel.http.guard import Guard
from semel.http.kept import Kept
from semel.http.problem import Problem
from semel.http.reply import Reply
from semel.http.routers import asgi_unrouted
from semel.http.scope import App, Headers, Message, Scope, Send, without_bypasses
from semel.points import reach
from semel.run import Run, _current

__all__ = ["Capture", "answer", "looked_at", "loop_of"]

_log = logging.getLogger("semel.http")
_GONE: Final[Message] = {"type": "http.disconnect"}


class Capture:
    """One run of an application, or of a response, in a task of its own that the connection cannot cancel."""

    __slots__ = (
        "_body", "_chunks", "_finished", "_guard", "_headers", "_kept", "_left", "_loop", "_over", "_run", "_scope",
        "_send", "_sender", "_status", "_told", "overtaken", "settled",
    )  # fmt: skip

    def __init__(
        self, guard: Guard, run: Run, scope: Scope, send: Send, body: Body | None, *, can_leave: bool = False
    ) -> None:
        """`can_leave`: `leave` may be called."""
        self.settled = False
        self.overtaken = False
        """Another owner has the key: what the application can still undo is not to stand."""
        self._told: Exception | None = None
        """What the application was told where a problem was sent whole in place of its response."""
        self._scope = without_bypasses(scope)
        self._guard = guard
        self._run = run
        self._send = send
        self._loop = loop_of(run._engine) if can_leave else None  # noqa: SLF001 - our own
        self._body = body
        """To be given to the application; None when it has been."""
        self._chunks: Iterator[bytes] | None = None
        self._finished: asyncio.Event | None = None
        self._over = False
        self._status = 0
        self._headers: Headers = []
        self._kept: Kept | None = None
        """Of a response that comes in several pieces."""
        self._left = False
        self._sender: asyncio.Task[Any] | None = None

    async def around(self, app: App) -> None:
        """Run it to its end, and settle what became of it. Whoever is overtaken hears of it: dependencies may roll back."""
        try:
            await self.of(app)
            self.check()
        except BaseException as error:
            if not await self.failed(error) or self.overtaken:
                raise
        finally:
            self.finish()

    def of(self, app: App) -> Awaitable[None]:
        """What the application does with the request. Its end must be told: see `around`."""
        _current.set(self._run.weak)  # never reset: the task is ours, and ends with this
        return app(self._scope, self.receive, self.send)

    def check(self) -> None:
        """The application has returned."""
        if not self.settled:
            raise RuntimeError("the application returned without a complete response")

    async def failed(self, error: BaseException) -> bool:
        """Settle a run that did not end with a response. True: it was answered, and is no error of the server's."""
        if self.settled:
            said = self._told
            if said is None or not isinstance(error, Exception) or not _comes_from(said, error):
                return False
            if error is not said:  # perhaps a failure of its own: nobody else reports it
                _log.warning("the application failed when its response was not sent", exc_info=error)
            return True
        self.settled = True
        if isinstance(error, Exception):
            reply = await self._guard.fail(self._run, error)
            if reply is not None and self._kept is None:
                await answer(self._forward, reply)  # and the error goes on to whoever reports it
            return False
        problem = await self._guard.lose(self._run, error)
        if problem is None:
            return False
        # Cancelled by us, because another owner has the key: that is an answer.
        if self._kept is not None:
            raise StoreUnavailable(f"the response was cut off: {problem.kind.detail}") from error
        await self._reply(problem)
        return True

    # ------------------------------------------------------------------------------------------ what the application asks
    async def receive(self) -> Message:
        body = self._body
        if body is not None:
            if self._chunks is None and (whole := body.in_one or body.whole) is not None:
                self._body = None
                return {"type": "http.request", "body": whole, "more_body": False}
            return self._next_piece(body)
        if not self._over:
            # The client's leaving is not told: it must not change the outcome.
            if self._finished is None:
                self._finished = asyncio.Event()
            await self._finished.wait()
        return _GONE

    def _next_piece(self, body: Body) -> Message:
        if self._chunks is None:
            self._chunks = body.chunks()
        chunk = next(self._chunks, None)
        if chunk is not None:
            return {"type": "http.request", "body": chunk, "more_body": True}
        self._body = None
        return {"type": "http.request", "body": b"", "more_body": False}

    def finish(self) -> None:
        """Whoever listens for the client hears that it has gone."""
        self._over = True
        if self._finished is not None:
            self._finished.set()

    # ------------------------------------------------------------------------------------------ what the application says
    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self._status = message["status"]
            self._headers = _lines(message.get("headers", ()))
        elif kind != "http.response.body":
            await self._forward(message)
        elif self.settled:
            raise RuntimeError("the response is complete: nothing may follow it")
        elif not self._status:
            raise RuntimeError("the application sent a body before the start of its response")
        elif message.get("more_body", False):
            await self._go_on(bytes(message.get("body", b"")))
        else:
            piece = bytes(message.get("body", b""))
            # The wait for the store is at the bottom of the application's whole stack: no coroutine more than needed.
            body = piece if self._kept is None else self._whole(piece)
            passing = asgi_unrouted(self._scope, self._status)
            sent = await self._guard.settle(self._run, self._status, self._headers, body, passing=passing)
            self.settled = True
            if isinstance(sent, Problem):
                await self._instead(sent)
            last = {"type": "http.response.body", "body": piece}
            if self._kept is None:
                await self._forward(self._start(sent), last)
            else:
                await self._forward(last)
            reach("http.sent")
            self.finish()

    def _whole(self, last: bytes) -> bytes | None:
        kept = self._kept
        assert kept is not None  # noqa: S101 - it came in several pieces
        kept.push(last)
        return kept.whole

    async def _go_on(self, piece: bytes) -> None:
        if self._kept is None:
            sent = await self._guard.started(self._run, self._status, self._headers)
            if isinstance(sent, Problem):
                await self._instead(sent)
            self._kept = Kept(self._guard.most)
            await self._forward(self._start(sent))
        self._kept.push(piece)
        await self._forward({"type": "http.response.body", "body": piece, "more_body": True})

    def _start(self, headers: Headers) -> Message:
        return {"type": "http.response.start", "status": self._status, "headers": headers}

    async def _instead(self, problem: Problem) -> NoReturn:
        """The response must not be taken for the outcome: answer the problem, or leave a stream unfinished.

        Raises: what would follow the response (background tasks, the rest of a stream) must not happen here.
        """
        self.settled = True
        said = StoreUnavailable(
            f"semel answered {problem.kind.name} in place of the response: {problem.kind.detail}"
        )
        if self._kept is None:
            await self._reply(problem)
            self._told = said
            self.overtaken = problem.kind.name == "in-progress"
        self.finish()
        raise said

    async def _reply(self, problem: Problem) -> None:
        await answer(self._forward, self._guard.replies.problem(problem))

    # --------------------------------------------------------------------------------------------------- the connection
    async def _forward(self, *messages: Message) -> None:
        """Send, as long as somebody listens. Whatever the connection says, it is not the handler's outcome."""
        sender = None
        if self._loop is not None:
            sender = self._sender = asyncio.current_task(self._loop)
        try:
            for message in messages:
                if not self._left:
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


def _lines(given: Iterable[Any]) -> Headers:
    """Headers of our own. ASGI takes any pairs of anything like bytes; nearly always they are tuples of bytes, and stay."""
    lines = list(given)
    for pair in lines:
        if type(pair) is not tuple or len(pair) != 2 or not type(pair[0]) is type(pair[1]) is bytes:
            return [(bytes(name), bytes(value)) for name, value in lines]
    return lines


def _comes_from(said: Exception, error: BaseException) -> bool:
    """Whether an application has raised what it was told, or something else because of it."""
    seen: set[int] = set()  # an error may be its own cause, over others
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None or id(link) in seen:
            continue
        if link is said or (isinstance(link, BaseExceptionGroup) and link.subgroup(lambda one: one is said)):
            return True
        seen.add(id(link))
        links += (link.__cause__, link.__context__)
    return False


def loop_of(engine: Engine) -> asyncio.AbstractEventLoop:
    """An async engine's own. To ask asyncio for the running one costs a system call before Python 3.12."""
    loop: asyncio.AbstractEventLoop = engine.runtime.loop  # type: ignore[attr-defined]  # LoopRuntime has it
    return loop


async def answer(send: Send, reply: Reply) -> None:
    """One start, one body."""
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    await send({"type": "http.response.body", "body": reply.body})


def looked_at(error: BaseException) -> None:
    """The caller has left: its server will not report what the handler raises."""
    _log.error("a keyed handler failed after its client had left", exc_info=error)
