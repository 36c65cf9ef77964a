"""How long a keyed request lets its store think before it is refused (H34): a caller must not hang on a store that is gone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from concurrent import futures
from contextvars import copy_context
from typing import Any, Final, TypeVar

from semel.calls import Call
from semel.errors import StoreUnavailable
from semel.flow import Engine
from semel.forks import survive_fork
from semel.keys import Scope
from semel.model import Ask, Record, Verdict, Won
from semel.running import clock_of, runs_here
from semel.runtime import run_sync

__all__ = ["Budget"]

T = TypeVar("T")
_FIRST: Final = 3.0  # times as long for the first answer: connections and tables are made then
_ASLEEP: Final = 0.05
_THREADS: Final = 64


class Budget:
    """Claims within so many seconds, whatever the store's own timeout is; StoreUnavailable afterwards.

    A claim that is given up is released in the background, should it have been granted. A blocking one cannot be cut
    short: it is made by a thread of ours, and left there. Where the store gives up as early by itself nobody is needed.
    """

    def __init__(self, seconds: float, own: float) -> None:
        self._seconds = seconds
        self._own = own
        self.has_answered = False
        """For whoever `begin`s to say."""
        self._watching: _Watch | None = None

    def begin(self, engine: Engine) -> tuple[_Watch | None, asyncio.Task[Any] | None, int]:
        """Watch the running task from here on: the watch, which is to be told the end, the task, and how often that is
        cancelled already. Nothing: nobody needs to be watched, or a thread does.
        """
        patience = self._seconds if self.has_answered else self._seconds * _FIRST
        if patience >= self._own or not engine.shared or engine.runtime.colour != "async":
            return _UNWATCHED
        watch = self._watching
        if watch is None or watch.loop is not engine.runtime.loop:  # type: ignore[attr-defined]  # LoopRuntime has it
            watch = self._watch()
        task = asyncio.current_task(watch.loop)
        assert task is not None  # noqa: S101 - nobody else awaits
        until = watch.open[task] = watch.now() + patience
        watch.patience = patience
        if until < watch.due:
            watch.arm(until)
        return watch, task, task.cancelling()

    def claim(self, engine: Engine, call: Call) -> Coroutine[Any, Any, tuple[Ask, Verdict]]:
        """One answer of the store, where `begin` watches nobody."""
        return self._spent(engine, engine.ask_once(call))

    def peek(self, engine: Engine, scope: Scope) -> Coroutine[Any, Any, tuple[Record | None, float]]:
        return self._spent(engine, engine.store.peek(scope))

    async def _spent(self, engine: Engine, asking: Coroutine[Any, Any, T]) -> T:
        patience = self._seconds if self.has_answered else self._seconds * _FIRST
        watch, task, before = self.begin(engine)
        if watch is not None and task is not None:
            try:
                answer = await asking
            except asyncio.CancelledError as error:
                watch.check(task, before, error)
                raise
            finally:
                watch.end(task)
        elif patience >= self._own or not engine.shared:
            answer = await asking
        else:
            answer = _in_thread(asking, patience, engine)
        self.has_answered = True
        return answer

    def _watch(self) -> _Watch:
        watch = self._watching
        if watch is None or not runs_here(watch.loop):
            watch = self._watching = _Watch(asyncio.get_running_loop())
        return watch


def _late(seconds: float) -> StoreUnavailable:
    return StoreUnavailable(f"the store did not answer within {seconds:g} s (store_timeout)")


class _Watch:
    """What `asyncio.timeout` does, with one timer for all calls of a loop: it is on the way of every keyed request.

    Time in which this process itself was not run does not count: that is not the store's fault.
    """

    __slots__ = ("_ended", "_timer", "due", "loop", "now", "open", "patience")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = clock_of(loop)
        self.open: dict[asyncio.Task[Any], float] = {}
        """Until when each task may wait."""
        self.patience = 0.0
        self._ended: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.due = math.inf
        """When the timer looks; `inf` where there is none."""

    def check(self, task: asyncio.Task[Any], before: int, error: asyncio.CancelledError) -> None:
        """Raises StoreUnavailable if this very cancellation is ours, and nobody else's besides."""
        if task in self._ended:
            self._ended.discard(task)
            if task.uncancel() <= before:
                raise _late(self.patience) from error

    def end(self, task: asyncio.Task[Any]) -> None:
        self.open.pop(task, None)
        if task in self._ended:  # its answer came with the cancellation: the answer counts
            self._ended.discard(task)
            task.uncancel()

    def arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.due = due
        self._timer = self.loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self.now()
        was_asleep = now - self.due > _ASLEEP
        self.due = math.inf
        for task, until in tuple(self.open.items()):
            if until > now:
                continue
            if was_asleep:
                self.open[task] = now + self.patience
            else:
                del self.open[task]
                self._ended.add(task)
                task.cancel()
        if self.open:
            self.arm(min(self.open.values()))


_UNWATCHED: Final = (None, None, 0)


class _Threads:
    """One pool for the process, made when the first claim needs it."""

    def __init__(self) -> None:
        self._reset()
        survive_fork(self, _Threads._reset)

    def _reset(self) -> None:
        self._pool: futures.ThreadPoolExecutor | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> futures.Future[T]:
        if self._pool is None:
            self._pool = futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="semel-http")
        return self._pool.submit(copy_context().run, run_sync, coroutine)


_threads: Final = _Threads()


def _in_thread(asking: Coroutine[Any, Any, T], patience: float, engine: Engine) -> T:
    future = _threads.run(asking)
    if not futures.wait((future,), patience).done:
        if future.cancel():  # nobody had begun it
            asking.close()
        else:
            future.add_done_callback(
                lambda ended: None if ended.exception() else _left(engine, ended.result())
            )
        raise _late(patience)
    return future.result()


def _left(engine: Engine, answer: Any) -> None:
    """Granted after all, and nobody is left to run it. (One that failed was released by the flow.)"""
    ask, verdict = answer
    if isinstance(verdict, Won):
        engine.debts.abandon(ask)
    elif isinstance(ask, Ask):
        engine.debts.leave(ask, verdict)
