"""Rounds of a relay: one transaction that settles what was delivered and writes down what is next, then the sending."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy.exc import DBAPIError

from semel.errors import ConfigurationError, StoreUnavailable
from semel.messaging.away import Away, busy
from semel.messaging.events import Alarm, Declined, Delivered, Emit, Overtaken, Parked
from semel.messaging.pages import Ledger, Page, Shut, Superseded, Want
from semel.messaging.parts import Part, Shipment
from semel.messaging.routes import Router, Target
from semel.messaging.sending import Sending, Sent
from semel.messaging.sink import Fenced, Rejected, Row, SinkUnavailable
from semel.points import reach

__all__ = ["Carrier", "Limits", "Report"]

_ROUND: Final = 4  # batches in one transaction, over all parts
_BYTES: Final = 16 << 20  # of bodies in one round
_OTHERS: Final = 8  # rounds
_SLOW: Final = (
    0.25  # so long a round waits for its batches; those that take longer are looked after in a later one
)


@dataclass(slots=True)
class Report:
    """What a relay did, in messages, and what still waits, by topic."""

    sent: int = 0
    duplicates: int = 0
    parked: int = 0
    rejected: int = 0
    resent: int = 0
    batches: int = 0
    overtaken: int = 0
    by_topic: dict[str, int] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    unroutable: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Repair:
    """What a round has to set right before its next one: a number that was not expected, or an epoch."""

    part: Part
    shipment: Shipment
    found: int = 0
    fenced: Fenced | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a relay was told to observe."""

    batch: int
    max_attempts: int
    backoff: tuple[float, float]
    sink_safety: float
    topics: tuple[str, ...]
    tenants: tuple[str, ...]
    fair: bool = True


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
        self.emit = emit
        self.parts: dict[int, Part] = {}
        self.away = Away(emit)
        self._sending = Sending(ledger, router, arrived)
        self._targets: dict[str, Target] = {target.way: target for target in router.targets}
        self.unknown: set[str] = set()
        self.stranded: set[str] = set()  # lanes with a batch under way that no route leads to any more
        self.report = Report()
        self._topics: dict[str, set[str]] = {}  # topic → the ways it may go
        self._turn = 0
        self._after: dict[int, str] = {}  # by part with several tenants: where the look for them goes on
        self._looks = 0
        self._alarmed: set[tuple[str, str]] = set()

    # ------------------------------------------------------------------------------------------- a round
    async def round(self, parts: Sequence[Part]) -> bool:
        """Whether anything moved. Whatever goes wrong, the parts are given up and taken anew: what is in memory may be
        ahead of what is written, or behind it."""
        try:
            return await self._round([part for part in parts if self._has(part)])
        except Superseded as lost:
            for part in parts:
                (self.overtaken if part.number in lost.parts else self.drop)(part)
            return True
        except BaseException:
            for part in parts:
                self.drop(part)
            raise

    async def _round(self, parts: list[Part]) -> bool:
        landed = await self._land(parts)
        # One that is to be given back waits for what it has under way, and begins nothing else.
        parts = [p for p in parts if self._has(p) and not (p.leaving and self._sending.of([p]))]
        ready = self._ready(parts)
        # While something is away others may be found that are better to try with than what failed.
        if not ready or self.away or any(part.dirty or part.outcome for part in parts):
            if not ready and not await self._anything(parts):
                return landed
            await self.ledger.run(self._plan, parts)
            reach("relay.planned")
            ready = self._ready([part for part in parts if self._has(part)])
        begun = [sent for shipment in ready if (sent := self._begin(shipment)) is not None]
        if not ready:
            return landed
        await self._sending.wait(begun, _SLOW)
        await self._land(parts)
        return True

    def _has(self, part: Part) -> bool:
        return self.parts.get(part.number) is part

    async def _land(self, parts: list[Part]) -> bool:
        """Note what came of batches that have come to their end. Whether there were any."""
        landed = self._sending.landed(parts)
        repairs = [self._note(sent) for sent in landed]
        if landed:
            reach("relay.published")
        for repair in filter(None, repairs):  # when all are noted: it changes the part's state
            await self._repair(repair)
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
        want = self.want(numbers, parts)
        return bool(numbers) and await self.ledger.read(_waiting, want)

    def want(self, numbers: list[int], parts: Collection[Part] = ()) -> Want:
        """What to look for. Each time another part comes first, so that none waits for ever behind the others."""
        turn = self._turn % len(numbers) if numbers else 0
        return Want(
            parts=numbers[turn:] + numbers[:turn],
            each=self.limits.batch,
            total=self.limits.batch * _ROUND,
            topics=self.unknown | self.away.topics(self._topics),
            shut=self._shut(parts),
            only_topics=self.limits.topics,
            tenants=self.limits.tenants,
            open={part.number: part.open for part in parts},
            lines=not parts or any(part.lines for part in parts),
            # Of one tenant alone the others are looked for now and then.
            fair=self.limits.fair and (bool(self._after) or self._looks % _OTHERS == 0),
            after=self._after,
        )

    def _shut(self, parts: Collection[Part]) -> list[Shut]:
        """What waits for an endpoint that is away, or behind a batch that takes long."""
        found = self.away.shut(self._topics, parts, self._targets) if self.away else []
        late = [sent.shipment for sent in self._sending.of(parts)]
        return found + busy(late, self._topics) if late else found

    def _learn(self, topics: set[str]) -> None:
        for topic in topics - self._topics.keys():
            self._topics[topic] = self.router.ways(topic)

    def _ready(self, parts: Sequence[Part]) -> list[Shipment]:
        """Batches that are written down and not on their way, whose sink is not known to be away."""
        found = []
        for part in parts:
            for shipment in part.shipments(self.router):
                if shipment.target is None:
                    self.stranded.add(shipment.lane)
                    self._alarm_once(
                        "route",
                        f"{len(shipment.rows)} messages are under way to {shipment.lane!r} and no route has that name any more: "
                        "they wait, and so does what follows them under their keys. Name a route so again, "
                        f"Route(…, name={shipment.lane.partition('/')[0]!r}), until they are sent",
                    )
                elif (part.number, shipment.lane) not in self._sending:
                    found.append(shipment)
        return self.away.sift(found)

    # --------------------------------------------------------------------------------- the transaction
    def _plan(self, page: Page, parts: list[Part]) -> None:
        """What was delivered goes, what is next is written down, in one commit."""
        ours = self.settle(page, parts, save=False)
        self._refresh(page, [part for part in ours if part.lines])
        if self.away:  # which topics must wait is known only of topics that are known
            self._learn(page.topics())
        want = self.want([part.number for part in ours], ours)
        chosen = page.choose(want)
        self._looks += 1
        self._turn += len(chosen) or 1
        for part in ours:
            rows = _bounded(chosen.get(part.number, ()))
            self._learn({row.topic for row in rows})
            unknown = part.accept(rows, self.router)
            for topic in sorted(unknown - self.unknown):
                self._alarm_once(
                    "unroutable", f"no route knows topic {topic!r}: its messages wait in the outbox"
                )
            self.unknown |= unknown
            if part.waiting:
                self.away.learn((self.router.by_lane(lane), lane, row) for lane, row in part.waiting)
            self._write(page, part)
        _save(page, [part for part in ours if part.dirty])
        reach("relay.chosen")
        for part in ours:
            part.dirty = False

    def _refresh(self, page: Page, parts: Sequence[Part]) -> None:
        """Keys that are held back: an operator may have changed them."""
        if not parts:
            return
        numbers = [part.number for part in parts]
        found = page.lines(numbers)
        for part in parts:
            part.lines = {line.name: line for line in found if line.part == part.number}

    def settle(self, page: Page, parts: Sequence[Part], *, save: bool = True) -> list[Part]:
        """Write what came of the last batches, for the parts that are still ours; those are returned, and locked."""
        epochs = {part.number: part.epoch for part in parts}
        held = page.hold(epochs)
        for part in parts:
            if part.number not in held:
                self.overtaken(part)
        ours = [part for part in parts if part.number in held]
        for part in ours:
            self._write(page, part)
        if save:
            _save(page, ours)
        return ours

    def _write(self, page: Page, part: Part) -> None:
        outcome = part.taken()
        if not outcome:
            return
        page.remove(part.number, outcome.gone)
        for lane, number, rows in outcome.kept:
            page.keep(part.number, lane, number, rows)
        for line, after in outcome.held:
            page.hold_back(line, after)
        page.let_go(part.number, outcome.free)

    # ----------------------------------------------------------------------------------------- shipping
    def _begin(self, shipment: Shipment) -> Sent | None:
        """Put a batch on its way."""
        part = self.parts.get(shipment.part)
        if part is None or shipment.target is None:
            return None
        sent = Sent(part, shipment)
        try:
            sent.rows = self._shaped(shipment, part)
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

    def _note(self, sent: Sent) -> _Repair | None:
        """What came of a batch. What is to be repaired, if the sink does not have what it should."""
        part, shipment, found = sent.part, sent.shipment, sent.found
        self.away.ended(part.number, shipment.lane)
        self.report.resent += sent.resent
        if sent.again:  # written with the next state; until then it would be sent again, and found there
            part.state.lanes[shipment.lane].resend = []
        if sent.error is not None:
            return self._failed(sent, sent.error)
        self.away.back(shipment)
        if found is not None and found != shipment.no - 1 and (found != shipment.no or sent.fresh):
            return _Repair(part, shipment, found)
        part.delivered(shipment, keep=self.limits.sink_safety > 0, numbered=found is not None)
        duplicate = found is not None and found >= shipment.no
        self._count(sent.rows, duplicate=duplicate)
        self.emit(Delivered(shipment.lane, part.number, shipment.no, len(sent.rows), sent.seconds, duplicate))
        return None

    def _failed(self, sent: Sent, error: BaseException) -> _Repair | None:
        """Whose fault it is decides who waits: a message, the sink, or nobody."""
        shipment, way = sent.shipment, sent.shipment.target.way  # type: ignore[union-attr]
        match error:
            case Fenced():
                return _Repair(sent.part, shipment, fenced=error)
            case Rejected():
                self._rejected(sent, error)
            case SinkUnavailable():
                self.away.pause(shipment, str(error), error.seconds, error.endpoint)
                if not getattr(shipment.target.sink, "numbered", True):  # type: ignore[union-attr]
                    sent.part.withdrawn(shipment)
            case ConfigurationError():  # wrong credentials, a place that is not there: somebody has to act
                self._alarm_once("configuration", str(error))
                self.away.pause(shipment, str(error), None, None)
            case StoreUnavailable() | DBAPIError():
                raise error
            case Exception():  # a sink's bug pauses the sink, never loses or stops the rest
                self._alarm_once("error", f"sink {way!r} failed in an unforeseen way: {error!r}")
                self.away.pause(shipment, repr(error), None, None)
            case _:
                raise error
        return None

    def _shaped(self, shipment: Shipment, part: Part) -> list[Row]:
        """The rows as they are sent. A transform that fails is a rejection of its message, not of the batch; once a batch
        may be at its sink, it is sent as it is numbered or not at all."""
        way = shipment.target.way  # type: ignore[union-attr]
        rows, failed = [], {}
        for row in shipment.rows:
            try:
                rows.append(self.router.shaped(way, row))
            except Exception as error:  # noqa: BLE001 - the user's function
                failed[row.id] = f"transform failed: {error!r}"
        if failed and part.was_tried(shipment.lane):
            raise SinkUnavailable(
                f"a batch that may have been sent cannot be made again: {next(iter(failed.values()))}"
            )
        if failed:
            raise Rejected(failed)
        return rows

    async def _repair(self, repair: _Repair) -> None:
        """A batch that the sink has and should not, or has not and should; or an owner that it refuses."""
        part, shipment, found = repair.part, repair.shipment, repair.found
        if not self._has(part):
            return
        if repair.fenced is not None:
            await self.ledger.run(self._refused, part, repair.fenced.epoch)
        else:
            mend = self._ahead if found >= shipment.no else self._lost_tail
            await self.ledger.run(mend, part, shipment, found)

    def _refused(self, page: Page, part: Part, epoch: int | None) -> None:
        """The sink knows a higher epoch. Another relay's; or of a time that this database has forgotten."""
        held = page.hold({part.number: part.epoch})
        if held:
            beyond = epoch if epoch is not None else part.epoch * 2
            page.raise_epoch(part.number, part.epoch, beyond)
            self.emit(
                Alarm(
                    "sink-ahead",
                    f"part {part.number}: the sink knows a later owner than this database ever had: was it restored to an "
                    "earlier time? Its messages are sent under an epoch beyond that one",
                )
            )
            self.drop(part)
        else:
            self.overtaken(part)

    def _ahead(self, page: Page, part: Part, shipment: Shipment, found: int) -> None:
        """The sink has a number that nobody can have sent from here."""
        if not self.settle(page, [part], save=False):
            return
        self.emit(
            Alarm(
                "sink-ahead",
                f"{shipment.lane} part {part.number} holds batch {found}, and {shipment.no} was never sent: was the "
                "database restored to an earlier time, or a route renamed? Its messages are sent beyond that number",
            )
        )
        part.ahead(shipment.lane, found)
        _save(page, [part])

    def _lost_tail(self, page: Page, part: Part, shipment: Shipment, found: int) -> None:
        """The sink holds less than it confirmed. Write down what is sent again, and under which numbers."""
        if not self.settle(page, [part], save=False):
            return
        lane = shipment.lane
        kept = sorted(page.kept(part.number, lane, found))
        lost = (kept[0] if kept else shipment.no) - found - 1
        for new, old in enumerate(kept, start=found + 1):
            if new != old:
                page.renumber(part.number, lane, old, new)
        part.lost_tail(lane, found, len(kept))
        _save(page, [part])
        self.emit(
            Alarm(
                "lost-tail",
                f"{lane} part {part.number} lost its tail: it holds batch {found}, {shipment.no - 1} was confirmed. "
                f"{len(kept)} kept batches are sent again"
                + (f", {lost} are gone for good: raise sink_safety" if lost else ""),
            )
        )

    def _rejected(self, sent: Sent, error: Rejected) -> None:
        part, shipment = sent.part, sent.shipment
        sink = shipment.target.sink  # type: ignore[union-attr]
        parked = part.rejected(
            shipment,
            error,
            attempts=self.limits.max_attempts,
            backoff=self.limits.backoff,
            keeps=sink.guarantee != "at-least-once",
        )
        self.report.rejected += len(error.reasons)
        taken = [row for row in shipment.rows if row.id in error.delivered]
        self._count(taken, duplicate=False)
        if taken:
            self.emit(
                Delivered(shipment.lane, part.number, shipment.no, len(taken), sent.seconds, duplicate=False)
            )
        for row in shipment.rows:
            if (reason := error.reasons.get(row.id)) is not None:
                self.emit(Declined(shipment.lane, row.topic, row.id, reason))
        for line in parked:
            self.emit(Parked(line.tenant, line.key, line.topic, line.id, line.attempts, line.reason))

    def _count(self, rows: Sequence[Row], *, duplicate: bool) -> None:
        if duplicate:
            self.report.duplicates += len(rows)
            return
        self.report.sent += len(rows)
        self.report.batches += 1
        for row in rows:
            self.report.by_topic[row.topic] = self.report.by_topic.get(row.topic, 0) + 1

    # --------------------------------------------------------------------------------------------- losses
    def overtaken(self, part: Part) -> None:
        """Somebody else owns the part since."""
        if self.drop(part):
            self.report.overtaken += 1
            self.emit(Overtaken(part.number, part.epoch))

    def drop(self, part: Part) -> bool:
        """Forget what is in memory of a part."""
        self._sending.forget(part)
        self.away.ended(part.number)
        if self.parts.get(part.number) is part:
            del self.parts[part.number]
            return True
        return False

    def _alarm_once(self, what: str, message: str) -> None:
        if (what, message) not in self._alarmed:
            self._alarmed.add((what, message))
            self.emit(Alarm(what, message))


def _waiting(page: Page, want: Want) -> bool:
    return page.waiting(want)


def _save(page: Page, parts: Sequence[Part]) -> None:
    page.save({(part.number, part.epoch): part.state for part in parts})


def _bounded(rows: Sequence[Row]) -> Sequence[Row]:
    """No more than a round should hold in memory; at least one."""
    total = 0
    for count, row in enumerate(rows):
        total += len(row.body)
        if total > _BYTES and count:
            return rows[:count]
    return rows
