"""Engines of SQLAlchemy as messaging uses them: opened by URL with a sync driver, and SQLite's write lock taken in time."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine

from semel.errors import ConfigurationError
from semel.messaging.patience import bound, connect_arguments

__all__ = ["AnyEngine", "engine_of", "sync_engine_of", "take_write_lock"]

AnyEngine = Engine | AsyncEngine

# The relay's statements are plain and few: they run on the sync driver in a thread, whichever driver the application has.
_SYNC: Final = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+asyncpg": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mysql+asyncmy": "mysql+pymysql",
    "mysql+aiomysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "mariadb+asyncmy": "mariadb+pymysql",
    "mariadb+aiomysql": "mariadb+pymysql",
    "sqlite+aiosqlite": "sqlite",
}
_KNOWN: Final = frozenset({"postgresql", "mysql", "mariadb", "sqlite"})


def engine_of(given: object, *, timeout: float | None = None) -> AnyEngine:
    """The engine itself, or one that is opened from a URL; ConfigurationError for anything else. Nothing is connected yet.
    `timeout` bounds the answers of one that is opened here."""
    if isinstance(given, Engine | AsyncEngine):
        if timeout is not None:
            raise ConfigurationError(
                "timeout= is for a database that is opened from its URL: an engine has its own settings, as connect_args={…}"
            )
        if given.dialect.name not in _KNOWN:
            raise ConfigurationError(
                f"messaging keeps its tables in PostgreSQL, MariaDB/MySQL or SQLite, not in {given.dialect.name}"
            )
        return given
    if isinstance(given, str | URL):
        return _open(given, timeout)
    raise ConfigurationError(
        f"an outbox or inbox lives in a SQL database: give a URL or an SQLAlchemy engine, not {type(given).__name__}"
    )


def sync_engine_of(engine: AnyEngine) -> Engine:
    """The engine whose connections are plain ones; below an AsyncEngine it is used inside of a greenlet only."""
    return engine.sync_engine if isinstance(engine, AsyncEngine) else engine


def take_write_lock(connection: Connection) -> None:
    """SQLite, whoever made the engine: the write lock at the start, so that what was read stays true until it is written."""
    if connection.dialect.name == "sqlite":
        driver: Any = connection.connection.driver_connection
        if not driver.in_transaction:
            connection.exec_driver_sql("BEGIN IMMEDIATE")


def _open(given: str | URL, timeout: float | None) -> Engine:
    try:
        url = make_url(given)
    except ArgumentError as error:
        raise ConfigurationError(
            "this is no database URL: it looks like postgresql+psycopg://user@host/db, mysql+pymysql://… or sqlite:///file.db"
        ) from error
    url = url.set(drivername=_SYNC.get(url.drivername, url.drivername))
    if url.get_backend_name() not in _KNOWN:
        raise ConfigurationError(
            f"messaging has no {url.get_backend_name()!r} database; known are postgresql, mysql, mariadb and sqlite"
        )
    try:
        if url.get_backend_name() != "sqlite":
            return _server(url, timeout)
        if url.database in {None, "", ":memory:"}:
            raise ConfigurationError(
                "an outbox in memory would be lost with the process: write sqlite:///file.db"
            )
        return _sqlite(create_engine(url, connect_args={"timeout": 10}))
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        extra = "postgres" if url.get_backend_name() == "postgresql" else "mysql"
        raise ConfigurationError(
            f'the driver for {url.drivername} is not installed: pip install "semel[messaging,{extra}]" brings it'
        ) from error


def _server(url: URL, timeout: float | None) -> Engine:
    arguments = connect_arguments(url, url.get_dialect().driver)
    engine = create_engine(url, connect_args=arguments, pool_size=8, isolation_level="READ COMMITTED")
    bound(engine, url, timeout)
    return engine


def _sqlite(engine: Engine) -> Engine:
    """Write-ahead log, durable commits, and the write lock taken at the start of what writes."""

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get("semel_reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine
