"""Views that return response objects (Flask, Django): run one under an admitted key, and record what it returns.

The framework tells what its response is through `Look`; everything else is the same for all of them, in both colours.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from semel.errors import StoreUnavailable
from semel.http.guard import Admitted, Guard
from semel.http.kept import Kept
from semel.http.problem import Problem
from semel.run import Run, _current
from semel.runtime import run_sync

__all__ = [
    "AsyncStream",
    "Headers",
    "Look",
    "Stream",
    "Unmade",
    "async_attended",
    "attended",
    "first_view",
    "recorded",
]

Headers = list[tuple[bytes, bytes]]


class Unmade(Exception):
    """The view has returned, and its framework can make no response of that: what it did cannot be undone, and is not done again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Look(Protocol):
    """How to read and change a framework's response."""

    def status(self, response: Any) -> int: ...

    def headers(self, response: Any) -> Headers: ...

    def set_headers(self, response: Any, headers: Headers) -> None: ...

    async def body(self, response: Any) -> bytes | None:
        """All of it; None for a stream. Of a plain view's response it never suspends."""
        ...

    def postponed(self, response: Any, guard: Guard, run: Run) -> bool:
        """It is not made yet, and will be recorded when it is."""
        ...

    def passing(self, response: Any) -> bool:
        """Nothing of the application has run: the framework itself knew no such route (H13)."""
        ...

    def tee(self, response: Any, guard: Guard, run: Run, headers: Headers) -> None:
        """Put a `Stream` or `AsyncStream` around the pieces of a stream."""
        ...

    def problem(self, guard: Guard, problem: Problem) -> Any: ...


async def first_view(guard: Guard, admitted: Admitted, view: Callable[[], Awaitable[Any]], look: Look) -> Any:
    """Run the view for the first time: its response is recorded, then returned. A plain view never suspends it."""
    run = guard.begin(admitted)
    token = _current.set(run.weak)
    response: Any = None
    try:
        if (problem := await guard.resumed(run)) is not None:
            return look.problem(guard, problem)
        response = await view()
        return (
            response if look.postponed(response, guard, run) else await recorded(guard, run, response, look)
        )
    except Unmade as unmade:
        await guard.replaced(run, 0)
        raise unmade.error from None
    except Exception as error:
        if response is None:
            await guard.fail(run, error)
        else:
            await guard.replaced(run, look.status(response))
        raise
    except BaseException as error:
        if (problem := await guard.lose(run, error)) is None:
            raise
        return look.problem(guard, problem)
    finally:
        _current.reset(token)


async def recorded(guard: Guard, run: Run, response: Any, look: Look) -> Any:
    """The view has returned: whatever we or the framework cannot do with its response, it is not run again."""
    try:
        body = await look.body(response)  # first: to make it may change the rest
        status, headers = look.status(response), look.headers(response)
        if body is None:
            sent = await guard.started(run, status, headers)
        else:
            sent = await guard.settle(run, status, headers, body, passing=look.passing(response))
        if isinstance(sent, Problem):
            return look.problem(guard, sent)
        if body is None:
            look.tee(response, guard, run, headers)
        look.set_headers(response, sent)
    except Exception:
        await guard.replaced(run, look.status(response))
        raise
    return response


def attended(run: Run, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces of a stream, each made where `current_run()` is its run: they come when the view has returned."""
    going = iter(pieces)
    while True:
        token = _current.set(run.weak)
        try:
            piece = next(going)
        except StopIteration:
            return
        finally:
            _current.reset(token)
        yield piece


async def async_attended(run: Run, pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    going = aiter(pieces)
    while True:
        token = _current.set(run.weak)
        try:
            piece = await anext(going)
        except StopAsyncIteration:
            return
        finally:
            _current.reset(token)
        yield piece


class _Ending:
    """How a stream ends: recorded whole, or as broken."""

    def __init__(self, guard: Guard, run: Run, status: int, headers: Headers) -> None:
        self._guard = guard
        self._run = run
        self._status = status
        self._headers = headers
        self.kept = Kept(guard.most)

    async def end(self) -> bytes:
        """Record the outcome; then the last piece may leave."""
        sent = await self._guard.settle(self._run, self._status, self._headers, self.kept.whole)
        if isinstance(sent, Problem):
            raise StoreUnavailable(sent.kind.detail)  # cut off: its client must not take it for the outcome
        return self.kept.last or b""

    async def broken(self, error: Exception) -> None:
        await self._guard.fail(self._run, error)


class Stream:
    """Pieces, one late: the last one leaves after the outcome is recorded (H19).

    Closed early, because its client has left, it reads on to the end by itself; `then` closes where they came from.
    """

    def __init__(
        self,
        guard: Guard,
        run: Run,
        status: int,
        headers: Headers,
        pieces: Iterable[bytes],
        then: Sequence[Callable[[], Any]] = (),
    ) -> None:
        self._ending = _Ending(guard, run, status, headers)
        self._pieces = attended(run, pieces)
        self._then = then
        self._going = self._go()

    def _go(self) -> Iterator[bytes]:
        try:
            for piece in self._pieces:
                last = self._ending.kept.push(piece)
                if last:
                    yield last
        except Exception as error:
            run_sync(self._ending.broken(error))
            raise
        yield run_sync(self._ending.end())

    def __iter__(self) -> Iterator[bytes]:
        return self._going

    def close(self) -> None:
        try:
            for _ in self._going:
                pass
        finally:
            for close in self._then:
                close()


class AsyncStream:
    """The same for pieces that come asynchronously.

    Left early, by a sender that was cancelled or by `close`, which may come from any thread, it goes on by itself.
    """

    def __init__(
        self,
        guard: Guard,
        run: Run,
        status: int,
        headers: Headers,
        pieces: AsyncIterable[bytes],
        then: Sequence[Callable[[], Any]] = (),
    ) -> None:
        self._ending = _Ending(guard, run, status, headers)
        self._runtime = run._engine.runtime  # noqa: SLF001 - our own run
        self._pieces = async_attended(run, pieces)
        self._then = then
        self._going = self._go()
        self._step: asyncio.Task[bytes | None] | None = None
        self._left = False
        self._loop = asyncio.get_running_loop() if self._runtime.colour == "async" else None

    async def _go(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces:
                last = self._ending.kept.push(piece)
                if last:
                    yield last
        except Exception as error:
            await self._ending.broken(error)
            raise
        yield await self._ending.end()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._loop is None:
            return await anext(self._going)
        self._step = self._loop.create_task(_next(self._going))
        try:
            piece = await asyncio.shield(self._step)
        except asyncio.CancelledError:
            self._leave()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._runtime.background(self._rest())

    async def _rest(self) -> None:
        try:
            if self._step is not None:
                await asyncio.wait((self._step,))
            async for _ in self._going:
                pass
        finally:
            for close in self._then:
                close()


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    """A task cannot end with StopAsyncIteration."""
    return await anext(pieces, None)
