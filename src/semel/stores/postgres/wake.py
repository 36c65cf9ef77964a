"""Wake-ups: the one connection that hears of settles elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import Any

from semel.errors import SemelError
from semel.stores.postgres.errors import Lost, Trouble
from semel.stores.postgres.home import World
from semel.stores.postgres.link import Ear, NotReached, Source
from semel.stores.watchers import Watchers

__all__ = ["Listening"]

_IDLE = 5.0  # seconds of silence after which the connection is looked at, and left when nobody waits any more


class Listening:
    """One LISTEN connection for all waiters of a home, made when the first of them comes.

    When it is lost everybody is woken, it is made again, and everybody is woken once more: a notification may have
    gone by in between.
    """

    def __init__(
        self, source: Source, world: World, channel: str, watchers: Watchers, timeout: float
    ) -> None:
        self._source = source
        self._world = world
        self._channel = channel
        self._watchers = watchers
        self._timeout = timeout
        self._lock = threading.Lock()
        self._up = world.flag()
        self._end: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._ear: Ear | None = None
        self._closed = False
        self.deaf = False
        """No connection can be had for listening: waiters must poll."""

    async def ensure(self, timeout: float) -> bool:
        """Whether it listens, after waiting for that at most `timeout` seconds."""
        with self._lock:
            if self._end is None and not self._closed:
                self._end = self._world.spawn(self._keep())
        return await self._up.wait(timeout)

    async def _keep(self) -> None:
        delay = 0.05
        while not self._closed:
            try:
                ear = await self._source.listen(self._channel, self._timeout)
            except (NotReached, Trouble, SemelError):
                if self._nobody_waits():
                    return
                await self._world.pause(delay)
                delay = min(1.0, delay * 2)
                continue
            delay = 0.05
            if ear is None:
                self.deaf = True
                self._up.set()
                return
            self._ear = ear
            try:
                needed = await self._hear(ear)
            finally:
                await ear.quit()
            if not needed:
                return
            self._watchers.wake_all()

    async def _hear(self, ear: Ear) -> bool:
        """Listen until the connection is lost (True) or nobody needs it any more."""
        self._up.set()
        self._watchers.wake_all()
        try:
            while not self._closed:
                payloads = await ear.hear(_IDLE)
                for payload in payloads:
                    self._watchers.wake_hex(payload)
                if not payloads and self._nobody_waits():
                    return False
        except (Lost, SemelError):
            self._up.clear()
        return not self._closed

    def _nobody_waits(self) -> bool:
        """If so, whoever comes next starts anew."""
        with self._lock:
            if self._watchers:
                return False
            self._up.clear()
            self._ear = self._end = None
            return True

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            end, ear = self._end, self._ear
            self._end = None
        if ear is not None:
            ear.stop()
        if end is not None:
            await end()
