"""The answer to one call, awaited by one task, woken together with all others whose answers came at the same time.

An `asyncio.Future` wakes its task through the loop: a handle, a context, a place in the queue, a turn, and on asyncio's own
loop all of them in Python. That is a tenth of what a replay costs altogether. A task waits for whatever keeps the
protocol of futures (`_asyncio_future_blocking`: how asyncio knows them, and other libraries make them), so this is a
future as far as one awaiting task needs it, and it resumes the task itself.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, CancelledError
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextvars import Context
from types import NoneType
from typing import Any

import msgspec

from semel.posting import interrupted

__all__ = ["Posted", "resume", "tell_interrupted"]

_NOWHERE = Context()


class Posted(msgspec.Struct, eq=False):
    """To be awaited at once, by nobody but its caller. Cancelled, it keeps its place: the answer is thrown away."""

    _loop: AbstractEventLoop
    _asyncio_future_blocking: bool = False
    over: bool = False
    value: Any = None
    _error: BaseException | None = None
    wakeup: Callable[[Any], object] | None = None
    """Resumes the task that waits, when it is run in its `context`: see `resume`."""
    context: Context = _NOWHERE

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.over:
            self._asyncio_future_blocking = True
            yield self
        if self._error is not None:
            raise self._error
        return self.value

    # ------------------------------------------------------------------------------- what whoever answers asks of any future
    def done(self) -> bool:
        return self.over

    def set_result(self, value: Any) -> None:
        """The same, in the next turn of the loop."""
        self.value = value
        self.end()

    def set_exception(self, error: BaseException) -> None:
        """In the next turn of the loop: whoever tells of trouble is in the middle of it."""
        self._error = error
        self.end()

    def end(self) -> None:
        """It is over, and its task is resumed in the next turn, if it was not; once more is no harm."""
        self.over = True
        if self.wakeup is not None:
            self._loop.call_soon(self._wake, context=self.context)

    def _wake(self) -> None:
        """Once: a task that is woken and does not wait is an error of asyncio's."""
        wakeup, self.wakeup = self.wakeup, None
        if wakeup is not None:
            wakeup(self)

    # ------------------------------------------------------------------------------------- what a task asks of any future
    def add_done_callback(self, wakeup: Callable[[Any], object], *, context: Context) -> None:
        """By a task, straight from `__await__`, which gives it nothing that is over."""
        self.wakeup = wakeup
        self.context = context

    # Asked by the task that is resumed, which throws away what it gives: value and error come out of `__await__`. So it is
    # whatever is called the most quickly, and gives nothing.
    result = NoneType

    def cancel(self, msg: Any = None) -> bool:
        if self.over:
            # Answered, but whoever was to resume its task may have been struck by a signal's handler.
            self.end()
            return False
        self.set_exception(CancelledError() if msg is None else CancelledError(msg))
        return True


def tell_interrupted(waiting: Iterable[Posted], error: BaseException) -> None:
    """A signal's handler raised where these were to be answered, or resumed: nobody may be forgotten."""
    for one in waiting:
        if one.over:
            one.end()
        else:
            one.set_exception(interrupted(error))


def resume(answered: deque[Posted], loop: AbstractEventLoop) -> None:
    """Resume all who wait for these, from a callback of the loop: what they do next may be anything."""
    try:
        while answered:
            # Nothing is called before it is resumed, so that no handler of a signal can come between.
            one = answered[0]
            del answered[0]
            wakeup, one.wakeup = one.wakeup, None
            if wakeup is not None:
                one.context.run(wakeup, one)
    finally:
        if answered:  # one of them ends the program: the others have their turn all the same
            loop.call_soon(resume, answered, loop)
