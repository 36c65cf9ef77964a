"""The middleware for ASGI applications: Starlette, FastAPI, Litestar, Quart, Django and plain ones.

    app = IdempotencyMiddleware(app, once=once, principal=user_id, authorize=may_proceed)

A request without a key, or of a route that did not opt in, passes untouched and unbuffered. A replay never enters the
application. A first execution runs detached from its connection: a client that leaves changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Unpack

from semel.http.body import Body
from semel.http.capture import Capture, answer, looked_at, loop_of
from semel.http.config import Plan, configure
from semel.http.guard import Admitted, Guard
from semel.http.intake import Ready, get_ready, refused
from semel.http.options import MiddlewareOptions
from semel.http.problem import Problem
from semel.http.reply import Reply
from semel.http.scope import (
    App,
    ClientLeft,
    Message,
    PlainRequest,
    Receive,
    Scope,
    ScopeRequest,
    Send,
)
from semel.once import AsyncSemel
from semel.points import reach
from semel.run import Run

__all__ = ["IdempotencyMiddleware", "PlainRequest"]


class IdempotencyMiddleware:
    """See `semel.http.config` for the options; `once` is an AsyncSemel."""

    def __init__(self, app: App, *, once: AsyncSemel, **options: Unpack[MiddlewareOptions]) -> None:
        self.app = app
        self._plan: Plan = configure(once, "async", options, guarded=False)
        self._running: dict[asyncio.Future[None], asyncio.Task[None]] = {}
        """First executions, by what tells of their end: a loop keeps weak references only."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind != "http":
            await self.app(scope, self._draining(receive) if kind == "lifespan" else receive, send)
            return
        try:
            entered = await get_ready(self._plan, ScopeRequest(scope, receive))
        except ClientLeft:
            return
        if isinstance(entered, Ready):  # as `enter`, without a coroutine more around the wait for the store
            try:
                admitted = await entered.guard.admit(entered.keyed)
            except BaseException:
                entered.body.close()
                raise
            if isinstance(admitted, Admitted):
                # In a task of its own, which nobody can cancel from here. A plain future tells its end: a shield would be
                # three more objects for each request.
                loop = loop_of(admitted.engine)
                ended: asyncio.Future[None] = loop.create_future()
                task = loop.create_task(self._first(entered, admitted, scope, send, ended))
                if not ended.done():  # else it was an eager task, and is over
                    self._running[ended] = task
                await ended
                return
            entered = refused(entered, admitted)
        if entered is None:
            await self.app(scope, receive, send)
        elif type(entered) is Reply:  # as `answer`, without a coroutine more
            await send({"type": "http.response.start", "status": entered.status, "headers": entered.headers})
            await send({"type": "http.response.body", "body": entered.body})
        elif isinstance(entered, Body):
            with entered:
                await self.app(scope, _Replayed(entered, receive).receive, send)

    async def _first(
        self, ready: Ready, admitted: Admitted, scope: Scope, send: Send, ended: asyncio.Future[None]
    ) -> None:
        guard, body = ready.guard, ready.body
        try:
            run = admitted.engine.begin(admitted.call, admitted.ask, admitted.record)
            if admitted.record.steps:  # as `run.has_steps`, before it has any of its own
                problem = await _resumed(guard, run)
                if problem is not None:
                    await answer(send, guard.replies.problem(problem))
                    return
            else:
                reach("run.started")  # all that `resumed` does then, without the coroutine
            capture = Capture(guard, run, scope, send, body)
            try:  # as `Capture.around`, without a coroutine more around the application
                await capture.of(self.app)
                capture.check()
            except BaseException as error:
                if not await capture.failed(error):
                    raise
            finally:
                capture.finish()
        except Exception as error:  # noqa: BLE001 - given to whoever waits for it
            if ended.done():
                looked_at(error)
            else:
                ended.set_exception(error)
        except BaseException:  # the process is ending
            ended.cancel()
            raise
        finally:
            body.close()
            self._running.pop(ended, None)
            if not ended.done():
                ended.set_result(None)

    def _draining(self, receive: Receive) -> Receive:
        async def receive_lifespan() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self._running:
                # Handlers whose clients have left: let them end, so that their outcomes are recorded.
                await asyncio.wait(set(self._running.values()), timeout=10.0)
            return message

        return receive_lifespan


async def _resumed(guard: Guard, run: Run) -> Problem | None:
    """Whatever goes wrong here, the key must not stay ours for as long as the process lives (H16)."""
    try:
        return await guard.resumed(run)
    except Exception:
        raise  # and settled
    except BaseException as error:
        await guard.lose(run, error)
        raise


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
