"""Which messages refer to which bodies, and when a body may go.

Each message whose body is kept apart has a row in the bodies' table, written in its own transaction. A body goes when no row
names it any more. Whoever adds a message holds its body's name shared until the commit, and whoever removes bodies holds it
alone: so a body that is being referred to again is never removed, however long the transaction takes and whatever a clock says.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Protocol

from sqlalchemy import Connection, bindparam, delete, select, text
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from semel.errors import ConfigurationError
from semel.messaging.bodies.reference import Reference
from semel.messaging.bodies.sql import SqlBodies
from semel.messaging.bodies.store import BodyStore, Stored, open_bodies
from semel.messaging.database import Database
from semel.messaging.tables import Tables, now
from semel.within.ports import Port
from semel.within.records import query

__all__ = ["Keeper", "Kept", "older"]

_SHARED: Final = "SELECT pg_advisory_xact_lock_shared(k) FROM unnest($1::bigint[]) AS g (k)"
_ALONE: Final = "SELECT g.n, pg_try_advisory_xact_lock(g.k) FROM unnest(CAST(:n AS text[]), CAST(:k AS bigint[])) AS g (n, k)"
_GATE: Final = "SELECT value FROM {table}_messaging WHERE name = 'identity' "
_ROW: Final = "INSERT INTO {table}_outbox_bodies (seq, sha256, size, body) VALUES ($1, $2, $3, $4)"
_GROUP: Final = 20  # bodies removed in one transaction: as long as it takes, nobody adds one of them
_LOOK: Final = 500


class Kept(Protocol):
    """A message whose body is kept apart."""

    reference: Reference | None
    data: bytes


class Keeper:
    """The claim check of one outbox. `given` is a store, its URL, or "sql": the body in a column of the row itself."""

    def __init__(
        self, given: Any, database: Database, table: str, *, over: int, extra: Callable[[], float]
    ) -> None:
        if over < 0:
            raise ConfigurationError(f"claim_over must be a number of bytes, not {over}")
        self._inline = given == "sql"
        self.store: BodyStore = SqlBodies(database) if self._inline else open_bodies(given)
        self.over = over
        self._database = database
        self._table = table
        self._extra = extra

    @property
    def home(self) -> str:
        """Whose bodies these are; known once the database was looked at."""
        return self._database.identity[:16]

    # ------------------------------------------------------------------------- in the caller's transaction
    async def lock(self, port: Port, items: Sequence[Kept]) -> None:
        """Until the transaction ends, nobody removes the bodies that these messages are about to refer to.

        SQLite has one writer at a time: the message's own row is written before its body is looked for.
        """
        if port.dialect == "postgresql":
            await query(
                port, _SHARED, [sorted({_lock_of(item.reference.name) for item in items if item.reference})]
            )
        elif port.dialect == "mysql":
            await query(port, _GATE.format(table=self._table) + "LOCK IN SHARE MODE", ())

    async def keep(self, port: Port, items: Sequence[tuple[int, Kept]]) -> None:
        """Write down who refers to what, and store the bodies: durable when this returns, which is before the commit."""
        bodies: dict[str, bytes] = {}
        for seq, item in items:
            if (reference := item.reference) is None:
                continue
            body = item.data if self._inline else None
            await query(port, _ROW.format(table=self._table), (seq, reference.sha256, reference.size, body))
            bodies[reference.name] = item.data
        if self._inline:
            return
        if port.colour == "async":
            await asyncio.to_thread(self._put, bodies)
        else:
            _aside(self._put, bodies)

    def _put(self, bodies: dict[str, bytes]) -> None:
        for name, data in bodies.items():
            self.store.put(name, data)

    # ------------------------------------------------------------------------------------------- removal
    async def expire(self) -> int:
        """Remove bodies whose messages are over: delivered, and their retention past. Returns how many messages."""
        count = 0
        while done := await self._database.run(self._expire):
            count += done
        return count

    def _expire(self, c: Connection) -> int:
        _see_commits(c)
        rows = self._database.tables.bodies
        old = select(rows.c.seq, rows.c.sha256, rows.c.body.is_not(None)).where(
            rows.c.over < now(c.dialect.name) - self._extra()
        )
        found = c.execute(old.order_by(rows.c.over).limit(_GROUP)).all()
        held = self._alone(c, {sha for _, sha, inline in found if not inline})
        over = [(seq, sha) for seq, sha, inline in found if inline or sha in held]
        if over:
            gone = delete(rows).where(rows.c.seq == bindparam("s"))
            c.execute(gone, [{"s": seq} for seq, _ in over])
        self._remove(c, {sha for _, sha in over if sha in held})
        return len(over)

    async def sweep(self, grace: float) -> int:
        """Remove bodies older than `grace` seconds that no message refers to: what was stored and then rolled back."""
        database, count = self._database, 0
        await database.read(lambda _: None)  # the tables are there, and the home is known
        found = iter(self.store.stored(self.home))
        while some := await asyncio.to_thread(older, found, grace):
            # Most are referred to: those need no lock.
            unknown = sorted(some - await database.read(_referred, database.tables, some))
            for start in range(0, len(unknown), _GROUP):
                count += await database.run(self._sweep, unknown[start : start + _GROUP])
        return count

    def _sweep(self, c: Connection, shas: Sequence[str]) -> int:
        _see_commits(c)
        return self._remove(c, self._alone(c, shas))

    def _alone(self, c: Connection, shas: Collection[str]) -> set[str]:
        """Those that nobody is about to refer to; held, by us alone, until the transaction ends. Never waits."""
        if not shas or c.dialect.name == "sqlite":
            return set(shas)
        if c.dialect.name == "postgresql":
            names = {sha: _lock_of(f"{self.home}/{sha}") for sha in sorted(shas)}
            rows = c.execute(text(_ALONE), {"n": list(names), "k": list(names.values())})
            return {name for name, got in rows if got}
        gate = c.execute(text(_GATE.format(table=self._table) + "FOR UPDATE SKIP LOCKED")).first()
        return set(shas) if gate is not None else set()

    def _remove(self, c: Connection, shas: Collection[str]) -> int:
        doomed = sorted(set(shas) - _referred(c, self._database.tables, shas, sure=True))
        for sha in doomed:
            _aside(self.store.delete, f"{self.home}/{sha}")
        return len(doomed)


def older(found: Iterator[Stored], grace: float) -> set[str]:
    """The next names (without their home) that are older; none at the end."""
    return set(islice((body.name.partition("/")[2] for body in found if body.age > grace), _LOOK))


def _referred(c: Connection, t: Tables, shas: Collection[str], *, sure: bool = False) -> set[str]:
    """Those that some message refers to. `sure`: nobody adds one of them meanwhile, and what was committed is seen."""
    asked = select(t.bodies.c.sha256).where(t.bodies.c.sha256.in_(sorted(shas))).distinct()
    if sure and c.dialect.name in {"mysql", "mariadb"}:
        asked = asked.with_for_update(read=True)  # whatever snapshot the transaction has
    return set(c.execute(asked).scalars()) if shas else set()


def _see_commits(c: Connection) -> None:
    """What others committed until a lock was had must be seen behind it, whatever isolation the engine was given."""
    if c.dialect.name == "postgresql":
        c.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")


def _lock_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def _aside(fn: Callable[..., None], *args: Any) -> None:
    """In a thread where an event loop waits for us (an async session's commit), right here otherwise."""
    if in_greenlet():
        await_only(asyncio.to_thread(fn, *args))
    else:
        fn(*args)
