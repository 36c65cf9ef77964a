"""What a relay sends next: one transaction settles what was delivered, chooses rows and writes the manifest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from semel.messaging.away import Away, busy
from semel.messaging.holdings import Holdings
from semel.messaging.pages import Line, Page, Shut, Want
from semel.messaging.parts import Part
from semel.messaging.routes import Router, Target
from semel.messaging.sending import Sending
from semel.messaging.sink import Row
from semel.messaging.tally import Tally
from semel.points import reach

__all__ = ["Limits", "Planning"]

_ROUND: Final = 4  # batches in one transaction, over all parts
_BYTES: Final = 16 << 20  # of bodies in one round
_OTHERS: Final = 8  # rounds


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


class Planning:
    """Looks for rows and puts them into batches. `unknown` are topics that no route knows."""

    def __init__(
        self, router: Router, limits: Limits, holdings: Holdings, sending: Sending, away: Away, tally: Tally
    ) -> None:
        self._router = router
        self._limits = limits
        self._holdings = holdings
        self._sending = sending
        self._away = away
        self._tally = tally
        self.unknown: set[str] = set()
        self._targets: dict[str, Target] = {target.way: target for target in router.targets}
        self._topics: dict[str, set[str]] = {}  # topic → the ways it may go
        self._turn = 0
        self._after: dict[int, str] = {}  # by part with several tenants: where the look for them goes on
        self._looks = 0

    def want(self, numbers: list[int], parts: Collection[Part] = ()) -> Want:
        """What to look for. Each time another part comes first, so that none waits for ever behind the others."""
        turn = self._turn % len(numbers) if numbers else 0
        return Want(
            parts=numbers[turn:] + numbers[:turn],
            each=self._limits.batch,
            total=self._limits.batch * _ROUND,
            topics=self.unknown | self._away.topics(self._topics),
            shut=self._shut(parts),
            only_topics=self._limits.topics,
            tenants=self._limits.tenants,
            open={part.number: part.open for part in parts},
            lines=not parts or any(part.lines for part in parts),
            # Of one tenant alone the others are looked for now and then.
            fair=self._limits.fair and (bool(self._after) or self._looks % _OTHERS == 0),
            after=self._after,
        )

    def _shut(self, parts: Collection[Part]) -> list[Shut]:
        """What waits for an endpoint that is away, or behind a batch that takes long."""
        found = self._away.shut(self._topics, parts, self._targets) if self._away else []
        late = [sent.shipment for sent in self._sending.of(parts)]
        return found + busy(late, self._topics) if late else found

    def plan(self, page: Page, parts: list[Part]) -> None:
        """What was delivered goes, what is next is written down, in one commit."""
        ours = self._holdings.settle(page, parts, save=False)
        _refresh(page, [part for part in ours if part.lines])
        if self._away:  # which topics must wait is known only of topics that are known
            self._learn(page.topics())
        chosen = page.choose(self.want([part.number for part in ours], ours))
        self._looks += 1
        self._turn += len(chosen) or 1
        for part in ours:
            self._accept(part, _bounded(chosen.get(part.number, ())))
        self._holdings.write(page, ours)
        self._holdings.save(page, [part for part in ours if part.dirty])
        reach("relay.chosen")
        for part in ours:
            part.dirty = False

    def _accept(self, part: Part, rows: Sequence[Row]) -> None:
        """Put rows into the part's next batches."""
        self._learn({row.topic for row in rows})
        unknown = part.accept(rows, self._router, attempts=self._limits.max_attempts)
        self._doubted(part.doubted)
        for topic in sorted(unknown - self.unknown):
            self._tally.alarm_once(
                "unroutable", f"no route knows topic {topic!r}: its messages wait in the outbox"
            )
        self.unknown = self.unknown | unknown
        if part.waiting:
            self._away.learn((self._router.by_lane(lane), lane, row) for lane, row in part.waiting)

    def _learn(self, topics: set[str]) -> None:
        fresh = topics - self._topics.keys()
        if fresh:
            ways = {
                topic: self._router.ways(topic) for topic in fresh
            }  # which takes a while: others may learn meanwhile
            # Another one: somebody may be looking through the one that was there, in another thread.
            self._topics = self._topics | ways

    def _doubted(self, lines: Sequence[Line]) -> None:
        """Where a message goes could not be told: a condition of the user's raised."""
        for line in lines:
            self._tally.declined("condition", line.topic, line.id, line.reason)
            if line.attempts >= self._limits.max_attempts:
                self._tally.parked(line)


def _refresh(page: Page, parts: Sequence[Part]) -> None:
    """Keys that are held back: an operator may have changed them."""
    if not parts:
        return
    found = page.lines([part.number for part in parts])
    for part in parts:
        part.lines = {line.name: line for line in found if line.part == part.number}


def _bounded(rows: Sequence[Row]) -> Sequence[Row]:
    """No more than a round should hold in memory; at least one."""
    total = 0
    for count, row in enumerate(rows):
        total += len(row.body)
        if total > _BYTES and count:
            return rows[:count]
    return rows
