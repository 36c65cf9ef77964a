"""A relay's ledger in a SQL database: a page is one transaction, its words are those of `owners`, `ledger` and `care`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from sqlalchemy import Connection, select

from semel.messaging import care, ledger, owners
from semel.messaging.pages import Line, Member, Page, State, Waiting, Want
from semel.messaging.scopes import Neighbour
from semel.messaging.sink import Row
from semel.messaging.tables import Tables, now

if TYPE_CHECKING:
    from semel.messaging.database import Database

__all__ = ["SqlLedger", "SqlPage"]

P = ParamSpec("P")
T = TypeVar("T")

# An id is known from when its message was added. Only where that was this long before its delivery it is written again.
_LATE: Final = 60.0
_ASKED: Final = 30.0  # seconds


class SqlLedger:
    """See `Ledger`."""

    def __init__(self, database: Database, team: str) -> None:
        self._database = database
        self._team = team
        self._clock = _Clock()

    async def run(self, fn: Callable[Concatenate[Page, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.run(self._on_a_page, fn, args, kwargs)

    async def read(self, fn: Callable[Concatenate[Page, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.read(self._on_a_page, fn, args, kwargs)

    def _on_a_page(self, connection: Connection, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
        return fn(SqlPage(connection, self._database.tables, self._team, self._clock), *args, **kwargs)


class _Clock:
    """The database's clock, asked now and then: when a message was added is told by it, and ours may be wrong."""

    def __init__(self) -> None:
        self._asked, self._ahead = -_ASKED, 0.0

    def now(self, c: Connection) -> float:
        here = time.monotonic()
        if here - self._asked > _ASKED:
            self._ahead = float(c.execute(select(now(c.dialect.name))).scalar_one()) - here
            self._asked = here
        return here + self._ahead


class SqlPage:
    """See `Page`."""

    __slots__ = ("_c", "_clock", "_t", "_team")

    def __init__(self, connection: Connection, tables: Tables, team: str, clock: _Clock) -> None:
        self._c = connection
        self._t = tables
        self._team = team
        self._clock = clock

    def join(self, relay: str, lease: float, about: str, parts: int) -> None:
        owners.join(self._c, self._t, self._team, relay, lease, about, parts)

    def leave(self, relay: str) -> None:
        owners.leave(self._c, self._t, self._team, relay)

    def alive(self) -> dict[str, tuple[float, float]]:
        return owners.alive(self._c, self._t, self._team)

    def everyone(self) -> list[Neighbour]:
        return owners.everyone(self._c, self._t)

    def members(self) -> list[Member]:
        return owners.members(self._c, self._t, self._team)

    def take(self, relay: str, free: Sequence[Member]) -> list[tuple[Member, State]]:
        return owners.take(self._c, self._t, self._team, relay, free)

    def release(self, part: int, epoch: int) -> None:
        owners.release(self._c, self._t, self._team, part, epoch)

    def hold(self, epochs: Mapping[int, int]) -> set[int]:
        return owners.hold(self._c, self._t, self._team, epochs)

    def save(self, states: Mapping[tuple[int, int], State]) -> None:
        owners.save(self._c, self._t, self._team, states)

    def raise_epoch(self, part: int, epoch: int, beyond: int) -> None:
        owners.raise_epoch(self._c, self._t, self._team, part, epoch, beyond)

    def choose(self, want: Want) -> dict[int, list[Row]]:
        return ledger.choose(self._c, self._t, self._team, want)

    def waiting(self, want: Want) -> bool:
        return ledger.waiting(self._c, self._t, self._team, want)

    def fetch(self, part: int, seqs: Collection[int]) -> dict[int, Row]:
        return ledger.fetch(self._c, self._t, part, seqs)

    def remove(self, gone: Mapping[int, Sequence[Row]]) -> None:
        ledger.remove(self._c, self._t, {part: [row.seq for row in rows] for part, rows in gone.items()})
        late = self._clock.now(self._c) - _LATE
        old = [row.seq for rows in gone.values() for row in rows if row.created < late]
        ledger.refresh_ids(self._c, self._t, old)

    def keep(self, part: int, lane: str, batch: int, rows: Sequence[Row]) -> None:
        ledger.keep(self._c, self._t, self._team, part, lane, batch, rows)

    def kept(self, part: int, lane: str, after: int) -> dict[int, list[Row]]:
        return ledger.kept(self._c, self._t, self._team, part, lane, after)

    def renumber(self, part: int, lane: str, old: int, new: int) -> None:
        ledger.renumber(self._c, self._t, self._team, part, lane, old, new)

    def lines(self, parts: Collection[int] | None = None) -> list[Line]:
        return ledger.lines(self._c, self._t, self._team, parts)

    def hold_back(self, line: Line, after: float | None) -> None:
        ledger.hold_back(self._c, self._t, self._team, line, after)

    def let_go(self, part: int, names: Collection[str]) -> None:
        ledger.let_go(self._c, self._t, self._team, part, names)

    def unpark(self, *, key: str | None, tenant: str | None, identity: str | None) -> int:
        return ledger.unpark(self._c, self._t, self._team, key=key, tenant=tenant, identity=identity)

    def pending(self) -> dict[str, int]:
        return care.pending(self._c, self._t)

    def topics(self) -> set[str]:
        return care.topics(self._c, self._t)

    def strays(self, parts: int) -> int:
        return care.strays(self._c, self._t, parts)

    def oldest(self) -> float:
        return care.oldest(self._c, self._t)

    def listed(self, limit: int, where: Mapping[str, str]) -> list[Waiting]:
        return care.listed(self._c, self._t, limit, where)

    def clean(self, retention: float, sink_safety: float) -> int:
        return care.clean(self._c, self._t, self._team, retention, sink_safety)
