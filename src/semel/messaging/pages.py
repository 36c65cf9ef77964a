"""What a relay needs from the place of an outbox: a ledger with pages, and what is written on them. No I/O in here.

A `Page` is one transaction's worth: what is read on it stays true until it is written, and all of a part's changes are
written together, under the part's epoch, or none. SQL databases do that with row locks; Redis with one script per part.

A part's entry holds its epoch, its owner and its state: for each lane the number of the last batch and the rows of a batch
that is under way (the manifest), and which rows are still owed to which lanes. Nothing is sent that is not in there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from semel.calls import clean
from semel.errors import StoreUnavailable
from semel.messaging.scopes import Neighbour
from semel.messaging.sink import Row

__all__ = [
    "Home",
    "Lane",
    "Ledger",
    "Line",
    "Member",
    "Page",
    "Shut",
    "State",
    "Superseded",
    "Waiting",
    "Want",
    "line_of",
    "told",
]

P = ParamSpec("P")
T = TypeVar("T")


class Lane(msgspec.Struct):
    """The batches of one lane: `no` is the last number given; `open` are the rows under that number, if it is not done.

    `resend` are numbers of kept batches that the sink lost and that go out again first.
    """

    no: int = 0
    open: list[int] = msgspec.field(default_factory=list)
    resend: list[int] = msgspec.field(default_factory=list)


class State(msgspec.Struct):
    """What a part's entry says in JSON."""

    lanes: dict[str, Lane] = msgspec.field(default_factory=dict)
    owed: dict[int, list[str]] = msgspec.field(default_factory=dict)


class Line(msgspec.Struct):
    """A key that backs off (`until`) or is parked (`until` is None), and the message that stands at its head."""

    part: int
    tenant: str
    key: str | None
    topic: str
    id: str
    seq: int
    attempts: int
    until: float | None
    reason: str
    since: float = 0.0

    @property
    def name(self) -> str:
        return line_of(self.tenant, self.key, self.seq)


def told(reason: str) -> str:
    """A reason that every database takes: no surrogates, no NUL, not too long."""
    return clean(reason[:2000])


def line_of(tenant: str, key: str | None, seq: int) -> str:
    """The name of an order: a tenant's key; a message without a key is a line of its own."""
    said = f"{len(tenant)}:{tenant}:k{key}" if key is not None else f"{len(tenant)}:{tenant}:s{seq}"
    return hashlib.blake2b(said.encode(), digest_size=24).hexdigest()


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message in the outbox as people look at it: `due` is None where it may go at once, `size` that of its body."""

    id: str
    tenant: str
    topic: str
    key: str | None
    created: float
    due: float | None
    size: int


@dataclass(frozen=True, slots=True)
class Member:
    """A part as it stands: which epoch, whose."""

    part: int
    epoch: int
    owner: str | None


class Shut(msgspec.Struct, frozen=True):
    """Messages that stay where they are: of these topics, and of this tenant and key where they are given ("" is no key);
    `part` is where, None everywhere."""

    topics: frozenset[str]
    tenant: str | None = None
    key: str | None = None
    part: int | None = None


@dataclass(slots=True)
class Want:
    """What a relay asks for in one look."""

    parts: list[int]
    each: int
    total: int
    topics: Collection[str] = ()  # leave out: their sinks are paused, or nobody knows where they go
    shut: Sequence[Shut] = ()  # leave out as well: their endpoints are away, or busy
    only_topics: Collection[str] = ()
    tenants: Collection[str] = ()
    open: dict[int, list[int]] = field(default_factory=dict)  # by part: under way already
    lines: bool = False  # whether some keys are held back
    fair: bool = False  # whether tenants take turns where more waits than is asked for
    after: dict[int, str] = field(
        default_factory=dict
    )  # by part: the tenant where the last look for others ended


class Superseded(StoreUnavailable):
    """Between a page's reading and its writing another relay took some parts: of these nothing was written."""

    def __init__(self, parts: Collection[int]) -> None:
        super().__init__(f"another relay took part {', '.join(map(str, sorted(parts)))} meanwhile")
        self.parts = frozenset(parts)


