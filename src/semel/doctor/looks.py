"""Reading a store that may have no tables yet: settings, schema version, records that need attention. Nothing is written.

A store's own verbs refuse to work without their tables, and opening an SQLite file as a store would switch it to the
write-ahead log. So the families with tables are read here on a connection of the doctor's own.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from semel import model
from semel.doctor.messaging import Messaging, messaging_names, messaging_of
from semel.errors import ConfigurationError, StoreUnavailable
from semel.hosts import scheme_of
from semel.model import State
from semel.runtime import run_sync
from semel.store import Colour, Facts, Page, Query, Settings

if TYPE_CHECKING:
    from semel.stores.mysql.session import Session
    from semel.stores.postgres.link import Link

__all__ = ["Attention", "Look", "Schema", "count", "look"]

_PAGE: Final = 500
_MOST: Final = 10_000
"""Records that are counted; a store with more of them to look after is told as "more than"."""


class Schema(msgspec.Struct, frozen=True):
    """The tables. `state` is none (this kind of store has none), present, missing, newer or older."""

    state: str = "none"
    version: int | None = None
    known: int | None = None
    text: str = ""

    @property
    def readable(self) -> bool:
        return self.state in ("none", "present")

    @property
    def usable(self) -> bool:
        """Missing tables are made at the first use, or by hand."""
        return self.state in ("none", "present", "missing")


class Attention(msgspec.Struct, frozen=True):
    """How many records somebody should look at. `more`: there are more than were counted."""

    unknown: int = 0
    failed: int = 0
    abandoned: int = 0
    """Runs whose owner is gone; the next caller of the key takes over."""
    running: int = 0
    """Runs within their lease: no concern."""
    more: bool = False
    read: bool = True

    @property
    def total(self) -> int:
        return self.unknown + self.failed + self.abandoned


class Look(msgspec.Struct, frozen=True):
    """None: the store itself is to be asked."""

    facts: Facts | None = None
    schema: Schema = Schema()
    attention: Attention | None = None
    notes: tuple[str, ...] = ()
    """What is so now, and will not be when a face has used the store."""
    messaging: Messaging = Messaging()
    problems: tuple[str, ...] = ()
    """Why semel would not work, as the server says it."""


async def look(url: str, settings: Settings, colour: Colour) -> Look:
    reader = _READERS.get(scheme_of(url).partition("+")[0])
    return Look() if reader is None else await reader(url, settings, colour)


async def count(scan: Callable[[Query], Awaitable[Page]]) -> Attention:
    found: dict[str, int] = {}
    query = Query(limit=_PAGE)
    seen, more = 0, True
    while more and seen < _MOST:
        page = await scan(query)
        for record in page.records:
            state = model.view(record, page.now)
            name = "abandoned" if state is State.RUNNING and record.lease_until <= page.now else str(state)
            found[name] = found.get(name, 0) + 1
        seen += len(page.records)
        more = bool(page.cursor)
        query = msgspec.structs.replace(query, cursor=page.cursor)
    return Attention(
        unknown=found.get("unknown", 0),
        failed=found.get("failed", 0),
        abandoned=found.get("abandoned", 0),
        running=found.get("running", 0),
        more=more,
    )


def _schema(version: int | None, known: int, table: str) -> Schema:
    if version is None:
        return Schema(
            "missing",
            None,
            known,
            f"the tables {table}… are not there: semel makes them at its first use, or run what `semel schema sql` prints",
        )
    if version > known:
        text = f"the tables {table}… are of schema version {version}, this semel knows {known}: upgrade semel"
        return Schema("newer", version, known, text)
    if version < known:
        text = f"the tables {table}… are of schema version {version}, this semel needs {known}: migrate them"
        return Schema("older", version, known, text)
    return Schema("present", version, known, f"the tables {table}… are of schema version {version}")


# ---------------------------------------------------------------------------------------------------- SQLite
async def _look_sqlite(url: str, settings: Settings, colour: Colour) -> Look:
    del colour
    return _read_sqlite(url.partition(":///")[2], settings.table)


def _read_sqlite(path: str, table: str) -> Look:
    from semel.stores.sqlite.errors import explain
    from semel.stores.sqlite.facts import read_facts
    from semel.stores.sqlite.records import Records

    path = os.path.realpath(path)
    if not Path(path).exists() and Path(path).parent.is_dir():
        raise StoreUnavailable(f"there is no file {path!r} yet: semel makes it at its first use")
    try:
        with closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, isolation_level=None)) as db:
            db.execute(
                "PRAGMA synchronous = FULL"
            )  # as semel's own connections have it; not stored in the file
            schema = _sqlite_schema(db, table)
            records = Records(table)

            async def scan(query: Query) -> Page:
                return records.scan(db, query)

            attention = run_sync(count(scan)) if schema.readable else Attention(read=False)
            facts, notes = _as_used(read_facts(db, path))
            return Look(facts, schema, attention, notes, _sqlite_messaging(db, table))
    except sqlite3.Error as error:
        raise explain(error, path) from error


def _as_used(facts: Facts) -> tuple[Facts, tuple[str, ...]]:
    """A face switches the file to the write-ahead log before anything else: that is what it promises with."""
    mode = facts.settings["journal_mode"]
    if mode == "wal":
        return facts, ()
    settings = {**facts.settings, "journal_mode": "wal"}
    note = f"journal_mode of the file is {mode}: semel switches it to wal at its first use"
    return msgspec.structs.replace(facts, settings=settings), (note,)


def _sqlite_schema(db: sqlite3.Connection, table: str) -> Schema:
    from semel.stores.sqlite.schema import VERSION

    named = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    version = None
    if db.execute(named, (f"{table}_schema",)).fetchall():
        ((version,),) = db.execute(f'SELECT max(version) FROM "{table}_schema"').fetchall()
    return _schema(version, VERSION, table)


def _sqlite_messaging(db: sqlite3.Connection, table: str) -> Messaging:
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    kinds = {name: "" for name in messaging_names(table) if name in there}
    meta = messaging_names(table)[-1]
    asked = f"SELECT value FROM \"{meta}\" WHERE name = 'version'"
    rows = db.execute(asked).fetchall() if meta in kinds else []
    return messaging_of(table, kinds, rows[0][0] if rows else None)


# ------------------------------------------------------------------------------------------------ PostgreSQL
async def _look_postgres(url: str, settings: Settings, colour: Colour) -> Look:
    from semel.stores.postgres import url as postgres_url
    from semel.stores.postgres.errors import Trouble, unreachable
    from semel.stores.postgres.facts import facts_of
    from semel.stores.postgres.link import NotReached
    from semel.stores.postgres.sql import SCHEMA_VERSION, statements

    address = postgres_url.parse(url, colour)
    source = postgres_url.source(address, colour)
    sql = statements(settings.table)
    try:
        link = await source.open(settings.timeout)
    except NotReached as error:
        cause = error.__cause__ or error
        raise unreachable(cause, source.where, proven=False)[0] from cause
    try:
        pid, known = (await link.fetch(sql["hello"], (), settings.timeout))[0]
        rows = await link.fetch(sql["version"], (), settings.timeout) if known else ()
        found = await link.fetch(sql["facts"], (), settings.timeout)
        messaging = await _postgres_messaging(link, settings)
    except Trouble as error:
        raise error.told(source.where) from error
    finally:
        await link.quit()
    pooled = address.pgbouncer or pid != link.greeted
    facts = facts_of(dict(sorted((name, value) for name, value in found)), pooled=pooled)
    schema = _schema(rows[0][0] if rows else None, SCHEMA_VERSION, settings.table)
    return Look(facts, schema, messaging=messaging)


async def _postgres_messaging(link: Link, settings: Settings) -> Messaging:
    names = {name: '"' + name.replace(".", '"."') + '"' for name in messaging_names(settings.table)}
    seen = ", ".join(f"('{name}', to_regclass('{quoted}'))" for name, quoted in names.items())
    rows = await link.fetch(
        "select t.name, c.relpersistence::text, has_table_privilege(c.oid, 'select') "
        f"from (values {seen}) as t (name, oid) join pg_class c on c.oid = t.oid order by t.name",
        (),
        settings.timeout,
    )
    kinds, readable = {row[0]: row[1] for row in rows}, {row[0] for row in rows if row[2]}
    meta = messaging_names(settings.table)[-1]
    told: Sequence[Any] = ()
    if meta in readable:
        told = await link.fetch(
            f"select value from {names[meta]} where name = 'version'", (), settings.timeout
        )
    return messaging_of(settings.table, kinds, told[0][0] if told else None)


# ------------------------------------------------------------------------------------------- MariaDB, MySQL
async def _look_mysql(url: str, settings: Settings, colour: Colour) -> Look:
    from semel.stores.mysql.address import parse
    from semel.stores.mysql.errors import Lost
    from semel.stores.mysql.pools import url_pool
    from semel.stores.mysql.rows import statements
    from semel.stores.mysql.server import SCHEMA_VERSION, read_facts

    pool = url_pool(parse(url, colour))
    until = time.monotonic() + settings.timeout
    words = statements(settings.table)
    name = words["create_schema"].split("`", 2)[1]
    there = "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s"

    async def read() -> tuple[Sequence[Any], Facts, Messaging, tuple[str, ...]]:
        session = await pool.take(until, fresh=True)
        try:
            rows = await session.query(words["version"]) if await session.query(there, (name,)) else ()
            facts = await read_facts(session, words)
            messaging = await _mysql_messaging(session, settings.table)
            problems = await _mysql_rights(session, settings.table) if rows else ()
            return rows, facts, messaging, problems
        finally:
            await pool.give(session)

    try:
        rows, facts, messaging, problems = await pool.bounded(read(), until)
    except (Lost, TimeoutError) as error:
        raise StoreUnavailable(f"{pool.where} did not answer within {settings.timeout:g} s") from error
    finally:
        await pool.aclose()
    schema = _schema(int(rows[0][0]) if rows else None, SCHEMA_VERSION, settings.table)
    return Look(facts, schema, messaging=messaging, problems=problems)


async def _mysql_rights(session: Session, table: str) -> tuple[str, ...]:
    """EXPLAIN asks for the rights of the statement, and runs nothing. (Grants may be the user's, a role's or a pattern's.)"""
    ways = ("INSERT INTO `{0}` (`scope`) VALUES ('')", "UPDATE `{0}` SET `scope` = ''", "DELETE FROM `{0}`")
    for name in (table, f"{table}_audit"):
        for way in ways:
            try:
                await session.query(f"EXPLAIN {way.format(name)}")
            except ConfigurationError as error:
                return (str(error),)
            except StoreUnavailable:  # read_only, which is told by itself
                return ()
    return ()


async def _mysql_messaging(session: Session, table: str) -> Messaging:
    names = messaging_names(table)
    marks = ", ".join(["%s"] * len(names))
    rows = await session.query(
        "SELECT t.table_name, t.engine, e.transactions FROM information_schema.tables t LEFT JOIN information_schema.engines e "
        f"ON e.engine = t.engine WHERE t.table_schema = DATABASE() AND t.table_name IN ({marks}) ORDER BY t.table_name",
        names,
    )
    kinds = {str(name): "" for name, *_ in rows}
    told: Sequence[Any] = ()
    if names[-1] in kinds:
        with contextlib.suppress(ConfigurationError):  # this user may not read it
            told = await session.query(f"SELECT value FROM `{names[-1]}` WHERE name = 'version'")
    return messaging_of(table, kinds, str(told[0][0]) if told else None, rows)


_READERS: Final[Mapping[str, Callable[[str, Settings, Colour], Awaitable[Look]]]] = {
    "sqlite": _look_sqlite,
    "postgresql": _look_postgres,
    "postgres": _look_postgres,
    "mysql": _look_mysql,
    "mariadb": _look_mysql,
}
