"""An asyncio loop without time or chance of its own: a virtual clock, and workers that can die or stand still.

First in, first out, as asyncio promises; what varies between two seeds is how long things take, never the order of
callbacks that are due at once. So a seed gives the same trace on every Python version, whatever the number of internal
callbacks is there.

A worker may have a clock of its own (`set_clock`): then `time()` and every timer inside that worker go by it, as they
would in a process on another machine, while messages under way and the server go by the one true time, `now`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, ClassVar, TypeVarTuple, Unpack

__all__ = ["Clock", "Deadlock", "Livelock", "SimLoop", "worker_tag"]

_Args = TypeVarTuple("_Args")

worker_tag: ContextVar[str] = ContextVar("semel_sim_worker", default="")


class Deadlock(AssertionError):
    """Everybody waits and nothing is due: in the real world this would hang for ever."""


class Livelock(AssertionError):
    """Somebody is always busy and nobody gets anywhere: in the real world this would take a whole core for ever."""


MOST_CALLBACKS = 200_000
"""In one world: a hundred times what a busy one takes."""


class Clock:
    """A worker's own clock: where it began, how fast it goes, and what it has jumped since."""

    __slots__ = ("offset", "rate")

    def __init__(self, offset: float = 0.0, rate: float = 1.0) -> None:
        self.offset, self.rate = offset, rate

    def shown(self, now: float) -> float:
        return now * self.rate + self.offset

    def comes(self, when: float) -> float:
        """The true time at which this clock will show `when`, or a little more: never less, or its timer would be due
        again at the same moment, for ever."""
        true = (when - self.offset) / self.rate
        while self.shown(true) < when:
            true += 1e-12
        return true


class SimLoop(asyncio.BaseEventLoop):
    """`kill` and `pause` act on every callback of a worker, told apart by `worker_tag` in its context."""

    # What the dead left behind. Finalizing a coroutine would run its `finally` blocks, which a killed process never
    # does: the runner ends its processes with os._exit.
    graveyard: ClassVar[list[object]] = []

    # BaseEventLoop's own, not in its stubs; a test on every supported Python says whether they are still there.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.callbacks = 0
        self._dead: set[str] = set()
        self._paused: dict[str, list[asyncio.Handle]] = {}
        self._clocks: dict[str, Clock] = {}

    def time(self) -> float:
        """What the clock of the worker that asks shows; the true time is `now`."""
        if self._clocks and (clock := self._clocks.get(worker_tag.get())) is not None:
            return clock.shown(self.now)
        return self.now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Args]], object],
        *args: *_Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if self._clocks and (clock := self._clocks.get(worker_tag.get())) is not None:
            when = clock.comes(when)
        return super().call_at(when, callback, *args, context=context)

    def set_clock(self, tag: str, clock: Clock) -> None:
        self._clocks[tag] = clock

    def jump(self, tag: str, span: float) -> None:
        """A worker's clock is set forward or back: its timers, which go by it, are due so much sooner or later."""
        clock = self._clocks.setdefault(tag, Clock())
        clock.offset += span
        for timer in self._scheduled:
            if timer._context.get(worker_tag) == tag:  # type: ignore[attr-defined]  # asyncio's own timer
                moved = timer.when() - span / clock.rate
                timer._when = max(self.now, moved)  # type: ignore[attr-defined]  # asyncio's own timer
        heapq.heapify(self._scheduled)

    def kill(self, tag: str) -> None:
        """From now on nothing of this worker runs, not even its clean-up."""
        self._dead.add(tag)
        self.graveyard.extend(self._paused.pop(tag, ()))
        self.graveyard.extend(task for task in asyncio.all_tasks(self) if _tag_of(task) == tag)

    def is_dead(self, tag: str) -> bool:
        return tag in self._dead

    def is_stopped(self, tag: str) -> bool:
        return tag in self._dead or tag in self._paused

    def pause(self, tag: str) -> None:
        self._paused.setdefault(tag, [])

    def resume(self, tag: str) -> None:
        self._ready.extend(self._paused.pop(tag, ()))

    # ------------------------------------------------------------------------------- BaseEventLoop's inner side

    def _run_once(self) -> None:
        if not self._ready and not self._advance():
            if self._stopping:
                return
            raise Deadlock(f"at {self.now:.6f} everybody waits and nothing is due")
        self.callbacks += 1
        if self.callbacks > MOST_CALLBACKS:
            raise Livelock(f"at {self.now:.6f} after {MOST_CALLBACKS:,} callbacks nobody has come to rest")
        handle: Any = self._ready.popleft()
        if handle.cancelled():
            return
        tag: str = handle._context.get(worker_tag, "")
        if tag in self._dead:
            self.graveyard.append(handle)
        elif tag in self._paused:
            self._paused[tag].append(handle)
        else:
            handle._run()

    def _advance(self) -> bool:
        """Jump to the next timer; False when there is none."""
        timers = self._scheduled
        while timers:
            timer: Any = heapq.heappop(timers)
            timer._scheduled = False
            if timer.cancelled():
                self._timer_cancelled_count -= 1
                continue
            self.now = max(self.now, timer.when())
            self._ready.append(timer)
            return True
        return False

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """There is no other thread to be woken by."""


def _tag_of(task: asyncio.Task[Any]) -> str:
    # Tasks tell their context from Python 3.12 on. Before, a worker's own task is known by its name; it holds the others.
    known: Any = getattr(task, "get_context", None)
    return task.get_name() if known is None else str(known().get(worker_tag, ""))
