"""The tables of messaging, for PostgreSQL, MariaDB/MySQL and SQLite alike. Times are Unix seconds of the server's clock."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    literal_column,
    text,
)
from sqlalchemy.dialects.mysql import LONGBLOB, LONGTEXT, VARCHAR
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.sql.elements import ColumnClause

from semel.errors import ConfigurationError
from semel.messaging_names import SUFFIXES, VERSION
from semel.serverclock import SERVER_CLOCK

__all__ = ["NOW", "VERSION", "Tables", "ddl", "full_name", "messaging_tables", "now", "tables_named"]

_BINARY: Final = "utf8mb4_bin"
# They stand in statements as they are. 40 characters leave room for our own names behind it: PostgreSQL cuts silently at 63.
_TABLE: Final = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]{0,62}\.)?(?!(?i:sqlite_))[A-Za-z_][A-Za-z0-9_]{0,39}")


class Tables(NamedTuple):
    """Everything messaging keeps in a database. Read them as you like; write through semel only."""

    outbox: Table  # messages that wait
    ids: Table  # ids that are known, delivered or not: a message added twice is one message
    sent: Table  # messages kept for a while after delivery, when `sink_safety` asks for it
    parts: Table  # who owns a part, and the batches that are under way
    lines: Table  # keys that back off or are parked
    relays: Table  # relays that are alive
    inbox: Table  # messages that were admitted
    dead: Table  # messages that a handler could not do
    bodies: Table  # which messages have their body elsewhere, and bodies that are kept here
    meta: Table  # version and identity


def messaging_tables(metadata: MetaData, table: str = "semel") -> Tables:
    """Declare the tables in `metadata` (again: the ones declared before), for your own migrations and queries."""
    if not _TABLE.fullmatch(table):
        raise ConfigurationError(
            f"table={table!r} cannot be a table name: use letters, digits and underscores, beginning with a letter or an underscore, "
            "40 characters at most, and a schema in front if you like (shop.semel)"
        )
    schema, _, prefix = table.rpartition(".")
    home = schema or None
    full = f"{home}.{prefix}_outbox" if home else f"{prefix}_outbox"
    if full in metadata.tables:
        names = (full.removesuffix("_outbox") + suffix for suffix in SUFFIXES)
        return Tables._make(metadata.tables[name] for name in names)
    options: dict[str, Any] = {"schema": home, "mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}
    outgoing = _outgoing(metadata, prefix, options)
    incoming = _incoming(metadata, prefix, options)
    last = [_bodies(metadata, prefix, options), _meta(metadata, prefix, options)]
    return Tables._make([*outgoing, *incoming, *last])


@lru_cache(64)
def tables_named(table: str) -> Tables:
    """Declared by nobody but us, and once: nothing changes them, and every outbox and inbox of a process looks at the same ones."""
    return messaging_tables(MetaData(), table)


def _text(length: int = 255) -> String:
    """Compared byte by byte everywhere: MariaDB's default would call "A" and "a" the same key."""
    return String(length).with_variant(
        VARCHAR(length, charset="utf8mb4", collation=_BINARY), "mysql", "mariadb"
    )


def _long() -> Text:
    return Text().with_variant(LONGTEXT(charset="utf8mb4", collation=_BINARY), "mysql", "mariadb")


def _blob() -> LargeBinary:
    return LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb")


def _content() -> list[Column[Any]]:
    """What a message says, wherever it is kept."""
    return [
        Column("topic", _text(), nullable=False),
        Column("key", _text()),
        Column("type", _text()),
        Column("schema", _text()),
        Column("headers", _long(), nullable=False),
        Column("body", _blob(), nullable=False),
        Column("raw", SmallInteger, nullable=False),
    ]


def _letter() -> list[Column[Any]]:
    """The columns that a waiting and a kept message have in common."""
    return [
        Column("id", _text(), nullable=False),
        Column("tenant", _text(), nullable=False),
        *_content(),
        Column("created", Double, nullable=False),
    ]


def _outbox(metadata: MetaData, prefix: str, options: dict[str, Any]) -> Table:
    return Table(
        f"{prefix}_outbox",
        metadata,
        Column("part", SmallInteger, primary_key=True, autoincrement=False),
        Column("seq", BigInteger, primary_key=True, autoincrement=False),
        *_letter(),
        Column("due", Double),
        Index(
            f"{prefix}_outbox_tenant", "part", "tenant", "seq"
        ),  # the next tenant of a part is one step away
        # Rows come and go all day: vacuum by their number, soon and at full speed, or dead ones slow every look.
        postgresql_with={
            "autovacuum_vacuum_scale_factor": 0,
            "autovacuum_vacuum_threshold": 10_000,
            "autovacuum_vacuum_cost_delay": 0,
        },
        **options,
    )


def _ids(metadata: MetaData, prefix: str, options: dict[str, Any]) -> Table:
    return Table(
        f"{prefix}_outbox_ids",
        metadata,
        Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
        Column("id", _text(), nullable=False),
        Column("tenant", _text(), nullable=False),
        Column("part", SmallInteger, nullable=False),
        Column("hash", LargeBinary(32), nullable=False),
        Column("at", Double, nullable=False),
        UniqueConstraint("id", "tenant", name=f"{prefix}_outbox_ids_id"),
        Index(f"{prefix}_outbox_ids_at", "at"),
        sqlite_autoincrement=True,  # a number that was used is never used again
        **options,
    )


