"""The asyncio world of the flow: tasks, futures, a thread pool for plain functions. asyncio and uvloop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from asyncio import _get_running_loop, current_task
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from inspect import CO_COROUTINE, CORO_CREATED, getcoroutinestate, isawaitable
from types import CodeType
from typing import Any, Literal, TypeVar

import msgspec

from semel.coroutines import is_async
from semel.errors import ConfigurationError
from semel.run import run_or_none
from semel.running import clock_of, is_stopping
from semel.runtime import NO_INTERRUPT, Interrupt, NotBegun, Parker, Stopped, Ticker, ticked

__all__ = ["LoopRuntime", "is_async", "running_loop"]

T = TypeVar("T")
_log = logging.getLogger("semel")


def running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            "AsyncSemel needs a running asyncio loop (asyncio or uvloop; trio is not supported): "
            "await it inside asyncio.run(...), or use Semel in plain code"
        ) from None


_OVERDUE = 1.0  # a timer that is so late was struck by a signal's handler when it rang, or its loop was busy
_LOOK = 1.0  # so often a thread that waits for its loop looks whether that runs; seen twice as not running, it is given up


def _stands_still() -> ConfigurationError:
    return ConfigurationError(
        "this function runs in a thread, and the event loop of its call does not run any more: what it asks of its run (a step, an "
        "id) cannot be answered, and may not have been made. Let the loop run until its calls have ended: `await once.aclose()` "
        "waits for them"
    )


_in_pool: ContextVar[bool] = ContextVar("semel_in_pool", default=False)


def _boxed(
    context: Context, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, BaseException | None]:
    """The value or the error, as data: a future refuses to carry a StopIteration and would never end."""
    try:
        return context.run(fn, *args, **kwargs), None
    except StopIteration as error:
        problem = Stopped(error)
        problem.__cause__ = error
        return None, problem
    except BaseException as error:  # noqa: BLE001 - raised again on the loop
        return None, error


def _looked_at(ended: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody awaits any more, so that asyncio does not report it as forgotten."""
    if not ended.cancelled():
        ended.exception()


class _Exit(msgspec.Struct):
    """A KeyboardInterrupt or SystemExit on its way to whoever awaits it: out of a task it would end the loop instead."""

    error: BaseException


async def _carried(coroutine: Coroutine[Any, Any, T]) -> T | _Exit:
    try:
        return await coroutine
    except (KeyboardInterrupt, SystemExit) as error:
        return _Exit(error)
    except NotBegun:  # the flow has heard of it: for everybody else it is the cancellation that it was
        raise asyncio.CancelledError from None


def _left(ended: asyncio.Task[Any]) -> None:
    """Nobody is left to look at its error; the flow has reported it through hooks. A thread that exits ends no loop, as anywhere."""
    if ended.cancelled() or ended.exception() is not None or not isinstance(exit_ := ended.result(), _Exit):
        return
    if not _is_of_a_thread(exit_.error):
        raise exit_.error  # a signal's handler, say, that struck here: the program is to end
    _log.error("a function ended with %r when its caller had gone", exit_.error, exc_info=exit_.error)


def _is_of_a_thread(error: BaseException) -> bool:
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code is not _boxed.__code__:
        at = at.tb_next
    return at is not None


