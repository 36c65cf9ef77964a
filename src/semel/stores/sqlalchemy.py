"""semel's tables for SQLAlchemy, and an engine as the way to a store. Never on the hot path: that is the drivers'.

    from semel.stores.sqlalchemy import SemelRecord, tables

    records = tables(Base.metadata).records            # in your own MetaData, to query and join, for create_all too
    session.scalars(select(SemelRecord).where(SemelRecord.ref == "ord_1"))

The same Table serves PostgreSQL, MariaDB/MySQL and SQLite; times are aware datetimes in UTC, labels a dict, on all of
them. Read them as you like; write through semel only: each of its writes is fenced, yours would not be.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from semel.errors import ConfigurationError
from semel.store import Colour, Settings, Store, open_store

try:
    from sqlalchemy import (
        BigInteger,
        Boolean,
        Column,
        Dialect,
        Engine,
        Float,
        Integer,
        LargeBinary,
        MetaData,
        String,
        Table,
        Text,
        event,
    )  # fmt: skip
    from sqlalchemy.dialects.mysql import BINARY, DATETIME
    from sqlalchemy.dialects.postgresql import TIMESTAMP
    from sqlalchemy.engine import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import DeclarativeBase, Mapped
    from sqlalchemy.types import TypeDecorator, TypeEngine
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise ConfigurationError(
        'SQLAlchemy is not installed: pip install "semel[sqlalchemy]" brings it'
    ) from missing

__all__ = ["Labels", "Moment", "RecordColumns", "SemelRecord", "Tables", "adopt", "metadata", "tables"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Moment(TypeDecorator[datetime]):
    """A time of the store's clock as an aware datetime, however the database keeps it."""

    impl = TIMESTAMP(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(Float())
        if dialect.name in {"mysql", "mariadb"}:
            return dialect.type_descriptor(DATETIME(fsp=6))
        return dialect.type_descriptor(TIMESTAMP(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(
                "give an aware datetime, such as datetime.now(UTC): a naive one could mean any zone"
            )
        if dialect.name == "sqlite":
            return (value - _EPOCH) / timedelta(seconds=1)
        return value.astimezone(UTC).replace(tzinfo=None) if dialect.name in {"mysql", "mariadb"} else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if dialect.name == "sqlite":
            return _EPOCH + timedelta(seconds=value)
        found: datetime = value
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


class Labels(TypeDecorator[dict[str, str]]):
    """`labels=` of a record, kept as a JSON object of strings."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: dict[str, str] | None, dialect: Dialect) -> str | None:
        del dialect  # the same on all of them
        return (
            None
            if value is None
            else json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        )

    def process_result_value(self, value: Any, dialect: Dialect) -> dict[str, str] | None:
        del dialect
        return None if value is None else dict(json.loads(value))


class Tables(NamedTuple):
    """The three tables. Only what all databases have in common is declared; each has a few private columns more."""

    records: Table
    audit: Table
    schema: Table


def tables(metadata: MetaData, table: str = "semel") -> Tables:
    """Declare the tables in `metadata` (again: the ones declared before).

    `create_all` then makes them just as the store would, with indexes and whatever else the database needs. A schema that
    `metadata` has for all its tables counts for these too: then the face is told `table="schema.semel"`.
    """
    schema, _, name = table.rpartition(".")
    schema = schema or metadata.schema or ""
    home, table = schema or None, f"{schema}.{name}" if schema else name
    found = [metadata.tables.get(f"{schema}.{part}" if schema else part) for part in _names(name)]
    if found[0] is not None and found[1] is not None and found[2] is not None:
        return Tables(found[0], found[1], found[2])
    audit = Table(f"{name}_audit", metadata, *_audit_columns(), schema=home)
    versions = Table(f"{name}_schema", metadata, Column("version", Integer, primary_key=True), schema=home)
    records = Table(name, metadata, *_record_columns(), schema=home)
    # Made last, the records bring the real tables in place of what is declared here.
    records.add_is_dependent_on(audit)
    records.add_is_dependent_on(versions)
    made = Tables(records, audit, versions)
    event.listen(records, "after_create", lambda _, connection, **__: _create_really(connection, made, table))
    return made


def _names(name: str) -> tuple[str, str, str]:
    return name, f"{name}_audit", f"{name}_schema"


def _hash() -> TypeEngine[bytes]:
    return LargeBinary(32).with_variant(BINARY(32), "mysql", "mariadb")  # a BLOB cannot be a key there


def _record_columns() -> list[Column[Any]]:
    return [
        Column("scope", _hash(), primary_key=True),
        Column("tenant", String(255), nullable=False),
        Column("operation", String(255), nullable=False),
        Column("key", String(255), nullable=False),
        Column("state", String(16), nullable=False),
        Column("nonce", LargeBinary, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("token", BigInteger, nullable=False),
        Column("policy", String(16), nullable=False),
        Column("fingerprint", LargeBinary),
        Column("fingerprint_version", Integer, nullable=False),
        Column("created", Moment, nullable=False),
        Column("updated", Moment, nullable=False),
        Column("lease_until", Moment, nullable=False),
        *(Column(name, Moment) for name in ("expires", "settled", "tombstone", "not_before", "noted")),
        Column("resolved", Boolean, nullable=False),
        Column("marker", String(255)),
        Column("result", LargeBinary),
        Column("ref", String(1024)),
        Column("error_type", String(1024)),
        Column("error_code", String(1024)),
        Column("error_message", Text),
        Column("labels", Labels),
        Column("steps", LargeBinary),
        Column("secret_id", String(255)),
    ]


def _audit_columns() -> list[Column[Any]]:
    return [
        Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
        Column("scope", _hash(), nullable=False),
        Column("at", Moment, nullable=False),
        Column("kind", String(16), nullable=False),
        Column("state", String(16)),
        Column("actor", Text, nullable=False),
        Column("reason", Text, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("kept_until", Moment),
    ]


def _create_really(connection: Connection, made: Tables, table: str) -> None:
    """`create_all` has just made bare tables from the declarations. They are empty: the store's own take their place."""
    for bare in made:
        bare.drop(connection)
    for statement in _schema(connection.dialect.name, table):
        connection.exec_driver_sql(statement)


def _schema(dialect: str, table: str) -> list[str]:
    if dialect == "postgresql":
        from semel.stores.postgres import sql as postgres_sql

        script = postgres_sql.schema_sql(table)
    elif dialect in {"mysql", "mariadb"}:
        from semel.stores import mysql

        script = mysql.schema_sql(table)
    elif dialect == "sqlite":
        from semel.stores import sqlite

        script = sqlite.schema_sql(table)
    else:
        raise _not_known(dialect)
    # One by one: asyncpg, PyMySQL and sqlite3 take a single statement. $begin$ … $begin$ quotes a function's body.
    plain = re.sub(r"--[^\n]*", "", script)
    parts = re.finditer(r"(?:\$(\w+)\$.*?\$\1\$|[^;])+", plain, flags=re.DOTALL)
    return [statement for part in parts if (statement := part[0].strip())]


# --------------------------------------------------------------------------------------------- mapped classes


class RecordColumns:
    """The typed columns of a record, for a mapped class of your own:

    class Record(RecordColumns, Base):
        __table__ = tables(Base.metadata).records
    """

    scope: Mapped[bytes]
    tenant: Mapped[str]
    operation: Mapped[str]
    key: Mapped[str]
    state: Mapped[str]
    nonce: Mapped[bytes]
    attempts: Mapped[int]
    token: Mapped[int]
    policy: Mapped[str]
    fingerprint: Mapped[bytes | None]
    fingerprint_version: Mapped[int]
    created: Mapped[datetime]
    updated: Mapped[datetime]
    lease_until: Mapped[datetime]
    expires: Mapped[datetime | None]
    settled: Mapped[datetime | None]
    tombstone: Mapped[datetime | None]
    not_before: Mapped[datetime | None]
    noted: Mapped[datetime | None]
    resolved: Mapped[bool]
    marker: Mapped[str | None]
    result: Mapped[bytes | None]
    ref: Mapped[str | None]
    error_type: Mapped[str | None]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    labels: Mapped[dict[str, str] | None]
    steps: Mapped[bytes | None]
    secret_id: Mapped[str | None]


class _Base(DeclarativeBase):
    pass


metadata: Final = _Base.metadata
"""Where `SemelRecord` lives. For Alembic and the like, give it beside your own, or use `tables(Base.metadata)`."""


class SemelRecord(RecordColumns, _Base):
    """A record in the table `semel`, as the database has it: apply no meaning to `state` without looking at the times."""

    __table__ = tables(metadata).records

    def __repr__(self) -> str:
        return f"<SemelRecord {self.tenant}/{self.operation} {self.scope[:6].hex()} {self.state}>"


# ---------------------------------------------------------------------------------------------------- engines


def adopt(engine: object, settings: Settings, colour: Colour) -> Store:
    """A store that reaches the engine's database; the engine is never disposed of.

    Whatever the engine was made with (TLS, connect_args, events, tokens) holds. PostgreSQL (psycopg, asyncpg): each statement
    runs on a connection borrowed from the engine's pool. MariaDB/MySQL: connections of our own, which the engine makes, outside
    of its pool. SQLite: the same file, with connections of our own.
    """
    if not isinstance(engine, Engine | AsyncEngine):
        raise ConfigurationError(
            f"semel cannot use an SQLAlchemy {type(engine).__name__} as a store: pass an engine; sessions and "
            "connections are for once.within"
        )
    wanted = "async" if isinstance(engine, AsyncEngine) else "sync"
    if colour != wanted:
        face = "AsyncSemel" if wanted == "async" else "Semel"
        maker = "create_engine" if wanted == "async" else "create_async_engine"
        raise ConfigurationError(
            f"an SQLAlchemy {type(engine).__name__} works with {face} only: use that, pass an engine of {maker}, or the URL"
        )
    name = engine.dialect.name
    if name == "sqlite":
        return open_store(f"sqlite:///{_file_of(engine)}", settings, colour)
    if name == "postgresql":
        from semel.stores.postgres import PostgresStore
        from semel.stores.sqlalchemy_pool import engine_source

        return PostgresStore(engine_source(engine), settings, pool=1000)
    if name in {"mysql", "mariadb"}:
        from semel.stores.mysql import MysqlStore
        from semel.stores.mysql.engines import engine_pool

        return MysqlStore(engine_pool(engine), settings)
    raise _not_known(name)


def _file_of(engine: Engine | AsyncEngine) -> str:
    if engine.url.query:
        raise ConfigurationError(
            "semel opens an engine's SQLite file by its path, and would not see what the engine's URL says after '?': give semel a "
            "URL of its own (sqlite:///file.db), or make the engine without them"
        )
    return engine.url.database or ""


def _not_known(dialect: str) -> ConfigurationError:
    return ConfigurationError(
        f"semel keeps records in PostgreSQL, MariaDB/MySQL or SQLite, not in {dialect}: use an engine for one of them"
    )
