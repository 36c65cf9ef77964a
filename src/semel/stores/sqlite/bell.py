"""What the writer thread has for an event loop, brought into it for less than `call_soon_threadsafe` takes.

asyncio's own way is a byte through a socket, which the loop reads (twice, to see that it was the last) after it has run
the call: two more turns at the interpreter, just when the writer begins with what that call wanted written. A counter of
the kernel's is read once, and before the call. Linux has it; elsewhere, and on loops that watch no files, `ring` is False.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context

__all__ = ["Bell"]


class Bell:
    """One per loop. Rung in any thread; everything else happens in the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Nothing here holds the loop: whoever keeps bells by loop must be able to forget both.
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # or a number that was closed meanwhile could be somebody else's file
        self._counter: int | None = None
        if hasattr(os, "eventfd"):
            self._counter = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            try:
                # In a context of its own, or that of the first caller would live as long as the loop.
                Context().run(loop.add_reader, self._counter, self._answer)
            except NotImplementedError:
                self._close()

    def ring(self, call: Callable[[], None]) -> bool:
        """Have the loop make this call; False if it hears no bell, or none any more."""
        with self._lock:
            if self._counter is None:
                return False
            self._calls.append(call)
            os.eventfd_write(self._counter, 1)
            return True

    def _answer(self) -> None:
        if self._counter is None:
            return
        os.eventfd_read(self._counter)
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            if (
                self._calls and self._counter is not None
            ):  # somebody ends the program: the others are called as well
                os.eventfd_write(self._counter, 1)

    def take_down(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop ends. What was rung is called first."""
        if self._counter is None:
            return
        loop.remove_reader(self._counter)
        self._close()
        while self._calls:
            loop.call_soon(self._calls.popleft())

    def _close(self) -> None:
        # A child that was forked while somebody rang finds it locked for good: then its copy of the counter stays open.
        if self._lock.acquire(timeout=1.0):
            counter, self._counter = self._counter, None
            self._lock.release()
            if counter is not None:
                os.close(counter)

    def __del__(self) -> None:
        # Nobody can ring it any more, and a loop that watched it would still hold it.
        if self._counter is not None:
            os.close(self._counter)
