"""Relays of another name that carry some of the same messages: a relay that finds one alive does not begin.

Who starts first writes down that it lives, and then looks: of two that start at once at least one sees the other. One that
died is waited for, at most its lease. A relay that was stopped for longer than its lease, and goes on, may still meet one that
began meanwhile: then the younger one ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from semel.errors import ConfigurationError
from semel.messaging.events import Alarm, Emit
from semel.messaging.pages import Ledger, Page
from semel.messaging.scopes import Neighbour, Scope, common, scope_of

__all__ = ["Rivals"]

_LOOK: Final = 0.25  # seconds


class Rivals:
    """What a relay knows of the others. `relay` and `team` are its own."""

    def __init__(self, ledger: Ledger, team: str, relay: str, scope: Scope, emit: Emit) -> None:
        self._ledger = ledger
        self._team = team
        self._relay = relay
        self._scope = scope
        self._emit = emit
        self._told: set[tuple[str, str]] = set()

    async def settle(self, join: Callable[[], Awaitable[None]]) -> None:
        """`join()`, once no rival lives. ConfigurationError for one that does."""
        while True:
            await join()
            found = await self._ledger.read(self._look)
            if not found:
                return
            await self._ledger.run(lambda page: page.leave(self._relay))  # nobody is to wait for us
            while found:
                found = await self._outwait(found)

    async def _outwait(self, before: Sequence[Neighbour]) -> list[Neighbour]:
        """Those that are left after a moment; ConfigurationError if one of them said meanwhile that it lives."""
        # Two that met at their start must not meet again and again.
        share = random.uniform(0.2, 1.0)  # noqa: S311 - a delay
        await asyncio.sleep(share * min(_LOOK, *(each.left for each in before)))
        left = {(each.team, each.relay): each.left for each in before}
        found = await self._ledger.read(self._look)
        for each in found:
            if each.left >= left.get((each.team, each.relay), each.left + 1):
                raise self._refused(each)
        return found

    async def check(self) -> None:
        """While it carries: ConfigurationError if a rival lives that began earlier; of a younger one it is told once."""
        for each, ours in await self._ledger.read(self._compared):
            if (each.since, each.team, each.relay) < (ours, self._team, self._relay):
                raise self._refused(each)
            if (each.team, each.relay) not in self._told:
                self._told.add((each.team, each.relay))
                self._emit(Alarm("overlap", str(self._refused(each))))

    def _look(self, page: Page) -> list[Neighbour]:
        return self._rivals_among(page.everyone())

    def _rivals_among(self, everyone: Sequence[Neighbour]) -> list[Neighbour]:
        return [each for each in everyone if each.team != self._team and self._common(each)]

    def _compared(self, page: Page) -> list[tuple[Neighbour, float]]:
        """Each rival, and since when we are there ourselves, by the same look."""
        everyone = page.everyone()
        ours = [each.since for each in everyone if each.relay == self._relay]
        return [(each, ours[0]) for each in self._rivals_among(everyone) if ours]

    def _common(self, other: Neighbour) -> str | None:
        scope = scope_of(other.about)
        return None if scope is None else common(self._scope, scope)

    def _refused(self, other: Neighbour) -> ConfigurationError:
        scope = scope_of(other.about)
        where = "?" if scope is None else scope.at
        return ConfigurationError(
            f"relay {self._team!r} and relay {other.team!r} ({where}), which is running, both carry {self._common(other)}: whichever "
            "delivers a message first deletes it, so some would go out twice and some by one of them only. Give relays that share "
            "the work the same name=, several sinks to one relay (a list of routes), or topics= and tenants= that do not "
            "overlap; to rename a relay, end the old one first"
        )
