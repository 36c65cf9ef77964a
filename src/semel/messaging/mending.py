"""Where a sink and the database disagree: a batch that the sink has and should not, or has not and should, or an owner that it
refuses. What is done about it is written down before anything is sent again."""

from __future__ import annotations

from dataclasses import dataclass

from semel.messaging.holdings import Holdings
from semel.messaging.pages import Ledger, Page
from semel.messaging.parts import Part, Shipment
from semel.messaging.sink import Fenced
from semel.messaging.tally import Tally

__all__ = ["Damage", "Mending"]


@dataclass(frozen=True, slots=True)
class Damage:
    """What has to be set right before the next round: a number that was not expected, or an epoch."""

    part: Part
    shipment: Shipment
    found: int = 0
    fenced: Fenced | None = None


class Mending:
    """Sets damage right, each in a transaction of its own."""

    def __init__(self, ledger: Ledger, holdings: Holdings, tally: Tally) -> None:
        self._ledger = ledger
        self._holdings = holdings
        self._tally = tally

    async def mend(self, damage: Damage) -> None:
        """Nothing, for a part that is somebody else's by now."""
        part, shipment, found = damage.part, damage.shipment, damage.found
        if not self._holdings.has(part):
            return
        if damage.fenced is not None:
            await self._ledger.run(self._refused, part, damage.fenced.epoch)
        else:
            set_right = self._ahead if found >= shipment.no else self._lost_tail
            await self._ledger.run(set_right, part, shipment, found)

    def _refused(self, page: Page, part: Part, epoch: int | None) -> None:
        """The sink knows a higher epoch. Another relay's; or of a time that this database has forgotten."""
        if not page.hold({part.number: part.epoch}):
            self._holdings.overtaken(part)
            return
        beyond = epoch if epoch is not None else part.epoch * 2
        page.raise_epoch(part.number, part.epoch, beyond)
        self._tally.alarm(
            "sink-ahead",
            f"part {part.number}: the sink knows a later owner than this database ever had: was it restored to an "
            "earlier time? Its messages are sent under an epoch beyond that one",
        )
        self._holdings.drop(part)

    def _ahead(self, page: Page, part: Part, shipment: Shipment, found: int) -> None:
        """The sink has a number that nobody can have sent from here."""
        if not self._holdings.settle(page, [part], save=False):
            return
        self._tally.alarm(
            "sink-ahead",
            f"{shipment.lane} part {part.number} holds batch {found}, and {shipment.no} was never sent: was the "
            "database restored to an earlier time, or a route renamed? Its messages are sent beyond that number",
        )
        part.ahead(shipment.lane, found)
        self._holdings.save(page, [part])

    def _lost_tail(self, page: Page, part: Part, shipment: Shipment, found: int) -> None:
        """The sink holds less than it confirmed. Write down what is sent again, and under which numbers."""
        if not self._holdings.settle(page, [part], save=False):
            return
        lane = shipment.lane
        kept = sorted(page.kept(part.number, lane, found))
        lost = (kept[0] if kept else shipment.no) - found - 1
        for new, old in enumerate(kept, start=found + 1):
            if new != old:
                page.renumber(part.number, lane, old, new)
        part.lost_tail(lane, found, len(kept))
        self._holdings.save(page, [part])
        self._tally.alarm(
            "lost-tail",
            f"{lane} part {part.number} lost its tail: it holds batch {found}, {shipment.no - 1} was confirmed. "
            f"{len(kept)} kept batches are sent again"
            + (f", {lost} are gone for good: raise sink_safety" if lost else ""),
        )
