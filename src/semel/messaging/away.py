"""Sinks that do not answer, and single endpoints of a sink: until when they are left alone, and what waits for them.

A pause stops a whole sink, unless the sink says which of its endpoints is away: then only messages that go there wait. They
stay in the outbox, where the look for the next ones passes them over, so that a long queue for one endpoint keeps nobody
else's messages from being found. No attempt is counted against any of them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from semel.messaging.events import Emit, SinkBack, SinkPaused
from semel.messaging.pages import Shut
from semel.messaging.parts import Part, Shipment
from semel.messaging.routes import Target
from semel.messaging.sink import Row

__all__ = ["Away", "Pause", "busy"]

_PAUSE: Final = (0.25, 30.0)
_FORGOTTEN: Final = 5.0  # seconds after a pause that nobody tried to end
_MOST: Final = 500  # endpoints that are passed over one by one; beyond, their sinks are paused as a whole

Place = tuple[str, str]  # a way and one of its lanes, "" for all of them
Fields = tuple[
    str | None, str | None, str | None
]  # topic, tenant and key of what goes there; None: whichever


@dataclass(slots=True)
class Pause:
    """Until when a place is left alone, and how long the next pause is."""

    way: str
    until: float
    seconds: float
    since: float
    lane: str = ""  # "" for all of the way's
    endpoint: str | None = None
    times: int = 1
    probe: tuple[int, str] | None = None  # the batch that is being tried there now
    failed: tuple[int, str] | None = None  # the last one that was
    rows: set[Fields] = field(default_factory=set)

    @property
    def name(self) -> str:
        """For people."""
        return self.way if self.endpoint is None else f"{self.way} ({self.endpoint})"


class Away:
    """What is away now, as far as this relay knows.

    Pauses begin and end in the loop; threads that look for the next rows read them, and copy them in one step (`list`) for that.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._pauses: dict[Place, Pause] = {}
        self._suspects: dict[str, str] = {}  # by way: the lane that failed while another one did not

    def __bool__(self) -> bool:
        return bool(self._pauses)

    @property
    def names(self) -> list[str]:
        """What is away, for people."""
        return sorted(pause.name for pause in self.pauses)

    @property
    def pauses(self) -> list[Pause]:
        return list(self._pauses.values())

    def try_again(self) -> None:
        """Somebody asks for it: all of it is tried anew, now."""
        for pause in self._pauses.values():
            pause.until, pause.seconds, pause.times = time.monotonic(), _PAUSE[0], 0

    # ------------------------------------------------------------------------------------------ learning
    def pause(self, shipment: Shipment, reason: str, asked: float | None, endpoint: str | None) -> None:
        """A batch could not be brought to its place."""
        target = shipment.target
        if target is None:
            return
        alone = endpoint is not None and bool(target.splits)
        if self._suspects.get(target.way) == shipment.lane:  # it is not the sink, it is this place of it
            alone = True
        place = (target.way, shipment.lane if alone else "")
        clock = time.monotonic()
        known = self._pauses.get(place)
        if known is not None and known.until > clock:
            return  # several batches failed together: that is one failure
        seconds = asked or (min(_PAUSE[1], known.seconds * 2) if known else _PAUSE[0])
        since, times = (known.since, known.times + 1) if known else (clock, 1)
        rows = known.rows if known else set[Fields]()
        if alone:
            rows.update(_fields(target, row) for row in shipment.rows)
        self._pauses[place] = Pause(
            target.way,
            clock + seconds,
            seconds,
            since,
            place[1],
            (endpoint or shipment.lane) if alone else None,
            times,
            rows=rows,
        )
        self._pauses[place].failed = (shipment.part, shipment.lane)
        self._emit(SinkPaused(target.way, seconds, reason, endpoint))

    def learn(self, waiting: Iterable[tuple[Target | None, str, Row]]) -> None:
        """Rows that were found behind a batch which waits for its endpoint: those like them are passed over as well."""
        for target, lane, row in waiting:
            known = None
            if target is not None:
                known = self._pauses.get((target.way, lane)) or self._pauses.get((target.way, ""))
            if known is not None and target is not None:
                known.rows.add(_fields(target, row))

    def back(self, shipment: Shipment) -> None:
        """A batch arrived: its place is there."""
        if not self._pauses or shipment.target is None:
            return
        way, clock = shipment.target.way, time.monotonic()
        for place in ((way, ""), (way, shipment.lane)):
            known = self._pauses.get(place)
            if known is not None and known.until <= clock:
                del self._pauses[place]
                if not place[1] and known.failed is not None and known.failed[1] != shipment.lane:
                    self._suspects[way] = known.failed[1]
                left = sum(pause.way == way for pause in self._pauses.values())
                self._emit(SinkBack(way, clock - known.since, known.endpoint, left))

    def prune(self, parts: Collection[Part]) -> None:
        """Forget what nothing of ours goes to any more: somebody else has its messages, or there are none."""
        clock = time.monotonic()
        for pause in self.pauses:
            if pause.until + _FORGOTTEN > clock or pause.probe is not None:
                continue
            if not any(part.leads_to(pause.way, pause.lane) for part in parts):
                del self._pauses[pause.way, pause.lane]
                left = sum(other.way == pause.way for other in self._pauses.values())
                self._emit(SinkBack(pause.way, clock - pause.since, pause.endpoint, left))

    # ---------------------------------------------------------------------------------------- batches
    def sift(self, shipments: Iterable[Shipment]) -> list[Shipment]:
        """Those whose place is not known to be away. Where a pause is over one batch tries first, then the others follow."""
        if not self._pauses:
            return list(shipments)
        clock, trying, found = time.monotonic(), set[Place](), list[Shipment]()
        last = {pause.failed for pause in self._pauses.values()}
        # The one that failed last comes last: it may be to blame, and must not be the only one that is ever tried.
        for shipment in sorted(shipments, key=lambda each: (each.part, each.lane) in last):
            places = self._places(shipment)
            if any(pause.until > clock or pause.probe for pause in places.values()) or trying & places.keys():
                continue
            trying |= places.keys()
            found.append(shipment)
        return found

    def begins(self, shipment: Shipment) -> None:
        """A batch is on its way."""
        for pause in self._places(shipment).values():
            pause.probe = (shipment.part, shipment.lane)

    def ended(self, part: int, lane: str | None = None) -> None:
        """It is not any more, whatever came of it; without a lane: none of the part is."""
        for pause in self.pauses:
            probe = pause.probe
            if probe is not None and probe[0] == part and lane in {None, probe[1]}:
                pause.probe = None

    def _places(self, shipment: Shipment) -> dict[Place, Pause]:
        way = shipment.target.way if shipment.target is not None else ""
        places = ((way, ""), (way, shipment.lane))
        return {place: self._pauses[place] for place in places if place in self._pauses}

    # --------------------------------------------------------------------------------------- messages
    def topics(self, known: Mapping[str, set[str]]) -> set[str]:
        """Topics that stay in the outbox because one of their sinks is away; and those that share a sink with them, since a
        key's messages must not overtake each other there. `known` are the ways of each topic."""
        clock, pauses = time.monotonic(), self.pauses
        many = sum(len(pause.rows) for pause in pauses) > _MOST
        away = {pause.way for pause in pauses if pause.until > clock and (many or not pause.lane)}
        return (
            _linked({topic for topic, ways in known.items() if ways & away}, known, set()) if away else set()
        )

    def shut(
        self, known: Mapping[str, set[str]], parts: Collection[Part], targets: Mapping[str, Target]
    ) -> list[Shut]:
        """Messages that stay in the outbox because their endpoint is away: as long as its pause lasts, and then until a
        batch that is under way to it has shown whether it is back."""
        clock, found, pauses = time.monotonic(), list[Shut](), self.pauses
        if sum(len(pause.rows) for pause in pauses) > _MOST:
            return found
        for pause in pauses:
            way, lane = pause.way, pause.lane
            waits = pause.until > clock if lane else False  # a whole sink's topics are passed over until then
            if waits or any(part.leads_to(way, lane) for part in parts):
                found += [_shut(targets[way], fields, known) for fields in list(pause.rows) if way in targets]
        return found


