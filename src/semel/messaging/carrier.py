"""Rounds of a relay: one transaction that settles what was delivered and writes down what is next, then the sending."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from sqlalchemy.exc import DBAPIError

from semel.errors import ConfigurationError, StoreUnavailable
from semel.messaging.away import Away
from semel.messaging.events import Emit
from semel.messaging.holdings import Holdings
from semel.messaging.mending import Damage, Mending
from semel.messaging.pages import Ledger, Page, Superseded, Want
from semel.messaging.parts import Part, Shipment
from semel.messaging.planning import Limits, Planning
from semel.messaging.routes import Router
from semel.messaging.sending import Sending, Sent
from semel.messaging.shaping import explained
from semel.messaging.sink import Fenced, Rejected, Row, SinkUnavailable
from semel.messaging.tally import Tally
from semel.points import reach
from semel.shown import shown

__all__ = ["Carrier"]

_SLOW: Final = (
    0.25  # so long a round waits for its batches; those that take longer are looked after in a later one
)


class Carrier:
    """The parts that a relay owns now, and what it does with them."""

    def __init__(
        self,
        ledger: Ledger,
        router: Router,
        limits: Limits,
        emit: Emit,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        self.ledger = ledger
        self.router = router
        self.limits = limits
        self.tally = Tally(emit)
        self.away = Away(emit)
        self._sending = Sending(ledger, router, arrived)
        self.holdings = Holdings(self._sending, self.away, self.tally)
        self.planning = Planning(router, limits, self.holdings, self._sending, self.away, self.tally)
        self._mending = Mending(ledger, self.holdings, self.tally)
        self.stranded: set[str] = set()  # lanes with a batch under way that no route leads to any more

    @property
    def parts(self) -> dict[int, Part]:
        """The parts that are owned now, by number."""
        return self.holdings.parts

    # ------------------------------------------------------------------------------------------- a round
    async def round(self, parts: Sequence[Part]) -> bool:
        """Whether anything moved. Whatever goes wrong, the parts are given up and taken anew: what is in memory may be
        ahead of what is written, or behind it."""
        try:
            return await self._round([part for part in parts if self.holdings.has(part)])
        except Superseded as lost:
            for part in parts:
                (self.holdings.overtaken if part.number in lost.parts else self.holdings.drop)(part)
            return True
        except BaseException:
            for part in parts:
                self.holdings.drop(part)
            raise

    async def _round(self, parts: list[Part]) -> bool:
        landed = await self._land(parts)
        # One that is to be given back waits for what it has under way, and begins nothing else.
        parts = [p for p in parts if self.holdings.has(p) and not (p.leaving and self._sending.of([p]))]
        ready = self._ready(parts)
        # While something is away others may be found that are better to try with than what failed.
        if not ready or self.away or any(part.dirty or part.outcome for part in parts):
            if not ready and not await self._anything(parts):
                return landed
            await self.ledger.run(self.planning.plan, parts)
            reach("relay.planned")
            ready = self._ready([part for part in parts if self.holdings.has(part)])
        begun = [sent for shipment in ready if (sent := self._begin(shipment)) is not None]
        if not ready:
            return landed
        await self._sending.wait(begun, _SLOW)
        await self._land(parts)
        return True

    async def _land(self, parts: list[Part]) -> bool:
        """Note what came of batches that have come to their end. Whether there were any."""
        landed = self._sending.landed(parts)
        damages = [self._note(sent) for sent in landed]
        if landed:
            reach("relay.published")
        for damage in filter(None, damages):  # when all are noted: mending changes the part's state
            await self._mending.mend(damage)
        return bool(landed)

    def under_way(self, parts: Collection[Part]) -> bool:
        """Whether these parts have batches on their way."""
        return bool(self._sending.of(parts))

    async def landing(self, parts: list[Part], *, all_of_them: bool = True) -> None:
        """Wait for batches that are on their way: all of them, or the first."""
        while sending := self._sending.of(parts):
            await self._sending.wait(sending, None, all_of_them=all_of_them)
            await self._land(parts)
            if not all_of_them:
                return

    async def _anything(self, parts: list[Part]) -> bool:
        if any(part.dirty or part.outcome for part in parts):
            return True
        numbers = [part.number for part in parts]
        return bool(numbers) and await self.ledger.read(_waiting, self.planning.want(numbers, parts))

    def _ready(self, parts: Sequence[Part]) -> list[Shipment]:
        """Batches that are written down and not on their way, whose sink is not known to be away."""
        found, under_way = [], self._sending.places
        for part in parts:
            for shipment in part.shipments(self.router):
                if shipment.target is None:
                    self._strand(shipment)
                elif (part.number, shipment.lane) not in under_way:
                    found.append(shipment)
        return self.away.sift(found)

    def _strand(self, shipment: Shipment) -> None:
        """A batch that no route of today can send."""
        self.stranded.add(shipment.lane)
        self.tally.alarm_once(
            "route",
            f"{len(shipment.rows)} messages are under way to {shipment.lane!r} and no route has that name any more: "
            "they wait, and so does what follows them under their keys. Name a route so again, "
            f"Route(…, name={shipment.lane.partition('/')[0]!r}), until they are sent",
        )

    # ----------------------------------------------------------------------------------------- shipping
    def _begin(self, shipment: Shipment) -> Sent | None:
        """Put a batch on its way."""
        part, target = self.parts.get(shipment.part), shipment.target
        if part is None or target is None:
            return None
        sent = Sent(part, shipment, target)
        try:
            sent.rows = self._shaped(sent)
        except Rejected as error:
            self._rejected(sent, error)
            return None
        except SinkUnavailable as error:
            self.away.pause(shipment, str(error), error.seconds, None)
            return None
        sent.fresh = part.try_lane(shipment.lane)
        sent.resend = tuple(part.state.lanes[shipment.lane].resend)
        self.away.begins(shipment)
        self._sending.start(sent)
        return sent

    def _shaped(self, sent: Sent) -> list[Row]:
        """The rows as they are sent. A transform that fails is a rejection of its message, not of the batch; once a batch
        may be at its sink, it is sent as it is numbered or not at all."""
        shipment = sent.shipment
        if not self.router.transforms:
            return shipment.rows
        rows, failed = [], {}
        for row in shipment.rows:
            try:
                rows.append(self.router.shaped(sent.target.way, row))
            except Exception as error:  # noqa: BLE001 - the user's function
                failed[row.id] = f"transform failed: {explained(error)}"
        if failed and sent.part.was_tried(shipment.lane):
            raise SinkUnavailable(
                f"a batch that may have been sent cannot be made again: {next(iter(failed.values()))}"
            )
        if failed:
            raise Rejected(failed)
        return rows

    # ------------------------------------------------------------------------------------ what came of it
    def _note(self, sent: Sent) -> Damage | None:
        """What came of a batch. What is to be mended, if the sink does not have what it should."""
        part, shipment, found = sent.part, sent.shipment, sent.found
        self.away.ended(part.number, shipment.lane)
        self.tally.report.resent += sent.resent
        if sent.again:  # written with the next state; until then it would be sent again, and found there
            part.state.lanes[shipment.lane].resend = []
        if sent.error is not None:
            return self._failed(sent, sent.error)
        self.away.back(shipment)
        if found is not None and found != shipment.no - 1 and (found != shipment.no or sent.fresh):
            return Damage(part, shipment, found)
        part.delivered(shipment, keep=self.limits.sink_safety > 0, numbered=found is not None)
        duplicate = found is not None and found >= shipment.no
        self.tally.delivered(shipment, sent.rows, sent.seconds, duplicate=duplicate)
        return None

    def _failed(self, sent: Sent, error: BaseException) -> Damage | None:
        """Whose fault it is decides who waits: a message, the sink, or nobody."""
        shipment, target = sent.shipment, sent.target
        match error:
            case Fenced():
                return Damage(sent.part, shipment, fenced=error)
            case Rejected():
                self._rejected(sent, error)
            case SinkUnavailable():
                self.away.pause(shipment, str(error), error.seconds, error.endpoint)
                if not getattr(target.sink, "numbered", True):
                    sent.part.withdrawn(shipment)
            case ConfigurationError():  # wrong credentials, a place that is not there: somebody has to act
                self.tally.alarm_once("configuration", str(error))
                self.away.pause(shipment, str(error), None, None)
            case StoreUnavailable() | DBAPIError():
                raise error
            case Exception():  # a sink's bug pauses the sink, never loses or stops the rest
                self.tally.alarm_once(
                    "error", f"sink {target.way!r} failed in an unforeseen way: {shown(error)}"
                )
                self.away.pause(shipment, shown(error), None, None)
            case _:
                raise error
        return None

    def _rejected(self, sent: Sent, error: Rejected) -> None:
        shipment = sent.shipment
        parked = sent.part.rejected(
            shipment,
            error,
            attempts=self.limits.max_attempts,
            backoff=self.limits.backoff,
            keeps=sent.target.sink.guarantee != "at-least-once",
        )
        taken = [row for row in shipment.rows if row.id in error.delivered]
        self.tally.delivered(shipment, taken, sent.seconds, duplicate=False)
        for row in shipment.rows:
            if (reason := error.reasons.get(row.id)) is not None:
                self.tally.declined(shipment.lane, row.topic, row.id, reason)
        for line in parked:
            self.tally.parked(line)


def _waiting(page: Page, want: Want) -> bool:
    return page.waiting(want)
