"""Relays of another name that carry some of the same messages: a relay that finds one alive does not begin. One of the same name
with other routes is told of: it may be the next version of the program, which is being deployed.

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
        """While it carries: ConfigurationError if a rival lives that began earlier; of a younger one it is told once, and so of one of
        its own name with other routes."""
        everyone = await self._ledger.read(lambda page: page.everyone())
        for each in everyone:
            if each.team == self._team and (other := self._with_other_routes(each)) is not None:
                self._tell_once(each, "routes", self._unlike(other))
        since = next((each.since for each in everyone if each.relay == self._relay), None)
        if since is None:
            return
        for each in self._rivals_among(everyone):
            if (each.since, each.team, each.relay) < (since, self._team, self._relay):
                raise self._refused(each)
            self._tell_once(each, "overlap", str(self._refused(each)))

    def _tell_once(self, other: Neighbour, what: str, message: str) -> None:
        if (other.team, other.relay) not in self._told:
            self._told.add((other.team, other.relay))
            self._emit(Alarm(what, message))

    def _with_other_routes(self, other: Neighbour) -> Scope | None:
        scope = scope_of(other.about)
        return None if scope is None or _duty(scope) == _duty(self._scope) else scope

    def _unlike(self, other: Scope) -> str:
        return (
            f"another relay of the name {self._team!r} ({other.at}) has other routes: {_said(other)}, and this one {_said(self._scope)}. "
            "Relays of one name share the parts of the outbox, so each leaves in its parts what only the other one carries: it waits, "
            "with no end. Give relays with different routes a name= each, or all of them the same routes. While a new version is being "
            "deployed this passes"
        )

    def _look(self, page: Page) -> list[Neighbour]:
        return self._rivals_among(page.everyone())

    def _rivals_among(self, everyone: Sequence[Neighbour]) -> list[Neighbour]:
        return [each for each in everyone if each.team != self._team and self._common(each)]

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


def _duty(scope: Scope) -> tuple[frozenset[str], ...]:
    return frozenset(scope.patterns), frozenset(scope.topics), frozenset(scope.tenants)


def _said(scope: Scope) -> str:
    limits = [
        f"{name}={', '.join(sorted(some))}"
        for name, some in (("topics", scope.topics), ("tenants", scope.tenants))
        if some
    ]
    return " ".join([", ".join(map(repr, sorted(scope.patterns))), *limits])