def busy(shipments: Sequence[Shipment], known: Mapping[str, set[str]]) -> list[Shut]:
    """Messages that have to wait behind batches which are on their way for long: in those parts only."""
    found = dict.fromkeys(
        _shut(shipment.target, fields, known, shipment.part)
        for shipment in shipments
        if shipment.target is not None
        for fields in _fields_of(shipment.target, shipment.rows)
    )
    return list(found)[:_MOST]


def _fields(target: Target, row: Row) -> Fields:
    """What a row's lane is made of. With a transform that cannot be known: the row as a whole."""
    of = target.splits if target.route.transform is None and target.splits else ("topic", "tenant", "key")
    return (
        row.topic if "topic" in of else None,
        row.tenant if "tenant" in of else None,
        (row.key or "") if "key" in of else None,
    )


def _fields_of(target: Target, rows: Sequence[Row]) -> set[Fields]:
    """What has to wait behind a batch: what goes to its lane, or all of its way."""
    return {_fields(target, row) for row in rows} if target.splits else {(None, None, None)}


def _shut(target: Target, fields: Fields, known: Mapping[str, set[str]], part: int | None = None) -> Shut:
    topic, tenant, key = fields
    if topic is None:
        topics = _linked({name for name, ways in known.items() if target.way in ways}, known, set())
    else:  # other topics have other endpoints there; what they share elsewhere must not be overtaken
        topics = _linked({topic}, known, {target.way})
    return Shut(frozenset(topics), tenant, key, part)


def _linked(topics: set[str], known: Mapping[str, set[str]], apart: set[str]) -> set[str]:
    """The topics and all that share a way with them, or with one that does; ways that are `apart` link nothing."""
    ways: set[str] = set()
    while True:
        ways = ways.union(*(known.get(topic, set()) for topic in topics)) - apart
        more = {topic for topic, theirs in known.items() if theirs & ways} - topics
        if not more:
            return topics
        topics = topics | more
