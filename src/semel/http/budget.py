"""How long a keyed request lets its store think before it is refused (H34): a caller must not hang on a store that is gone."""

from __future__ import annotations

import asyncio
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
from semel.posting import Brief
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
        self._has_answered = False
        self._watching: _Watch | None = None

    async def claim(self, engine: Engine, call: Call) -> tuple[Ask, Verdict | Brief]:
        """One answer of the store; of a plain replay only what is needed of it, where the store has a quick way."""
        patience = self._seconds if self._has_answered else self._seconds * _FIRST
        if patience >= self._own or not engine.shared or engine.runtime.colour != "async":
            return await self._spent(engine, engine.ask_once(call))
        # As there, without a coroutine more around the wait.
        ask = engine._ask(call)  # noqa: SLF001 - as `ask_once` does
        watch = self._watching
        if watch is None or watch.loop is not engine.runtime.loop:  # type: ignore[attr-defined]  # LoopRuntime has it
            watch = self._watch()
        task, before = watch.begin(patience)
        try:
            verdict = await engine.asker.brief(ask)
        except asyncio.CancelledError as error:
            if watch.has_ended(task, before):
                raise _late(patience) from error
            raise
        finally:
            watch.end(task)
        self._has_answered = True
        return ask, verdict

    def peek(self, engine: Engine, scope: Scope) -> Coroutine[Any, Any, tuple[Record | None, float]]:
        return self._spent(engine, engine.store.peek(scope))

    async def _spent(self, engine: Engine, asking: Coroutine[Any, Any, T]) -> T:
        patience = self._seconds if self._has_answered else self._seconds * _FIRST
        if patience >= self._own or not engine.shared:
            answer = await asking
        elif engine.runtime.colour == "async":
            watch = self._watch()
            task, before = watch.begin(patience)
            try:
                answer = await asking
            except asyncio.CancelledError as error:
                if watch.has_ended(task, before):
                    raise _late(patience) from error
                raise
            finally:
                watch.end(task)
        else:
            answer = _in_thread(asking, patience, engine)
        self._has_answered = True
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

    __slots__ = ("_due", "_ended", "_now", "_patience", "_timer", "loop", "open")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._now = clock_of(loop)
        self.open: dict[asyncio.Task[Any], float] = {}
        """Until when each task may wait."""
        self._patience = 0.0
        self._ended: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def begin(self, patience: float) -> tuple[asyncio.Task[Any], int]:
        task = asyncio.current_task(self.loop)
        assert task is not None  # noqa: S101 - nobody else awaits
        until = self.open[task] = self._now() + patience
        self._patience = patience
        if self._timer is None or until < self._due:
            self._arm(until)
        return task, task.cancelling()

    def has_ended(self, task: asyncio.Task[Any], before: int) -> bool:
        """Whether this very cancellation is ours, and nobody else's besides."""
        if task not in self._ended:
            return False
        self._ended.discard(task)
        return task.uncancel() <= before

    def end(self, task: asyncio.Task[Any]) -> None:
        self.open.pop(task, None)
        if task in self._ended:  # its answer came with the cancellation: the answer counts
            self._ended.discard(task)
            task.uncancel()

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self.loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._now()
        was_asleep = now - self._due > _ASLEEP
        for task, until in tuple(self.open.items()):
            if until > now:
                continue
            if was_asleep:
                self.open[task] = now + self._patience
            else:
                del self.open[task]
                self._ended.add(task)
                task.cancel()
        if self.open:
            self._arm(min(self.open.values()))


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
