"""The sync colour in virtual time: every caller of `Semel` is a greenlet that stands still where a thread would block.

What a thread can be stopped at *between* two blocking calls, a greenlet cannot: the races of locks and bytecodes are not
in here, they are sought by storms of real threads. Everything else is the real sync body, face and layers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import greenlet

from semel.flow import Engine
from semel.keys import Scope
from semel.loop import _LoopParker
from semel.model import Answer, Ask, Note, Record, Renewal, Settle, Verdict
from semel.once import Semel
from semel.runtime import Parker, ThreadRuntime, Ticker, run_sync, ticked
from semel.store import Capabilities, Colour, Facts, Page, Query, Unwatch
from semel.testing.simulation.stores import Link

__all__ = ["GreenFace", "blocking", "in_greenlet", "plainly"]

T = TypeVar("T")


def blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end inside a greenlet; whenever it waits, the greenlet stands still."""
    parent = greenlet.getcurrent().parent
    if parent is None:
        raise AssertionError("only a greenlet of the simulator may block")
    error: BaseException | None = None
    while True:
        try:
            waits_for = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            value: T = stop.value
            return value
        try:
            parent.switch(waits_for)
            error = None
        except BaseException as raised:  # noqa: BLE001 - it belongs to the coroutine
            error = raised


async def in_greenlet(coroutine: Coroutine[Any, Any, T]) -> T:
    """Give a coroutine a greenlet of its own, as a thread pool would give it a thread."""
    child: Any = greenlet.greenlet(blocking)
    child.gr_context = greenlet.getcurrent().gr_context
    waits_for = child.switch(coroutine)
    while not child.dead:
        try:
            await _ready(waits_for)
        except asyncio.CancelledError as error:  # a time-out of the coroutine's own
            waits_for = child.throw(error)
        else:
            waits_for = child.switch()
    result: T = waits_for
    return result


async def _ready(future: asyncio.Future[Any] | None) -> None:
    """Wait for what a coroutine waits for. Its error, if any, is told to whoever reads it there."""
    if future is None:
        await asyncio.sleep(0)
        return
    # It was yielded to us instead of to the task: it counts as not waited for yet.
    future._asyncio_future_blocking = False
    await asyncio.wait((future,))


def plainly(fn: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    """A coroutine function as a plain one."""
    return blocking(fn(*args))


class _Parker:
    """A seat on which a greenlet sits."""

    __slots__ = ("_inner",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = _LoopParker(loop)

    def wake(self) -> None:
        self._inner.wake()

    async def park(self, timeout: float) -> bool:
        return blocking(self._inner.park(timeout))


class _Ticker:
    def __init__(self, runtime: _Runtime, tick: Callable[[], Coroutine[Any, Any, float | None]]) -> None:
        self._runtime, self._tick = runtime, tick
        self._timer: asyncio.TimerHandle | None = None
        self._when = 0.0

    def at(self, when: float) -> None:
        if self._timer is not None:
            if self._when <= when:
                return
            self._timer.cancel()
        self._when = when
        self._timer = self._runtime.loop.call_later(max(0.0, when - self._runtime.now()), self._start)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._timer = None
        self._runtime.background(self._run())

    async def _run(self) -> None:
        again = await ticked(self._tick, self._runtime.now)
        if again is not None:
            self.at(again)


class _Runtime(ThreadRuntime):
    def __init__(self, loop: asyncio.AbstractEventLoop, entropy: Callable[[int], bytes]) -> None:
        super().__init__()
        self.loop = loop
        self._entropy = entropy
        self._tasks: set[asyncio.Task[Any]] = set()

    def now(self) -> float:
        return self.loop.time()

    def entropy(self, size: int) -> bytes:
        return self._entropy(size)

    async def sleep(self, seconds: float) -> None:
        blocking(asyncio.sleep(seconds))

    def parker(self) -> Parker:
        return _Parker(self.loop)

    def ticker(self, tick: Callable[[], Coroutine[Any, Any, float | None]]) -> Ticker:
        return _Ticker(self, tick)

    def background(self, coroutine: Coroutine[Any, Any, object]) -> None:
        task = self.loop.create_task(in_greenlet(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def join(self, threads: Collection[Any]) -> None:
        """Nobody leaves a call before it has ended."""


class _Blocking:
    """A worker's link as a sync store: every verb blocks its caller."""

    colour: Colour = "sync"

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def capabilities(self) -> Capabilities:
        return self._link.capabilities

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return blocking(self._link.claim(asks))

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return blocking(self._link.settle(ends))

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        return blocking(self._link.renew(renewals))

    async def note(self, note: Note) -> Answer:
        return blocking(self._link.note(note))

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        return blocking(self._link.peek(scope))

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        return blocking(self._link.watch(scope, wake))

    async def scan(self, query: Query) -> Page:
        return blocking(self._link.scan(query))

    async def purge(self, limit: int) -> int:
        return blocking(self._link.purge(limit))

    async def facts(self) -> Facts:
        return run_sync(self._link.facts())

    async def aclose(self) -> None:
        """Nothing is open."""


class GreenFace(Semel):
    """`Semel` itself, in a world of greenlets."""

    def __init__(self, link: Link, entropy: Callable[[int], bytes], **settings: Any) -> None:
        self._entropy = entropy
        super().__init__(_Blocking(link), **settings)
        self._warned = True  # the loop that runs is the simulator's own

    def _make_engine(self) -> Engine:
        if self._made is None:
            self._made = self._engine_for(_Runtime(asyncio.get_running_loop(), self._entropy))
        return self._made
