"""Other outboxes in the same schema, where messages wait that no relay carries.

A relay that was told another `table=` than its program sends nothing, and nothing fails. Several programs may also share one
database on purpose, each with tables and relays of its own. So a relay that has nothing to do looks around now and then, and says
once of each table what it found: an outbox that no relay ever carried, or that none has carried for an hour.

It is a hint. What a look costs is bounded, and whatever cannot be looked at is passed by in silence: the tables are somebody
else's, who may lock them, change them, or not let us read them. Of each table a thousand messages are looked at from either end, by
part and number. Not seen is one that waits between them, if all of those are held back by a relay, scheduled for later, or young.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Subquery, exists, func, inspect, select, text, union_all
from sqlalchemy.exc import DBAPIError

from semel.errors import ConfigurationError, StoreUnavailable
from semel.messaging.database import Database
from semel.messaging.events import Emit, Unserved
from semel.messaging.outbox import Outbox
from semel.messaging.tables import Tables, now, tables_named

__all__ = ["Beside", "unserved"]

T = TypeVar("T")

_EVERY: Final = 60.0  # seconds between two looks of a relay that has nothing to do
_NEVER_CARRIED: Final = 60.0  # so long a message waits where no relay has ever been
_CARRIED_BEFORE: Final = (
    3600.0  # and where one has: it may be ended for a while, or be started by the hour (`--drain`)
)
_MARK: Final = "_outbox_relays"
_FROM_EACH_END: Final = 1000  # messages of another outbox that are looked at
_WHOLE: Final = 3.0  # seconds after which a look at several begins no other
_LOCKED: Final = 1  # seconds for which a table is waited for that somebody has locked
_READING: Final = 2  # and for which it is read
_PASSES: Final = (
    "timeout",
    "interrupted",
    "locked",
)  # what databases say when one of these is over; SQLite's lock


class Beside:
    """What a relay says of the outboxes beside its own: of each once, however long it lasts."""

    def __init__(self, outbox: Outbox, emit: Emit) -> None:
        self._outbox = outbox
        self._emit = emit
        self._done: set[str] = set()  # told of, or not ours to read
        self._seen: set[str] = set()  # by the last look
        self._moved = 0
        self._looked = -_EVERY

    async def now_and_then(self, moved: int) -> None:
        """`look`, if a minute has passed in which nothing moved: `moved` is how many messages did so far."""
        if not self._is_time():
            return
        quiet, self._moved = moved == self._moved, moved
        if quiet:
            await self.look()

    async def look(self) -> None:
        """Now. What the look before saw as well is told: relays that are started together need a while until all of them live."""
        before, self._seen = self._seen, set()
        for found in await self.find():
            self._seen.add(found.other)
            if found.other in before:
                self._tell(found)

    async def at_once(self) -> None:
        """For what does not last until a second look; no more than once a minute."""
        if self._is_time():
            for found in await self.find():
                self._tell(found)

    def _is_time(self) -> bool:
        due = time.monotonic() - self._looked >= _EVERY
        if due:
            self._looked = time.monotonic()
        return due

    def _tell(self, found: Unserved) -> None:
        self._done.add(found.other)
        self._emit(found)

    async def find(self) -> list[Unserved]:
        """As `unserved`, without those that were told of, and those that could not be read before."""
        home, found = self._outbox.home, list[Unserved]()
        if not isinstance(home, Database):
            return found
        end = time.monotonic() + _WHOLE
        with contextlib.suppress(StoreUnavailable, DBAPIError):  # the next look finds it
            for other in await home.read(_bounded(_others), home.tables):
                if other in self._done:
                    continue
                if time.monotonic() > end:
                    break
                if (waited := await self._waited(home, other)) is not None:
                    found.append(Unserved(other, waited, _told(self._outbox.table, other, waited)))
        return found

    async def _waited(self, home: Database, other: str) -> float | None:
        try:
            return await home.read(_bounded(_left), tables_named(other))
        except ConfigurationError:  # no name of ours
            self._done.add(other)
        except DBAPIError as error:
            said = str(error.orig).lower()
            if not any(word in said for word in _PASSES):  # not ours to read, or no outbox
                self._done.add(other)
        except StoreUnavailable:
            pass
        return None


async def unserved(outbox: Outbox) -> list[Unserved]:
    """Outboxes in the same schema where messages wait that no relay carries; none if something waits in this one, which then is the
    right one. Nothing is known of other outboxes in a Redis, and of tables that are locked or may not be read."""
    return await Beside(outbox, lambda _: None).find()


def _told(table: str, other: str, waited: float) -> str:
    return (
        f"nothing waits in {table}_outbox, but in {other}_outbox beside it messages have waited for {waited:.0f} s and no relay "
        f"carries them. If they are meant, say table={other!r} (semel relay --table {other}); if another program's relay is to "
        "carry them, start that one"
    )


def _bounded(fn: Callable[[Connection, Tables], T]) -> Callable[[Connection, Tables], T]:
    """`fn`, which then waits for nobody's lock for long, nor reads for long. Only in its own transaction."""

    def run(c: Connection, tables: Tables) -> T:
        if c.dialect.name == "postgresql":
            bounds = {"lock": f"{_LOCKED}s", "statement": f"{_READING}s"}  # true: of this transaction only
            c.execute(
                text(
                    "SELECT set_config('lock_timeout', :lock, true), set_config('statement_timeout', :statement, true)"
                ),
                bounds,
            )
        with _mysql_bounds(c) if c.dialect.name in {"mysql", "mariadb"} else contextlib.nullcontext():
            return fn(c, tables)

    return run


