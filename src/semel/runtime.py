"""What the flow needs from the world around it: time, waiting, threads, heartbeats. One port, several worlds.

`flow.py` is written once, as coroutines. Here is the port (`Runtime`) and its world of threads, in which those
coroutines never suspend: everything blocks, so `run_sync` ends them with a single `send`. `loop.py` has the
asyncio world; the simulator brings a third.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from inspect import iscoroutine
from typing import Any, Literal, Protocol, TypeVar

from semel.bell import Bell
from semel.errors import ConfigurationError
from semel.forks import survive_fork

__all__ = [
    "NO_INTERRUPT",
    "Interrupt",
    "NotBegun",
    "Parker",
    "Runtime",
    "Stoppable",
    "Stopped",
    "ThreadRuntime",
    "Ticker",
    "in_spite_of",
    "own",
    "run_sync",
    "ticked",
]

T = TypeVar("T")
_log = logging.getLogger("semel")


class Stopped(RuntimeError):
    """A function raised StopIteration, which cannot pass through coroutines: Python turns it into a RuntimeError there, and so do
    we. Who is not a coroutine gets `own`, the function's own error (R2)."""

    def __init__(self, own: StopIteration) -> None:
        super().__init__("the function raised StopIteration")
        self.own = own


class NotBegun(BaseException):
    """The caller gave up before a thread was free for its function: nothing of it has run, so nothing is lost."""

    def __init__(self) -> None:
        super().__init__("its caller gave up before a thread was free for it; it has not begun")


def own(error: Exception) -> Exception:
    """The function's own error: what it means, and what is told of it, is not a matter of how it travels."""
    return error.own if type(error) is Stopped else error


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends. One that does would need an event loop: it is closed and refused."""
    raised: StopIteration | None = None
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    except Stopped as stopped:
        raised = stopped.own
    if raised is not None:  # out here: it keeps the cause that its function gave it, and gets no other one
        raise raised
    coroutine.close()
    raise ConfigurationError(
        "a sync call had to wait for an event loop: an async store or client was given to Semel; "
        "use AsyncSemel, or give Semel a sync client or a URL"
    )


class Parker(Protocol):
    """One waiter's seat: `wake` may be called from any thread, any number of times."""

    def wake(self) -> None: ...

    async def park(self, timeout: float) -> bool:
        """Wait for a wake-up since the last `park`; False when `timeout` seconds passed without one."""
        ...


class Stoppable(Protocol):
    """What goes on by itself, until it is stopped."""

    def stop(self) -> None: ...


class Ticker(Stoppable, Protocol):
    """Runs one coroutine function by a given time; the time it returns is its next appointment."""

    def at(self, when: float) -> None: ...


class Interrupt(Protocol):
    """A way to cancel the function that runs now. `fired` tells our own cancellation from the caller's."""

    @property
    def fired(self) -> bool: ...

    @property
    def is_here(self) -> bool:
        """Whether this very code is what it would cancel."""
        ...

    def fire(self) -> None: ...

    def absorb(self) -> None:
        """Take our cancellation back out of the task after it was turned into an error."""
        ...


