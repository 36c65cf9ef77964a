"""A relay as one of its team: it says that it lives, takes the parts that are its own by the draw, and gives back others'."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from semel.messaging.events import Alarm, Emit
from semel.messaging.holdings import Holdings
from semel.messaging.outbox import Outbox
from semel.messaging.pages import Ledger, Member, Page
from semel.messaging.parts import Part
from semel.messaging.teams import draw

__all__ = ["Membership"]


class Membership:
    """Of the relay `relay`, which says `about` itself; it lives for `lease` seconds after each `join`."""

    def __init__(
        self,
        outbox: Outbox,
        ledger: Ledger,
        holdings: Holdings,
        *,
        relay: str,
        about: str,
        lease: float,
        emit: Emit,
    ) -> None:
        self._outbox = outbox
        self._ledger = ledger
        self._holdings = holdings
        self._relay = relay
        self._about = about
        self._lease = lease
        self._emit = emit
        self._balancing = asyncio.Lock()
        self._heard: float | None = None  # when the database last took a heartbeat

    @property
    def silence(self) -> float | None:
        """Seconds since the database last took a heartbeat; None: never."""
        return None if self._heard is None else time.monotonic() - self._heard

    def begin(self) -> None:
        """In this event loop from now on."""
        self._balancing = asyncio.Lock()

    async def join(self) -> None:
        """Say that this relay lives."""
        parts = self._outbox.parts
        await self._ledger.run(lambda page: page.join(self._relay, self._lease, self._about, parts))
        self._heard = time.monotonic()

    async def leave(self) -> None:
        """Give everything back: the next relay need not wait for the lease."""
        if (
            self._heard is None
        ):  # it never said that it lives, and a database that is away is not waited for once more
            return
        await self._ledger.run(lambda page: page.leave(self._relay))

    async def others_end(self) -> float:
        """When the leases end that other relays hold now: those that are dead do not renew them."""
        living = await self._ledger.run(_living)
        left = (left for name, (left, _) in living.items() if name != self._relay)
        return time.monotonic() + max(left, default=0.0)

    async def rebalance(self) -> None:
        """Take free parts that are ours by the draw; give back those that are another living relay's."""
        # One at a time: who looks while another one takes would believe that somebody else has.
        async with self._balancing:
            await self._balance()

    async def _balance(self) -> None:
        # In this order: who owned a part when it was read had joined before, and is found among the living.
        members = await self._ledger.run(_members)
        living = await self._ledger.run(_living)
        names = sorted({*living, self._relay})
        free = []
        for member in members:
            if member.part >= self._outbox.parts:
                continue
            mine = draw(member.part, names) == self._relay
            held = self._holdings.parts.get(member.part)
            if held is not None and held.epoch != member.epoch:
                self._holdings.overtaken(held)
                held = None
            if member.owner == self._relay and held is not None:
                held.leaving = not mine
            elif mine and (member.owner in {None, self._relay} or member.owner not in living):
                free.append(member)
            elif member.owner == self._relay:  # given up after an error, and somebody else's now
                await self._ledger.run(_release, member)
        if free:
            self._holdings.take(await self._ledger.run(self._take, free))

    def _take(self, page: Page, free: list[Member]) -> list[Part]:
        """Own the parts from now on, with what their last owner left under way."""
        taken = {}
        for member, state in page.take(self._relay, free):
            part = taken[member.part] = Part(member.part, member.epoch + 1, state)
            if part.open and (gone := part.adopt(page.fetch(part.number, part.open))):
                self._emit(
                    Alarm(
                        "rows-gone",
                        f"{gone} messages that were under way in part {part.number} are not in the outbox any more: did somebody "
                        "delete them, or does a relay of another name carry them too? They are not sent from here",
                    )
                )
        for line in page.lines(list(taken)):
            taken[line.part].lines[line.name] = line
        return list(taken.values())

    async def hand_over(self, leaving: Sequence[Part]) -> None:
        """Give parts back that are another one's by the draw, with what came of their last batches."""
        if not leaving:
            return
        try:
            await self._ledger.run(self._give_back, leaving)
        except BaseException:  # what is in memory may be ahead of what is written: take them anew, if at all
            for part in leaving:
                self._holdings.drop(part)
            raise

    def _give_back(self, page: Page, leaving: Sequence[Part]) -> None:
        for part in self._holdings.settle(page, leaving):
            page.release(part.number, part.epoch)
            self._holdings.drop(part)


def _members(page: Page) -> list[Member]:
    return page.members()


def _living(page: Page) -> dict[str, tuple[float, float]]:
    return page.alive()


def _release(page: Page, member: Member) -> None:
    page.release(member.part, member.epoch)