class Page(Protocol):
    """One transaction of a team of relays. Reading answers at once; changes of parts that `hold` named, or that were given
    with their epoch, count when the page is written."""

    # ------------------------------------------------------------------------------------- membership
    def join(self, relay: str, lease: float, about: str, parts: int) -> None:
        """Say that this relay lives, and make sure that the parts are there."""

    def leave(self, relay: str) -> None:
        """Give everything back: the next relay need not wait for the lease."""

    def alive(self) -> dict[str, tuple[float, float]]:
        """The relays that live: how long still, and since when, in seconds."""
        ...

    def everyone(self) -> list[Neighbour]:
        """The relays of all names that live."""
        ...

    def members(self) -> list[Member]:
        """Every part with its epoch and owner."""
        ...

    def take(self, relay: str, free: Sequence[Member]) -> list[tuple[Member, State]]:
        """Own parts from now on, each under its next epoch; those that nobody else took first."""
        ...

    def release(self, part: int, epoch: int) -> None:
        """Give a part back."""

    def hold(self, epochs: Mapping[int, int]) -> set[int]:
        """Which of these parts are still ours; nobody takes them before the page is written, or it is not written."""
        ...

    def save(self, states: Mapping[tuple[int, int], State]) -> None:
        """The states of parts, by number and epoch, that `hold` named. What is in them is sent next."""

    def raise_epoch(self, part: int, epoch: int, beyond: int) -> None:
        """The sink knows a higher epoch than was ever given here: go beyond it."""

    # ------------------------------------------------------------------------------------------- rows
    def choose(self, want: Want) -> dict[int, list[Row]]:
        """Rows that are due, by part, in their order: visible ones, whatever their numbers, never `number > last seen`."""
        ...

    def waiting(self, want: Want) -> bool:
        """Whether anything could be sent now; cheap, and never a write."""
        ...

    def fetch(self, part: int, seqs: Collection[int]) -> dict[int, Row]:
        """Rows by number: what a manifest names."""
        ...

    def remove(self, gone: Mapping[int, Sequence[Row]]) -> None:
        """Delivered rows go, by part; their ids stay known for a retention from now."""

    # ---------------------------------------------------------------------------------- kept batches
    def keep(self, part: int, lane: str, batch: int, rows: Sequence[Row]) -> None:
        """Keep a delivered batch for a while, in case the sink turns out to have lost it."""

    def kept(self, part: int, lane: str, after: int) -> dict[int, list[Row]]:
        """Kept batches of a lane beyond a number, in order."""
        ...

    def renumber(self, part: int, lane: str, old: int, new: int) -> None:
        """A kept batch went out again under another number."""

    # ------------------------------------------------------------------------------------------ lines
    def lines(self, parts: Collection[int] | None = None) -> list[Line]:
        """Keys that are held back, oldest first."""
        ...

    def hold_back(self, line: Line, after: float | None) -> None:
        """Hold a key back: for `after` seconds, or until somebody says otherwise."""

    def let_go(self, part: int, names: Collection[str]) -> None:
        """These keys flow again."""

    def unpark(self, *, key: str | None, tenant: str | None, identity: str | None) -> int:
        """Try parked keys again, from their first message, in order; attempts start anew. How many."""
        ...

    # ------------------------------------------------------------------------------------ care, counts
    def pending(self) -> dict[str, int]:
        """Messages that wait, by topic."""
        ...

    def topics(self) -> set[str]:
        """The topics of messages that wait."""
        ...

    def strays(self, parts: int) -> int:
        """Messages in parts beyond this number, which no relay looks at."""
        ...

    def oldest(self) -> float:
        """The age of the oldest message that is due, in seconds."""
        ...

    def listed(self, limit: int, where: Mapping[str, str]) -> list[Waiting]:
        """Messages that wait, oldest first; `where` says which topic, tenant, key or id. It looks at every row."""
        ...

    def clean(self, retention: float, sink_safety: float) -> int:
        """Forget ids whose message was delivered a retention ago, and kept batches; a bounded number at a time."""
        ...


class Ledger(Protocol):
    """The pages of one team of relays, by name."""

    async def run(self, fn: Callable[Concatenate[Page, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """`fn(page, …)`, then the page is written. StoreUnavailable when the place cannot be reached, Superseded when it
        was not written as a whole."""
        ...

    async def read(self, fn: Callable[Concatenate[Page, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, for what only reads."""
        ...


class Home(Protocol):
    """Where an outbox lives: a SQL database, or Redis."""

    @property
    def identity(self) -> str:
        """Of these tables or keys, wherever they are moved; known after the first look."""
        ...

    @property
    def parts(self) -> int:
        """How many ways the messages are divided."""
        ...

    @property
    def where(self) -> str:
        """The place for people; never with a password."""
        ...

    def ledger(self, team: str) -> Ledger: ...

    def create(self) -> None:
        """Make what is missing, now."""

    async def acreate(self) -> None: ...

    def close(self) -> None:
        """Close what was opened here."""
