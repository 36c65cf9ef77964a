"""So many connections at a time: who has one of the places, and who waits for one.

A signal's handler that raises takes a thread out of any line, with whatever it held in its hands. Whatever is counted in
two steps would be lost between them. So a place is an object that is taken for as long as somebody has it: what a thread
loses is free again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
import weakref
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["LoopTurns", "Place", "Places", "T", "T_co", "ThreadTurns", "Turns"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
# Seconds after which a thread that waits looks by itself. Whoever has something for it rings, and none is missed; but one who
# was struck has not rung, and what he lost is free without a word.
_LOOK: Final = 0.05


class Place:
    """The right to one connection, which keeps it to its end, also while it is idle."""

    __slots__ = ("__weakref__",)


class Places:
    """So many of them. Thread-safe, without a lock."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._taken: list[weakref.ref[Place]] = []

    def take(self) -> Place | None:
        while True:
            place = Place()
            # Called in C when nobody has the place any more: a handler cannot raise in there.
            seat = weakref.ref(place, self._taken.remove)
            self._taken.append(seat)
            # Of several at once those in front have it. Seats only move forward: no more than there are places is ever taken.
            if self._taken.index(seat) < self._number:
                return place
            # Then only the list has it: once out of there it is gone, and not called when the place is.
            del seat
            self.give(place)
            # Who gave one back while our seat stood there has rung in vain: it was not free to anybody who looked.
            if len(self._taken) >= self._number:
                return None

    def give(self, place: Place) -> None:
        """At once, whoever else (a traceback, say) still has it; once more is no harm."""
        with contextlib.suppress(ValueError):
            self._taken.remove(weakref.ref(place))


class Turns(Protocol[T_co]):
    """Those who wait for something that others have, until their `look` finds it.

    It is handed over to who waits longest: left to who comes next, it would never be his turn. What is handed to one who has
    just given up goes `back`.
    """

    async def wait(self, timeout: float) -> T_co | None:
        """It, or None when there is nothing in time."""
        ...

    def ring(self) -> None:
        """There is something for one of them."""
        ...


class ThreadTurns(Generic[T]):
    """First come, first served: each who waits has a box, into which it is handed over.

    What is put into the box of a thread that was struck is lost with it, and thereby free again.
    """

    def __init__(self, look: Callable[[], T | None], back: Callable[[T], None]) -> None:
        self._look = look
        self._back = back
        self._line: list[queue.SimpleQueue[T]] = []

    async def wait(self, timeout: float) -> T | None:
        if (found := self._look()) is not None:
            return found
        end, box = time.monotonic() + timeout, queue.SimpleQueue[T]()
        try:
            self._line.append(box)
            # Looked once more with the box in its place: whoever gives something from here on finds it.
            while (found := self._look()) is None and (left := end - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    return box.get(timeout=min(left, _LOOK))
            return self._leave(box, found)
        except BaseException:  # struck
            with contextlib.suppress(ValueError):
                self._line.remove(box)
            raise

    def _leave(self, box: queue.SimpleQueue[T], found: T | None) -> T | None:
        try:
            self._line.remove(box)
        except ValueError:  # in this very moment somebody hands something over
            with contextlib.suppress(queue.Empty):
                handed = box.get(timeout=_LOOK)
                if found is None:
                    return handed
                self._back(handed)
        return found

    def ring(self) -> None:
        while self._line and (found := self._look()) is not None:
            try:
                box = self._line.pop(0)
            except IndexError:  # the last of them has just given up
                self._back(found)
            else:
                box.put(found)


class LoopTurns(Generic[T]):
    """First come, first served. What a task that was struck has lost is found by whoever comes next."""

    def __init__(self, look: Callable[[], T | None], back: Callable[[T], None]) -> None:
        self._look = look
        self._back = back
        self._line: list[asyncio.Future[T]] = []

    async def wait(self, timeout: float) -> T | None:
        if (found := self._look()) is not None:
            return found
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            self._line.append(turn)
            async with asyncio.timeout(timeout):
                return await turn
        except TimeoutError:
            return turn.result() if _came(turn) else None
        except BaseException:
            if _came(turn):
                self._back(turn.result())
            raise
        finally:
            with contextlib.suppress(ValueError):  # it came
                self._line.remove(turn)

    def ring(self) -> None:
        while self._line:
            turn = self._line[0]
            if not turn.done():
                if (found := self._look()) is None:
                    return
                turn.set_result(found)
            self._line.remove(turn)


def _came(turn: asyncio.Future[T]) -> bool:
    """In the moment that its owner gave up."""
    return turn.done() and not turn.cancelled()