class Runtime(Protocol):
    colour: Literal["sync", "async"]

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def entropy(self, size: int, /) -> bytes:
        """Random bytes for nonces and ids, from the operating system (the simulator's are seeded)."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def parker(self) -> Parker: ...

    def ticker(self, tick: Callable[[], Coroutine[Any, Any, float | None]]) -> Ticker: ...

    def interrupt(self) -> Interrupt:
        """For the current task; in a thread nothing can be interrupted and `fire` does nothing."""
        ...

    async def protect(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end even when the caller is cancelled meanwhile; the cancellation is raised afterwards."""
        ...

    async def detach(self, coroutine: Coroutine[Any, Any, T], *, recall: bool = False) -> T:
        """Like `protect`, but a cancelled caller leaves at once and the coroutine goes on without it.

        `recall`: while the first plain function that it calls waits for a thread, it is stopped instead, by NotBegun.
        """
        ...

    def background(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run it on its own; `drain` waits for it."""
        ...

    def detaches(self, fn: Callable[..., Any], inline: bool) -> bool:
        """Whether `call` would run `fn` where a cancelled caller cannot stop it."""
        ...

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inline: bool
    ) -> Awaitable[Any]:
        """To be awaited at once. What `fn` raises may come from here or from the wait."""
        ...

    async def raw(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a plain function returns, whatever that is; where it `detaches`, from its thread."""
        ...

    def drive(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Give a coroutine to user code of this colour: its value, or the coroutine to await."""
        ...

    async def join(self, threads: Collection[Any]) -> None:
        """Wait until these threads, which their callers have left, have ended."""
        ...

    async def drain(self, timeout: float) -> None:
        """Wait for background work, at most `timeout` seconds."""
        ...


async def in_spite_of(error: BaseException, runtime: Runtime, coroutine: Coroutine[Any, Any, object]) -> None:
    """What is still to be done though its caller ends with this error: awaited, or where that is impossible, done by itself.

    A signal's handler that raises in a frame which awaits ours closes ours, which then cannot await any more.
    """
    if isinstance(error, GeneratorExit):
        runtime.background(coroutine)
    else:
        await coroutine


class _ThreadParker:
    __slots__ = ("_bell",)

    def __init__(self) -> None:
        self._bell = Bell()

    def wake(self) -> None:
        self._bell.ring()

    async def park(self, timeout: float) -> bool:
        return self._bell.heard(timeout)


class _NoInterrupt:
    __slots__ = ()
    fired = False
    is_here = False

    def fire(self) -> None:
        """A thread cannot be cancelled: the run learns of it by `run.lease_lost`, its caller by LeaseLost."""

    def absorb(self) -> None:
        """Nothing was fired."""


NO_INTERRUPT = _NoInterrupt()


_IDLE = 5.0


async def ticked(
    tick: Callable[[], Coroutine[Any, Any, float | None]], now: Callable[[], float]
) -> float | None:
    """One tick. A mistake in it is reported and does not end the heartbeats of everybody else."""
    try:
        return await tick()
    except Exception:  # noqa: BLE001 - reported; the next tick may do better
        _log.exception("a background tick of semel failed; it goes on in a second")
        return now() + 1.0


class _ThreadTicker:
    """One daemon thread, started by the first appointment; it sleeps until the earliest one."""

    def __init__(self, tick: Callable[[], Coroutine[Any, Any, float | None]]) -> None:
        self._tick = tick
        self._reset()
        survive_fork(self, _ThreadTicker._reset)

    def _reset(self) -> None:
        # Taken by its own `with`: a signal's handler that raises inside of a condition's would leave it locked for good.
        self._lock = threading.RLock()  # gevent has one of its own; of a plain lock it has not
        self._wakeup = threading.Condition(self._lock)
        self._when: float | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def at(self, when: float) -> None:
        # Unlocked look first: nearly every run ends long before its first heartbeat is due.
        current = self._when
        if current is not None and current <= when and self._thread is not None:
            return
        with self._lock:
            if self._stopped:
                return
            if self._when is None or when < self._when:
                self._when = when
                self._wakeup.notify()
            if self._thread is None or not self._thread.is_alive():
                self._start()

    def _start(self) -> None:
        thread = self._thread = threading.Thread(target=self._run, name="semel-heart", daemon=True)
        try:
            thread.start()
        except BaseException:  # a handler raised, say: if it comes up all the same, it ends at once
            self._thread = None
            raise

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._wakeup.notify()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while self._sleep(threading.current_thread()):
            again = run_sync(ticked(self._tick, time.monotonic))
            if again is not None:
                self.at(again)

    def _sleep(self, me: threading.Thread) -> bool:
        """Until the appointment; False: nobody needs this thread any more."""
        with self._lock:
            while self._thread is me and (self._when is None or time.monotonic() < self._when):
                pause = _IDLE if self._when is None else self._when - time.monotonic()
                pause = min(max(0.0, pause), threading.TIMEOUT_MAX)
                if not self._wakeup.wait(pause) and self._when is None and self._thread is me:
                    self._thread = None  # nothing to do for a while: a forgotten face must not keep a thread
            if self._thread is not me:
                return False
            self._when = None
            return True


class ThreadRuntime:
    """The sync world: every wait blocks its own thread."""

    colour: Literal["sync", "async"] = "sync"

    def __init__(self) -> None:
        self._reset()
        survive_fork(self, ThreadRuntime._reset)

    def _reset(self) -> None:
        self._busy: set[threading.Event] = set()  # each is set when its thread has ended

    def now(self) -> float:
        return time.monotonic()

    def entropy(self, size: int, /) -> bytes:
        return os.urandom(size)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - this is the world in which waiting blocks

    def parker(self) -> Parker:
        return _ThreadParker()

    def ticker(self, tick: Callable[[], Coroutine[Any, Any, float | None]]) -> Ticker:
        return _ThreadTicker(tick)

    def interrupt(self) -> Interrupt:
        return NO_INTERRUPT

    async def protect(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await coroutine

    async def detach(self, coroutine: Coroutine[Any, Any, T], *, recall: bool = False) -> T:
        del recall
        return await coroutine

    def background(self, coroutine: Coroutine[Any, Any, object]) -> None:
        def work() -> None:
            try:
                run_sync(coroutine)
            finally:
                self._busy.discard(ended)
                ended.set()

        ended = threading.Event()
        # Daemon: a store that is gone for good must not keep the program from ending.
        thread = threading.Thread(target=work, name="semel-background", daemon=True)
        try:
            self._busy.add(ended)
            thread.start()
        except BaseException:  # a handler raised, say, or there is no thread to be had
            if thread.ident is None:
                self._busy.discard(ended)  # nobody waits for one that never came up
                ended.set()
            raise

    def detaches(self, fn: Callable[..., Any], inline: bool) -> bool:
        del fn, inline
        return False

    async def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inline: bool
    ) -> Any:
        del inline
        try:  # as `raw`, without a coroutine more around every call
            value = fn(*args, **kwargs)
        except StopIteration as error:
            raise Stopped(error) from error
        if iscoroutine(value):
            value.close()
            raise ConfigurationError(
                "the function returned a coroutine, which Semel cannot run: use AsyncSemel"
            )
        return value

    async def raw(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return fn(*args, **kwargs)
        except StopIteration as error:
            raise Stopped(error) from error

    def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return run_sync(coroutine)

    async def join(self, threads: Collection[Any]) -> None:
        """In the world of threads nobody leaves a call before it has ended."""

    async def drain(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        for ended in tuple(self._busy):  # a thread that is not started yet could not be joined
            ended.wait(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
