"""One part in the hands of a relay: which rows go out under which number, and what comes of it. No I/O in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from semel.messaging.pages import Lane, Line, State, line_of, told
from semel.messaging.pauses import delay
from semel.messaging.routes import Router, Target, spelled
from semel.messaging.shaping import explained
from semel.messaging.sink import Rejected, Row

__all__ = ["Outcome", "Part", "Shipment"]

_CONDITION = 30.0  # a condition that raises is tried again after so long
_LATER = 4  # what is not a message's fault is tried again after the delay of so many failures


@dataclass(slots=True)
class Shipment:
    """A batch of one lane that is under way."""

    part: int
    epoch: int
    lane: str
    no: int
    rows: list[Row]
    target: Target | None


@dataclass(slots=True)
class Outcome:
    """What the next transaction has to write for a part."""

    gone: list[Row] = field(default_factory=list)
    kept: list[tuple[str, int, list[Row]]] = field(default_factory=list)
    held: list[tuple[Line, float | None]] = field(default_factory=list)
    free: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.gone or self.kept or self.held or self.free)


class Part:
    """A part that this relay owns."""

    def __init__(self, number: int, epoch: int, state: State) -> None:
        self.number = number
        self.epoch = epoch
        self.state = state
        self.rows: dict[int, Row] = {}
        self.lines: dict[str, Line] = {}
        self.outcome = Outcome()
        self.dirty = False
        self.leaving = False
        # Lanes whose batch may have been sent already, by us or by whom we took the part from.
        self._tried = {name for name, lane in state.lanes.items() if lane.open}
        # Rows of the last look that have to wait behind a batch of their lane.
        self.waiting: list[tuple[str, Row]] = []
        # Keys of the last look that a route's condition raised for.
        self.doubted: list[Line] = []
        # A key has one line, and two lanes may reject two of its rows in turns: how often each failed, by line and row.
        self._attempts: dict[str, dict[int, int]] = {}

    # ------------------------------------------------------------------------------------- choosing rows
    @property
    def open(self) -> list[int]:
        """Rows that are under way and must not be chosen again."""
        return sorted({seq for lane in self.state.lanes.values() for seq in lane.open})

    def adopt(self, rows: dict[int, Row]) -> int:
        """The rows of what its last owner left under way. How many are not there any more: somebody took them out. A batch of
        which nothing is left is over, and its number used: the next one shows whether the sink has it."""
        self.rows = rows
        missing = [seq for seq in self.open if seq not in rows]
        for name, lane in self.state.lanes.items() if missing else ():
            lane.open = [seq for seq in lane.open if seq in rows]
            if not lane.open:
                self._tried.discard(name)
        self.dirty = self.dirty or bool(missing)
        return len(missing)

    def accept(self, rows: Sequence[Row], router: Router, *, attempts: int = 10) -> set[str]:
        """Put chosen rows into the next batches. Returns topics that no route knows; their rows are left alone. A condition that
        raises for a row counts as an attempt of it: see `doubted`."""
        unknown: set[str] = set()
        self.waiting, self.doubted = [], []
        frozen = {name for name, lane in self.state.lanes.items() if lane.open}
        behind = self._stuck(router)  # lines of which a row stays: what comes after it stays too
        taken: set[tuple[str, str]] = set()
        for row in rows:
            if behind and line_of(row.tenant, row.key, row.seq) in behind:
                continue
            try:
                targets = router.of(row)
            except Exception as error:  # noqa: BLE001 - the user's condition
                line = self._failed(row, f"a route's condition failed: {explained(error)}")
                self.outcome.held.append((line, None if line.attempts >= attempts else _CONDITION))
                self.doubted.append(line)
                behind.add(line_of(row.tenant, row.key, row.seq))
                continue
            if targets is None:
                unknown.add(row.topic)
                continue
            lanes = self.state.owed.get(row.seq)
            if lanes is None:
                lanes = _unique([target.lane(row) for target in targets])
            names = [(lane, row.id) for lane in lanes]
            # A batch that has a number never changes, and a sink tells the rows of one apart by their ids.
            if not (frozen.isdisjoint(lanes) and taken.isdisjoint(names)):
                behind.add(line_of(row.tenant, row.key, row.seq))
                self.waiting += ((lane, row) for lane in lanes if lane in frozen)
                continue
            taken.update(names)
            self._assign(row, lanes)
        return unknown

    def _stuck(self, router: Router) -> set[str]:
        """Lines with a row in a batch that no route of today can send, or one that a lane has refused while another one still has
        it under way: it is not chosen again before that one ends. Nothing of theirs may overtake it."""
        lost = [lane for name, lane in self.state.lanes.items() if lane.open and router.by_lane(name) is None]
        seqs = {seq for lane in lost for seq in lane.open} | self.state.owed.keys()
        rows = [self.rows[seq] for seq in seqs if seq in self.rows]
        return {line_of(row.tenant, row.key, row.seq) for row in rows}

    def _assign(self, row: Row, lanes: Sequence[str]) -> None:
        self.state.owed.pop(row.seq, None)
        self.dirty = True
        if not lanes:  # its conditions let it go nowhere
            self._freed(row)
            self.outcome.gone.append(row)
            return
        self.rows[row.seq] = row
        for name in lanes:
            lane = self.state.lanes.setdefault(name, Lane())
            if not lane.open:
                lane.no += 1
            lane.open.append(row.seq)

    # ------------------------------------------------------------------------------------------ shipping
    def shipments(self, router: Router) -> list[Shipment]:
        """The batches that are under way, as they stand in the database."""
        found = []
        for name, lane in self.state.lanes.items():
            if not lane.open:
                continue
            rows = [self.rows[seq] for seq in lane.open if seq in self.rows]
            if self.lines:
                rows = [self._sent(row) for row in rows]
            if rows:
                found.append(Shipment(self.number, self.epoch, name, lane.no, rows, router.by_lane(name)))
        return found

    def is_open(self, name: str) -> bool:
        """Whether the lane has a batch under way."""
        return name in self.state.lanes and bool(self.state.lanes[name].open)

    def leads_to(self, way: str, lane: str) -> bool:
        """Whether a batch is under way to a lane, or to any of a way if it is ""."""
        if lane:
            return self.is_open(lane)
        head, lanes = spelled(way), self.state.lanes
        # A copy: a thread may be putting rows into lanes of this part that there were not.
        return any(lanes[name].open and name.partition("/")[0] == head for name in list(lanes))

    def was_tried(self, name: str) -> bool:
        """Whether the lane's batch may have been sent already."""
        return name in self._tried

    def try_lane(self, name: str) -> bool:
        """About to send the lane's batch: whether nobody can have sent it before."""
        fresh = name not in self._tried
        self._tried.add(name)
        return fresh

    def _sent(self, row: Row) -> Row:
        line = self.lines.get(line_of(row.tenant, row.key, row.seq))
        if line is None or line.seq != row.seq or line.attempts == row.attempts:
            return row
        return msgspec.structs.replace(row, attempts=line.attempts)

    def delivered(self, shipment: Shipment, *, keep: bool, numbered: bool = True) -> None:
        """The sink has the batch. Of one that keeps no numbers none are kept here: it may have endless lanes."""
        lane = self._close(shipment)
        if keep and numbered:
            self.outcome.kept.append((shipment.lane, lane.no, shipment.rows))
        lane.resend = []
        if not numbered:
            del self.state.lanes[shipment.lane]
        if self.lines:
            for row in shipment.rows:
                self._freed(row)
        self._sweep(shipment.rows)

    def rejected(
        self, shipment: Shipment, error: Rejected, *, attempts: int, backoff: tuple[float, float], keeps: bool
    ) -> list[Line]:
        """The sink will not have some rows: their keys are held back. Returns those that are parked now."""
        lane = self._close(shipment)
        if keeps:  # nothing of the batch was written: its number is still free
            lane.no -= 1
        parked = []
        held: set[str] = set()
        for row in shipment.rows:
            if row.id in error.delivered:
                self._freed(row)
                continue
            self.state.owed.setdefault(row.seq, []).append(shipment.lane)
            name = line_of(row.tenant, row.key, row.seq)
            # Of a key's bad rows the first one counts: the others wait behind it, as those before it do not.
            if row.id in error.reasons and name not in held:
                held.add(name)
                if self._waits_parked(name, row):
                    continue
                blamed = row.id not in error.later
                line = self._failed(row, error.reasons[row.id], counts=blamed)
                final = row.id in error.final or (blamed and line.attempts >= attempts)
                if final:
                    parked.append(line)
                elif self._is_parked(line.name):  # by another row of the key, just now: it stays parked
                    continue
                failures = line.attempts if blamed else _LATER
                self.outcome.held.append((line, None if final else delay(backoff, failures)))
        self._sweep(shipment.rows)
        return parked

    def withdrawn(self, shipment: Shipment) -> None:
        """The sink is away and keeps no numbers: the rows go back, so that the next batch may hold others as well."""
        self._close(shipment)
        del self.state.lanes[shipment.lane]
        for row in shipment.rows:
            self.state.owed.setdefault(row.seq, []).append(shipment.lane)
        self._sweep(shipment.rows)

    def _freed(self, row: Row) -> None:
        name = line_of(row.tenant, row.key, row.seq)
        line = self.lines.get(name)
        if line is not None and line.seq == row.seq and row.seq not in self.state.owed:
            del self.lines[name]
            self._attempts.pop(name, None)
            self.outcome.free.add(name)

    def _waits_parked(self, name: str, row: Row) -> bool:
        """Whether a row before it has parked its key already, as it is written: only a person lets that go."""
        line = self.lines.get(name)
        return line is not None and line.until is None and line.seq < row.seq

    def _is_parked(self, name: str) -> bool:
        return any(after is None and line.name == name for line, after in self.outcome.held)

    def _failed(self, row: Row, reason: str, *, counts: bool = True) -> Line:
        name = line_of(row.tenant, row.key, row.seq)
        known = self.lines.get(name)
        so_far = self._attempts.setdefault(name, {})
        if known is None or known.attempts == 0:  # let go, or replayed: attempts start anew
            so_far.clear()
        before = known.attempts if known is not None and known.seq == row.seq else so_far.get(row.seq, 0)
        many = so_far[row.seq] = before + counts
        line = Line(self.number, row.tenant, row.key, row.topic, row.id, row.seq, many, 0.0, told(reason))
        self.lines[name] = line
        self.outcome.free.discard(name)
        return line

    def _close(self, shipment: Shipment) -> Lane:
        lane = self.state.lanes[shipment.lane]
        lane.open = []
        self._tried.discard(shipment.lane)
        self.dirty = True
        return lane

    def _sweep(self, rows: Sequence[Row]) -> None:
        """Rows that no lane has under way any more: gone if nothing is owed, back into the outbox otherwise."""
        still = {seq for lane in self.state.lanes.values() for seq in lane.open}
        for row in rows:
            if row.seq in still:
                continue
            known = self.rows.pop(row.seq, None)
            if known is not None and row.seq not in self.state.owed:
                self.outcome.gone.append(known)

    def lost_tail(self, lane: str, found: int, kept: int) -> None:
        """The sink holds less than it had confirmed: go on from what it holds, with the kept batches first."""
        known = self.state.lanes[lane]
        known.resend = list(range(found + 1, found + 1 + kept))
        known.no = found + 1 + kept
        self._tried.discard(lane)

    def ahead(self, lane: str, found: int) -> None:
        """The sink holds a higher number than was ever given here: the database was set back. Go on beyond it."""
        self.state.lanes[lane].no = found + 1
        self._tried.discard(lane)  # nobody has sent it under that number

    def taken(self) -> Outcome:
        """What is to be written; the slate is clean afterwards."""
        outcome, self.outcome = self.outcome, Outcome()
        return outcome


def _unique(lanes: list[str]) -> list[str]:
    """Each once, in their order."""
    return lanes if len(lanes) == 1 else list(dict.fromkeys(lanes))
