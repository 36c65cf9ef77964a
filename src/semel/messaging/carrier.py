"""Rounds of a relay: one transaction that settles what was delivered and writes down what is next, then the sending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy.exc import DBAPIError

from semel.errors import ConfigurationError, StoreUnavailable
from semel.messaging.events import Alarm, Declined, Delivered, Emit, Overtaken, Parked, SinkBack, SinkPaused
from semel.messaging.pages import Ledger, Page, Superseded, Want
from semel.messaging.parts import Part, Shipment
from semel.messaging.routes import Router
from semel.messaging.sink import Fenced, Rejected, Row, SinkUnavailable
from semel.points import reach

__all__ = ["Carrier", "Limits", "Report"]

_ROUND: Final = 4  # batches in one transaction, over all parts
_BYTES: Final = 16 << 20  # of bodies in one round
_OTHERS: Final = 8  # rounds
_PAUSE: Final = (0.25, 30.0)


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


@dataclass(slots=True)
class _Pause:
    """A sink that does not answer: until when it is left alone, and how long the next pause is."""

    until: float
    seconds: float
    since: float
    times: int = 1


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

    def __init__(self, ledger: Ledger, router: Router, limits: Limits, emit: Emit) -> None:
        self.ledger = ledger
        self.router = router
        self.limits = limits
        self.emit = emit
        self.parts: dict[int, Part] = {}
        self.pauses: dict[str, _Pause] = {}
        self.unknown: set[str] = set()
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
            return await self._round([part for part in parts if self.parts.get(part.number) is part])
        except Superseded as lost:
            for part in parts:
                (self.overtaken if part.number in lost.parts else self.drop)(part)
            return True
        except BaseException:
            for part in parts:
                self.drop(part)
            raise

    async def _round(self, parts: list[Part]) -> bool:
        ready = self._ready(parts)
        if not ready or any(part.dirty or part.outcome for part in parts):
            if not ready and not await self._anything(parts):
                return False
            await self.ledger.run(self._plan, parts)
            reach("relay.planned")
            ready = self._ready([part for part in parts if part.number in self.parts])
        if not ready:
            return False
        found = await asyncio.gather(*(self._ship(shipment) for shipment in ready))
        reach("relay.published")
        for repair in filter(None, found):  # when all have come back: it changes the part's state
            await self._repair(repair)
        return True

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
            topics=self.unknown | self._paused(),
            only_topics=self.limits.topics,
            tenants=self.limits.tenants,
            open={part.number: part.open for part in parts},
            lines=not parts or any(part.lines for part in parts),
            # Of one tenant alone the others are looked for now and then.
            fair=self.limits.fair and (bool(self._after) or self._looks % _OTHERS == 0),
            after=self._after,
        )

    def _paused(self) -> set[str]:
        """Topics that stay in the outbox because one of their sinks is away; and those that share a sink with them, since a
        key's messages must not overtake each other there."""
        clock = time.monotonic()
        away = {way for way, pause in self.pauses.items() if pause.until > clock}
        paused: set[str] = set()
        while away:
            more = {topic for topic, ways in self._topics.items() if ways & away} - paused
            if not more:
                break
            paused |= more
            away = away.union(*(self._topics[topic] for topic in more))
        return paused

    def _learn(self, topics: set[str]) -> None:
        for topic in topics - self._topics.keys():
            self._topics[topic] = self.router.ways(topic)

    def _ready(self, parts: Sequence[Part]) -> list[Shipment]:
        """Batches that are under way and whose sink is not known to be away."""
        clock = time.monotonic()
        found = []
        for part in parts:
            for shipment in part.shipments(self.router):
                if shipment.target is None:
                    self._alarm_once(
                        "route",
                        f"a batch of {shipment.lane!r} is under way, and no route has that name any more",
                    )
                    continue
                pause = self.pauses.get(shipment.target.way)
                if pause is None or pause.until <= clock:
                    found.append(shipment)
        return found

    # --------------------------------------------------------------------------------- the transaction
    def _plan(self, page: Page, parts: list[Part]) -> None:
        """What was delivered goes, what is next is written down, in one commit."""
        ours = self.settle(page, parts, save=False)
        self._refresh(page, [part for part in ours if part.lines])
        if self.pauses:  # which topics must wait is known only of topics that are known
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
    async def _ship(self, shipment: Shipment) -> _Repair | None:
        """Send it. What is to be repaired by this round, if the sink does not have what it should."""
        part, target = self.parts.get(shipment.part), shipment.target
        if part is None or target is None:
            return None
        start = time.monotonic()
        try:
            rows = self._shaped(shipment, part)
            fresh = part.try_lane(shipment.lane)
            if part.state.lanes[shipment.lane].resend:
                await self._resend(part, shipment)
            found = await target.sink.publish(part.number, part.epoch, shipment.no, rows)
        except Fenced as error:
            return _Repair(part, shipment, fenced=error)
        except Rejected as error:
            self._rejected(part, shipment, error, time.monotonic() - start)
            return None
        except SinkUnavailable as error:
            self._pause(target.way, str(error), error.seconds)
            return None
        except (StoreUnavailable, DBAPIError):
            raise
        except (
            ConfigurationError
        ) as error:  # wrong credentials, a place that is not there: somebody has to act
            self._alarm_once("configuration", str(error))
            self._pause(target.way, str(error), None)
            return None
        except Exception as error:  # noqa: BLE001 - a sink's bug pauses the sink, never loses or stops the rest
            self._alarm_once("error", f"sink {target.way!r} failed in an unforeseen way: {error!r}")
            self._pause(target.way, repr(error), None)
            return None
        self._back(target.way)
        if found is not None and found != shipment.no - 1 and (found != shipment.no or fresh):
            return _Repair(part, shipment, found)
        part.delivered(shipment, keep=self.limits.sink_safety > 0)
        duplicate = found is not None and found >= shipment.no
        self._count(rows, duplicate=duplicate)
        self.emit(
            Delivered(shipment.lane, part.number, shipment.no, len(rows), time.monotonic() - start, duplicate)
        )
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
        if self.parts.get(part.number) is not part:
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

    async def _resend(self, part: Part, shipment: Shipment) -> None:
        lane = part.state.lanes[shipment.lane]
        first = lane.resend[0] - 1
        kept = await self.ledger.read(lambda page: page.kept(part.number, shipment.lane, first))
        sink, way = shipment.target.sink, shipment.target.way  # type: ignore[union-attr]
        for number in lane.resend:
            rows = [self.router.shaped(way, row) for row in kept.get(number, ())]
            if rows:
                await sink.publish(part.number, part.epoch, number, rows)
                self.report.resent += len(rows)
        lane.resend = []  # written with the next state; until then it would be sent again, and found there

    def _rejected(self, part: Part, shipment: Shipment, error: Rejected, seconds: float) -> None:
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
                Delivered(shipment.lane, part.number, shipment.no, len(taken), seconds, duplicate=False)
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

    # ------------------------------------------------------------------------------------ pauses, losses
    def _pause(self, name: str, reason: str, asked: float | None) -> None:
        clock = time.monotonic()
        known = self.pauses.get(name)
        if known is not None and known.until > clock:
            return  # several batches failed together: that is one failure
        seconds = asked or (min(_PAUSE[1], known.seconds * 2) if known else _PAUSE[0])
        since, times = (known.since, known.times + 1) if known else (clock, 1)
        self.pauses[name] = _Pause(clock + seconds, seconds, since, times)
        self.emit(SinkPaused(name, seconds, reason))

    def _back(self, name: str) -> None:
        known = self.pauses.get(name)
        if known is not None and known.until <= time.monotonic():
            del self.pauses[name]
            self.emit(SinkBack(name, time.monotonic() - known.since))

    def overtaken(self, part: Part) -> None:
        """Somebody else owns the part since."""
        if self.drop(part):
            self.report.overtaken += 1
            self.emit(Overtaken(part.number, part.epoch))

    def drop(self, part: Part) -> bool:
        """Forget what is in memory of a part."""
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