def _sent(metadata: MetaData, prefix: str, options: dict[str, Any]) -> Table:
    return Table(
        f"{prefix}_outbox_sent",
        metadata,
        Column("team", _text(120), primary_key=True),
        Column("part", SmallInteger, primary_key=True, autoincrement=False),
        Column("lane", _text(500), primary_key=True),
        Column("batch", BigInteger, primary_key=True, autoincrement=False),
        Column("seq", BigInteger, primary_key=True, autoincrement=False),
        *_letter(),
        Column("at", Double, nullable=False),
        Index(f"{prefix}_outbox_sent_at", "at"),
        **options,
    )


def _parts(metadata: MetaData, prefix: str, options: dict[str, Any]) -> Table:
    return Table(
        f"{prefix}_outbox_parts",
        metadata,
        Column("team", _text(120), primary_key=True),
        Column("part", SmallInteger, primary_key=True, autoincrement=False),
        Column("epoch", BigInteger, nullable=False),
        Column("owner", _text(64)),
        Column("state", _long(), nullable=False),
        **options,
    )


def _lines(metadata: MetaData, prefix: str, options: dict[str, Any]) -> Table:
    return Table(
        f"{prefix}_outbox_lines",
        metadata,
        Column("team", _text(120), primary_key=True),
        Column("part", SmallInteger, primary_key=True, autoincrement=False),
        Column("line", _text(64), primary_key=True),
        Column("tenant", _text(), nullable=False),
        Column("key", _text()),
        Column("topic", _text(), nullable=False),
        Column("id", _text(), nullable=False),
        Column("seq", BigInteger, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("until", Double),  # NULL: parked until somebody says otherwise
        Column("reason", _long(), nullable=False),
        Column("since", Double, nullable=False),
        **options,
    )


def _relays(metadata: MetaData, prefix: str, options: dict[str, Any]) -> Table:
    return Table(
        f"{prefix}_outbox_relays",
        metadata,
        Column("team", _text(120), primary_key=True),
        Column("relay", _text(64), primary_key=True),
        Column("until", Double, nullable=False),
        Column("since", Double, nullable=False),
        Column("about", _long(), nullable=False),
        **options,
    )


def _bodies(metadata: MetaData, prefix: str, options: dict[str, Any]) -> Table:
    return Table(
        f"{prefix}_outbox_bodies",
        metadata,
        Column("seq", BigInteger, primary_key=True, autoincrement=False),  # of the message
        Column("sha256", _text(64), nullable=False),
        Column("size", BigInteger, nullable=False),
        Column("body", _blob()),  # NULL: it is in a store
        Column("over", Double),  # since when the message is delivered and forgotten; NULL: it is not
        Index(f"{prefix}_outbox_bodies_sha256", "sha256"),
        Index(f"{prefix}_outbox_bodies_over", "over"),
        **options,
    )


def _outgoing(metadata: MetaData, prefix: str, options: dict[str, Any]) -> list[Table]:
    makers = (_outbox, _ids, _sent, _parts, _lines, _relays)
    return [make(metadata, prefix, options) for make in makers]


def _incoming(metadata: MetaData, prefix: str, options: dict[str, Any]) -> list[Table]:
    inbox = Table(
        f"{prefix}_inbox",
        metadata,
        Column("consumer", _text(120), primary_key=True),
        Column("message", _text(), primary_key=True),
        Column("tenant", _text(), primary_key=True),
        Column("hash", LargeBinary(32), nullable=False),
        Column("at", Double, nullable=False),
        Column("topic", _text(), nullable=False),
        Column("business_key", _text()),
        Column("result", _long()),
        Index(f"{prefix}_inbox_at", "at"),
        # Only of those that have one: an admission without costs no entry.
        Index(
            f"{prefix}_inbox_key",
            "business_key",
            postgresql_where=text("business_key IS NOT NULL"),
            sqlite_where=text("business_key IS NOT NULL"),
        ),
        **options,
    )
    dead = Table(
        f"{prefix}_inbox_dead",
        metadata,
        Column("consumer", _text(120), primary_key=True),
        Column("message", _text(), primary_key=True),
        Column("tenant", _text(), primary_key=True),
        *_content(),
        Column("attempts", Integer, nullable=False),
        Column("reason", _long(), nullable=False),
        Column(
            "until", Double
        ),  # NULL: dead until somebody says otherwise; else the time of the next attempt
        Column("at", Double, nullable=False),
        **options,
    )
    return [inbox, dead]


def _meta(metadata: MetaData, prefix: str, options: dict[str, Any]) -> Table:
    return Table(
        f"{prefix}_messaging",
        metadata,
        Column("name", _text(40), primary_key=True),
        Column("value", _text(), nullable=False),
        **options,
    )


NOW: Final = SERVER_CLOCK


def now(dialect: str) -> ColumnClause[float]:
    """The server's clock, in Unix seconds."""
    return literal_column(NOW[dialect], Double)


def full_name(table: Table) -> str:
    """As statements call it."""
    return f"{table.schema}.{table.name}" if table.schema else str(table.name)


def ddl(dialect: Dialect, tables: Tables) -> list[str]:
    """The statements that make the tables. MySQL, which is no MariaDB, has an IF NOT EXISTS for a table and none for an index."""
    found: list[str] = []
    for table in tables:
        made = str(CreateTable(table, if_not_exists=True).compile(dialect=dialect)).strip()
        ordered = sorted(table.indexes, key=lambda i: str(i.name))
        indexes = [CreateIndex(index, if_not_exists=dialect.name != "mysql") for index in ordered]
        said = [str(index.compile(dialect=dialect)) for index in indexes]
        if dialect.name == "mysql":
            head, end, tail = made.rpartition("\n)")
            lines = [re.sub(r"^CREATE INDEX (\S+) ON \S+ ", r"INDEX \1 ", text) for text in said]
            made, said = "".join([head.rstrip(), *(f",\n\t{line}" for line in lines), end, tail]), []
        found += [made, *said]
    return found
