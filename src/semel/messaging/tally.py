"""What a relay did: counted in its report, told to its hooks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from semel.messaging.events import Alarm, Declined, Delivered, Emit, Overtaken, Parked
from semel.messaging.pages import Line
from semel.messaging.parts import Part, Shipment
from semel.messaging.sink import Row

__all__ = ["Report", "Tally"]


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


class Tally:
    """Counts and tells, in the loop and in the threads that write pages. `report` is replaced when a new count begins: who has the
    one before keeps it."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.report = Report()
        self._alarmed: set[tuple[str, str]] = set()
        self._counting = threading.Lock()

    def delivered(self, shipment: Shipment, rows: Sequence[Row], seconds: float, *, duplicate: bool) -> None:
        """These rows of a batch are at their sink, perhaps none; `duplicate` says that they had been there already."""
        if duplicate:
            self.report.duplicates += len(rows)
        else:
            self.report.sent += len(rows)
            self.report.batches += 1
            by_topic = self.report.by_topic
            for row in rows:
                by_topic[row.topic] = by_topic.get(row.topic, 0) + 1
        if rows:
            told = Delivered(shipment.lane, shipment.part, shipment.no, len(rows), seconds, duplicate)
            self.emit(told)

    def declined(self, lane: str, topic: str, message: str, reason: str) -> None:
        """A message was not taken."""
        with self._counting:
            self.report.rejected += 1
        self.emit(Declined(lane, topic, message, reason))

    def parked(self, line: Line) -> None:
        """A key is held back until somebody says otherwise."""
        self.emit(Parked(line.tenant, line.key, line.topic, line.id, line.attempts, line.reason))

    def overtaken(self, part: Part) -> None:
        """Somebody else owns the part since."""
        with self._counting:
            self.report.overtaken += 1
        self.emit(Overtaken(part.number, part.epoch))

    def alarm(self, what: str, message: str) -> None:
        """Something that a person should look at."""
        self.emit(Alarm(what, message))

    def alarm_once(self, what: str, message: str) -> None:
        """As `alarm`, for what stays as it is until somebody acts."""
        with self._counting:
            known = (what, message) in self._alarmed
            self._alarmed.add((what, message))
        if not known:
            self.alarm(what, message)
