"""The look at a Redis server before first use: one for all who come at that moment, of a process or of an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from time import monotonic
from types import TracebackType
from typing import TypeAlias

from semel import forks
from semel.bell import Bell
from semel.store import Colour

__all__ = ["Look", "Looks"]

_Place: TypeAlias = tuple[int, asyncio.AbstractEventLoop | None]  # a process, and a loop of it


class Look:
    """One of them, and who waits for what it finds."""

    def __init__(self) -> None:
        self.leader = threading.get_ident()
        self.then: Look | None = None
        """The one for those who waited for this, which had begun before they came: its word is the last one for all of them."""
        self._wakes: list[Callable[[], None]] = []
        self._over = False
        self._error: tuple[Exception, TracebackType | None] | None = None

    def failed(self, error: Exception) -> None:
        self._error = error, error.__traceback__

    def end(self) -> None:
        self._over = True  # before the list is read: who comes into it later looks at this first
        for wake in self._wakes:
            wake()

    async def heard(self, colour: Colour, limit: float) -> bool:
        """Whether it has ended by then; raises what it raised. One that was broken off found nothing, and raises nothing."""
        if colour == "sync":
            bell = Bell()
            self._wakes.append(bell.ring)
            ended = self._over or bell.heard(limit)
        else:
            event = asyncio.Event()
            self._wakes.append(event.set)
            ended = self._over or await _is_set(event, limit)
        if self._error is not None:
            error, trace = self._error
            raise error.with_traceback(trace)  # as a future does: told to many, it would grow by each of them
        return ended


async def _is_set(event: asyncio.Event, limit: float) -> bool:
    try:
        async with asyncio.timeout(limit):
            return await event.wait()
    except TimeoutError:
        return False


class Looks(dict[_Place, Look]):
    """Those that are under way. Each ends by itself within `limit` seconds."""

    def __init__(self, colour: Colour, limit: float) -> None:
        super().__init__()
        self._colour: Colour = colour
        self._limit = limit

    async def once(self, is_done: Callable[[], bool], look: Callable[[], Awaitable[str]]) -> str:
        """What the look says, to whoever leads it; "" to the others.

        What went wrong is told to all of them, and the next caller looks again: so do, together and once, those that came while it
        went wrong, if that was quick, for what it saw may be older than their calls. A leader that is cancelled promotes one; one
        that a signal's handler struck where nothing could be told is waited for no longer than the limit.
        """
        patient_until = monotonic() + self._limit / 4
        place = (forks.epoch, None if self._colour == "sync" else asyncio.get_running_loop())
        older: Look | None = None
        while not is_done():
            mine = Look()
            one = (older and older.then) or self.setdefault(place, mine)
            if older is not None:
                older.then = one
            # A signal's handler, in the very thread that looks, would wait for itself.
            if one is mine or (self._colour == "sync" and one.leader == mine.leader):
                return await self._lead(place, mine, look)
            try:
                if not await one.heard(self._colour, self._limit) and self.get(place) is one:
                    self.pop(place, None)
                older = None  # it was broken off, or does not end
            except Exception:
                if monotonic() >= patient_until:
                    raise
                older, patient_until = one, 0.0
        return ""

    async def _lead(self, place: _Place, mine: Look, look: Callable[[], Awaitable[str]]) -> str:
        try:
            return await look()
        except Exception as error:
            mine.failed(error)
            raise
        finally:
            if self.get(place) is mine:
                del self[place]
            mine.end()
