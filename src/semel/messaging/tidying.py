"""What a relay does beside its sending: waits for its outbox at the start, and removes what is over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final

from sqlalchemy.exc import DBAPIError

from semel.errors import ConfigurationError, StoreUnavailable
from semel.messaging.beside import Beside
from semel.messaging.carrier import Carrier
from semel.messaging.events import Alarm, Emit
from semel.messaging.failures import is_away
from semel.messaging.outbox import Outbox
from semel.messaging.pages import Ledger
from semel.messaging.pauses import delay, waited

__all__ = ["Tidying", "patiently"]

_CLEANING: Final = 10.0
_LISTING: Final = 3600.0
_STARTING: Final = (0.5, 30.0)  # between looks for a database that is not there yet


async def patiently(start: Callable[[], Awaitable[None]], outbox: Outbox, emit: Emit) -> None:
    """`start()`, again and again while the outbox's database is away. ConfigurationError when it is there and will not have us."""
    misses = 0
    while True:
        try:
            await start()
        except (StoreUnavailable, DBAPIError) as error:
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            if not is_away(error):
                raise ConfigurationError(
                    f"the outbox in {outbox.home.where} cannot be used: {reason}. Correct the URL, the user or its rights"
                ) from error
            misses += 1
            seconds = delay(_STARTING, misses)
            emit(Alarm("database", f"the relay waits for its outbox, {seconds:.1f} s: {reason}"))
            await asyncio.sleep(seconds)
        else:
            return


class Tidying:
    """Ids that were delivered a retention ago, kept batches, large bodies; and a look at the outboxes beside."""

    def __init__(self, outbox: Outbox, ledger: Ledger, carrier: Carrier, emit: Emit) -> None:
        self._outbox = outbox
        self._ledger = ledger
        self._carrier = carrier
        self._emit = emit
        self._beside = Beside(outbox, emit)
        self._cleaned = -_CLEANING
        self._listed = -_LISTING  # when orphans were last looked for

    async def run(self, stopping: asyncio.Event) -> None:
        """Now and then, until it is told to stop."""
        while True:
            await self._clean()
            await self._beside.now_and_then(self._moved)
            if await waited(stopping, _CLEANING):
                return

    async def once(self) -> None:
        """Now, unless that was a moment ago."""
        if time.monotonic() - self._cleaned > _CLEANING:
            await self._clean()
        if not self._moved:
            await self._beside.at_once()

    @property
    def _moved(self) -> int:
        report = self._carrier.tally.report
        return report.sent + report.duplicates

    async def _clean(self) -> None:
        """A bounded number at a time, until nothing is over."""
        self._cleaned = time.monotonic()
        kept, safety = self._outbox.retention, self._carrier.limits.sink_safety
        with contextlib.suppress(StoreUnavailable, DBAPIError):  # the next one does it
            cleaned = True
            while cleaned:
                cleaned = await self._ledger.run(lambda page: page.clean(kept, safety)) > 0
            await self._tend()

    async def _tend(self) -> None:
        """Bodies that are over. To look for orphans is to list all bodies: now and then, and by one relay of them all."""
        due = 0 in self._carrier.parts and time.monotonic() > self._listed + _LISTING
        if due:
            self._listed = time.monotonic()
        try:
            await self._outbox.tend(orphans=due)
        except Exception as error:  # noqa: BLE001 - whatever a store of bodies does: sending goes on
            self._emit(Alarm("bodies", f"large bodies that are over could not be removed: {error!r}"))