class _LoopParker:
    __slots__ = ("_event", "_loop", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._event = asyncio.Event()
        self._loop = loop
        self._thread = threading.get_ident()

    def wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._event.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def park(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout if timeout < 1e9 else None):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class _LoopTicker:
    """A timer, not a task: while no run is open nothing keeps the loop busy."""

    def __init__(self, runtime: LoopRuntime, tick: Callable[[], Coroutine[Any, Any, float | None]]) -> None:
        self._runtime = runtime
        self._tick = tick
        self._timer: asyncio.TimerHandle | None = None
        self._when = 0.0
        self._stopped = False

    def at(self, when: float) -> None:
        if self._stopped or self._runtime.loop.is_closed():
            return
        now = self._runtime.now()
        if self._timer is not None:
            overdue = self._when <= when
            if overdue and now < self._when + _OVERDUE:
                return
            self._timer.cancel()
            if overdue:  # the appointment stands, and is had at once: loops whose every turn is slow would put it off for ever
                self._runtime.background(self._run())
        self._when = when
        self._timer = self._runtime.loop.call_later(max(0.0, when - now), self._start)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._timer = None
        if is_stopping(self._runtime.loop):
            # A task would not begin in this turn, and asyncio complains of one that never does. A loop that goes on rings again;
            # one that is closed forgets its timers without a word.
            self.at(self._runtime.now())
            return
        try:
            self._runtime.background(self._run())
        except BaseException:  # of a signal's handler
            self.at(self._runtime.now())
            raise

    async def _run(self) -> None:
        again: float | None = self._runtime.now() + 1.0
        try:
            again = await ticked(self._tick, self._runtime.now)
        finally:
            if again is not None:
                self.at(again)


class _TaskInterrupt(msgspec.Struct, eq=False):
    _task: asyncio.Task[Any] | None
    fired: bool = False

    def fire(self) -> None:
        if self._task is not None and not self.fired and not self._task.done():
            self.fired = True
            self._task.cancel("semel: the lease was lost")

    def absorb(self) -> None:
        if self._task is not None:
            self._task.uncancel()

    @property
    def is_here(self) -> bool:
        return self._task is not None and self._task is current_task()


class LoopRuntime:
    """One per running loop. `pool` is shared by the loops of a face and made when the first plain function comes."""

    colour: Literal["sync", "async"] = "async"

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Callable[[], ThreadPoolExecutor]) -> None:
        self.loop = loop
        self.now: Callable[[], float] = clock_of(loop)
        self._pool = pool
        self._tasks: set[asyncio.Task[Any]] = set()
        self._queued: dict[asyncio.Task[Any] | None, Future[Any] | None] = {}
        """The first thing that a detached task asks of the pool: as long as no thread has begun it, it can be taken back."""
        self._asked: list[Coroutine[Any, Any, Any]] | None = None
        """What the plain function that runs in the loop at this moment has asked of its run."""

    entropy = staticmethod(os.urandom)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def parker(self) -> Parker:
        return _LoopParker(self.loop)

    def ticker(self, tick: Callable[[], Coroutine[Any, Any, float | None]]) -> Ticker:
        return _LoopTicker(self, tick)

    def interrupt(self) -> Interrupt:
        return _TaskInterrupt(current_task(self.loop))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)  # the loop keeps weak references only
        task.add_done_callback(self._tasks.discard)
        return task

    async def protect(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = self._spawn(coroutine)
        cancelled: BaseException | None = None
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if task.cancelled():
                    raise
                cancelled = error
            except GeneratorExit:
                raise  # its loop has been given up: nothing can be waited for
            except BaseException as error:  # noqa: BLE001 - the task's own: `task.result()` below raises it
                if not task.done():
                    cancelled = error  # a signal's handler raised here
        if cancelled is not None:
            if not task.cancelled():
                task.exception()
            raise cancelled
        return task.result()

    async def detach(self, coroutine: Coroutine[Any, Any, T], *, recall: bool = False) -> T:
        task = self._spawn(_carried(coroutine))
        if recall:
            self._queued[task] = None
        try:
            value = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_left)
            if (work := self._queued.get(task)) is not None and work.cancel():
                await asyncio.wait((task,))  # until the key is given back, as for a coroutine
            raise
        finally:
            self._queued.pop(task, None)
        if isinstance(value, _Exit):
            raise value.error
        return value

    def background(self, coroutine: Coroutine[Any, Any, object]) -> None:
        if self.loop.is_closed():
            coroutine.close()  # nobody will ever run it
        elif _get_running_loop() is self.loop:
            _ = self._spawn(coroutine)
        else:  # from a finalizer, which the collector runs in any thread
            self.loop.call_soon_threadsafe(self._spawn, coroutine)

    def detaches(self, fn: Callable[..., Any], inline: bool) -> bool:
        return not (inline or is_async(fn))

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inline: bool
    ) -> Awaitable[Any]:
        code = getattr(fn, "__code__", None)  # as `is_async` begins, without the call
        if (isinstance(code, CodeType) and code.co_flags & CO_COROUTINE) or (not inline and is_async(fn)):
            coroutine: Awaitable[Any] = fn(*args, **kwargs)
            return coroutine
        return self._call_plain(fn, args, kwargs, inline)

    async def _call_plain(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inline: bool
    ) -> Any:
        value = self._called_here(fn, args, kwargs) if inline else await self.raw(fn, args, kwargs)
        if not isawaitable(value):
            return value
        self._arm(fn)
        return await value

    def _called_here(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a plain function gives that runs in the loop. It awaits nothing: what it asks of its run and does not give back to
        be awaited would never run, and it must not be done without that."""
        asked: list[Coroutine[Any, Any, Any]] = []
        self._asked = asked
        try:
            value = fn(*args, **kwargs)
        finally:
            self._asked = None
        forgotten = (
            [] if isawaitable(value) else [each for each in asked if getcoroutinestate(each) == CORO_CREATED]
        )
        for each in forgotten:
            each.close()
        if forgotten:
            raise ConfigurationError(
                f"{getattr(fn, '__qualname__', fn)!r} is a plain function that runs in the loop (inline=True, or a pipeline of "
                "within), where nothing waits for what it asks of its run (a step, an id): nothing of that has run. Write it as "
                "`async def` and await it"
            )
        return value

    def _arm(self, fn: Callable[..., Any]) -> None:
        """A plain function gave a coroutine (`lambda: work()`): from here on a lost lease can cancel it, and does (R17)."""
        run = run_or_none()
        if run is None or run.call.fn is not fn or run.interrupt is not NO_INTERRUPT:
            return
        run.interrupt = self.interrupt()
        if run.lease_lost and run.call.options.on_lease_lost == "cancel":
            run.interrupt.fire()

    async def raw(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # A step of a function that itself holds a thread of the pool gets a thread of its own: the pool may be full
        # of functions that all wait for their steps.
        nested = _in_pool.get()
        pool = ThreadPoolExecutor(1, "semel-step") if nested else self._pool()
        context = copy_context()
        context.run(_in_pool.set, True)
        task = current_task(self.loop)
        recallable = task in self._queued
        work = pool.submit(_boxed, context, fn, args, kwargs)
        future = asyncio.wrap_future(work, loop=self.loop)
        try:
            if nested:
                pool.shutdown(wait=False)  # takes no more work, ends with this one
            if recallable:
                self._queued[task] = work
            value, error_of_fn = await asyncio.shield(future)
        except BaseException as error:  # also of a signal's handler: the thread runs on
            if recallable and isinstance(error, asyncio.CancelledError) and work.cancel():
                raise NotBegun from None
            if not future.done():
                future.add_done_callback(_looked_at)
                if (run := run_or_none()) is not None:
                    run.threads.add(future)
                    future.add_done_callback(run.threads.discard)
            raise
        finally:
            self._queued.pop(task, None)
        if error_of_fn is not None:
            raise error_of_fn
        return value

    def drive(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Inside the loop: the coroutine. In a plain function that runs in our pool: its value, waited for."""
        try:
            inside = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            inside = False
        if not inside:
            return self._waited_for(coroutine)
        if self._asked is not None:
            self._asked.append(coroutine)
        return coroutine

    def _waited_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its value, from another thread. Refused when the loop does not run any more: nobody would ever answer."""
        answer: Future[T] = Future()

        def begin() -> None:
            if answer.set_running_or_notify_cancel():
                self._spawn(_carried(coroutine)).add_done_callback(tell)

        def tell(ended: asyncio.Task[T | _Exit]) -> None:
            if ended.cancelled():
                answer.set_exception(CancelledError())
            elif (error := ended.exception()) is not None:
                answer.set_exception(error)
            elif isinstance(value := ended.result(), _Exit):
                answer.set_exception(value.error)
            else:
                answer.set_result(value)

        try:
            self.loop.call_soon_threadsafe(begin)
        except RuntimeError:  # closed
            coroutine.close()
            raise _stands_still() from None
        return self._told(answer, coroutine)

    def _told(self, answer: Future[T], coroutine: Coroutine[Any, Any, T]) -> T:
        ran = True
        while True:
            try:
                return answer.result(_LOOK)
            except TimeoutError:
                if answer.done():
                    return answer.result()
            runs = self.loop.is_running()
            if not (runs or ran):
                if answer.cancel():
                    coroutine.close()  # nothing of it has begun, and nothing will
                raise _stands_still()
            ran = runs

    async def join(self, threads: Collection[Any]) -> None:
        if threads:
            await asyncio.wait(tuple(threads))

    async def drain(self, timeout: float) -> None:
        current = asyncio.current_task()
        if pending := {task for task in self._tasks if task is not current}:
            await asyncio.wait(pending, timeout=timeout)