@contextlib.contextmanager
def _mysql_bounds(c: Connection) -> Iterator[None]:
    """They are the session's, which goes back into the pool: as it was."""
    mariadb = getattr(c.dialect, "is_mariadb", False)
    reading = {"max_statement_time": _READING} if mariadb else {"max_execution_time": _READING * 1000}
    bounds = {"lock_wait_timeout": _LOCKED, **reading}
    was = c.execute(text("SELECT " + ", ".join(f"@@SESSION.{name}" for name in bounds))).one()
    try:
        c.execute(text("SET SESSION " + ", ".join(f"{name} = {value}" for name, value in bounds.items())))
        yield
    finally:
        c.execute(
            text(
                "SET SESSION "
                + ", ".join(f"{name} = {value}" for name, value in zip(bounds, was, strict=True))
            )
        )


def _others(c: Connection, tables: Tables) -> list[str]:
    """The names (`table=`) of other outboxes in the schema."""
    if c.execute(select(tables.outbox.c.seq).limit(1)).first() is not None:
        return []
    schema = tables.outbox.schema
    names = inspect(c).get_table_names(schema=schema)
    prefixes = sorted(name.removesuffix(_MARK) for name in names if name.endswith(_MARK))
    ours = tables.relays.name.removesuffix(_MARK)
    return [f"{schema}.{prefix}" if schema else prefix for prefix in prefixes if prefix != ours]


def _left(c: Connection, tables: Tables) -> float | None:
    """For how long messages have waited there without a relay, if that is long. What is parked or backs off was carried."""
    clock, lines = now(c.dialect.name), tables.lines.c
    # The row of a relay that died stays for a while. That of a part is written when a relay first looks at it, and stays.
    known: Any = c.execute(
        select(clock - func.max(tables.relays.c.until), exists(select(tables.parts.c.part)))
    ).one()
    alone, carried = known
    least = _CARRIED_BEFORE if carried else _NEVER_CARRIED
    if alone is not None and alone < least:
        return None
    some = _ends(tables).c
    held = exists().where(lines.part == some.part, lines.tenant == some.tenant, lines.key == some.key)
    itself = exists().where(lines.part == some.part, lines.seq == some.seq)
    waited = c.execute(
        select(func.max(clock - some.since)).where(some.since <= clock - least, ~held, ~itself)
    ).scalar()
    return None if waited is None else float(waited if alone is None else min(waited, alone))


def _ends(tables: Tables) -> Subquery:
    """Messages from either end of the key: what a relay holds back, or what is not due, may be all that is at one of them."""
    outbox = tables.outbox.c
    since = func.coalesce(outbox.due, outbox.created).label("since")
    some = select(outbox.part, outbox.seq, outbox.tenant, outbox.key, since).limit(_FROM_EACH_END)
    first = some.order_by(outbox.part, outbox.seq).subquery()
    last = some.order_by(outbox.part.desc(), outbox.seq.desc()).subquery()
    return union_all(select(first), select(last)).subquery()
