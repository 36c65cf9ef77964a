"""The database of an outbox or inbox: an engine of our own or the caller's, and the tables in it.

Everything that messaging says in SQL is written once, as plain functions of an SQLAlchemy Connection. `run` calls one in a
transaction: in a thread for a sync engine, in the loop for an AsyncEngine. That is not the path of a message that is
added: it uses the caller's own connection.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from semel.errors import ConfigurationError, SemelError, StoreUnavailable

try:
    from sqlalchemy import Connection, Engine, MetaData, create_engine, event, inspect, select
    from sqlalchemy.engine import URL, make_url
    from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, NoSuchModuleError, OperationalError
    from sqlalchemy.exc import TimeoutError as PoolTimeout
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.util import greenlet_spawn

    from semel.messaging.message import PARTS
    from semel.messaging.pages import Home
    from semel.messaging.sql_ledger import SqlLedger
    from semel.messaging.tables import VERSION, Tables, ddl, messaging_tables
    from semel.within.ports import Port
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise ConfigurationError(
        'messaging needs SQLAlchemy: pip install "semel[messaging]" brings it'
    ) from missing

__all__ = ["Database", "Resident"]

P = ParamSpec("P")
T = TypeVar("T")

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
_GONE: Final = (
    "database is locked",
    "deadlock",
    "lock wait timeout",
    "closed",
    "terminat",
    "lost",
    "gone away",
    "refused",
    "shut",
    "starting up",
    "recovery mode",
)
_LOCK: Final = 0x73656D656C  # "semel": two processes that make the tables at once take turns

_forked: weakref.WeakSet[Database] = weakref.WeakSet()


class Database:
    """An engine and semel's messaging tables. `given` is a URL, an Engine or an AsyncEngine."""

    def __init__(
        self,
        given: object,
        *,
        table: str = "semel",
        create: bool = True,
        parts: int | None = None,
        divides: bool = False,
        settings: Mapping[str, float | None] | None = None,
    ) -> None:
        self._engine: Engine | None = None
        self._async: AsyncEngine | None = None
        self._owned = isinstance(given, str | URL)
        if isinstance(given, AsyncEngine):
            self._async = given
        elif isinstance(given, Engine):
            self._engine = given
        elif isinstance(given, str | URL):
            self._engine = _open(given)
        else:
            raise ConfigurationError(
                f"an outbox or inbox lives in a SQL database: give a URL or an SQLAlchemy engine, not {type(given).__name__}"
            )
        self.dialect = (self._async or self._engine).dialect.name  # type: ignore[union-attr]
        if self.dialect not in _KNOWN:
            raise ConfigurationError(
                f"messaging keeps its tables in PostgreSQL, MariaDB/MySQL or SQLite, not in {self.dialect}"
            )
        self.table = table
        self.tables: Tables = messaging_tables(MetaData(), table)
        self.identity = ""
        self.parts = parts or PARTS
        self._parts_given = parts is not None
        # Only an outbox is divided: an inbox that makes the tables first leaves the number to it.
        self._needs = {"version", "identity", "parts"} if divides else {"version", "identity"}
        # What one program says of the messages here holds for those that say nothing, such as `semel relay`.
        self._settings = {name: value for name, value in (settings or {}).items() if value is not None}
        self.settings: dict[str, float] = dict(self._settings)
        self._may_create = create
        self._ready = False
        self._reset()
        _forked.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def _after_fork(self) -> None:
        self._reset()
        if self._engine is not None and self._owned:
            self._engine.dispose(close=False)

    @property
    def where(self) -> str:
        """The database for people; never with a password."""
        engine = self._async or self._engine
        return engine.url.render_as_string(hide_password=True)  # type: ignore[union-attr]

    @property
    def ready(self) -> bool:
        """Whether the tables are known to be there."""
        return self._ready

    @property
    def any_engine(self) -> Engine | AsyncEngine:
        """The engine, of whichever colour."""
        return self._async or self._engine  # type: ignore[return-value]

    @property
    def engine(self) -> Engine | None:
        """The sync engine, if there is one."""
        return self._engine

    def ledger(self, team: str) -> SqlLedger:
        """What the relays of a team read and write here."""
        return SqlLedger(self, team)

    # -------------------------------------------------------------------------------------------- run
    async def run(
        self, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`fn(connection, …)` in a transaction of its own. StoreUnavailable when the database cannot be reached."""
        if self._async is not None:
            done: T = await self._in_loop(self._async, fn, args, kwargs)
            return done
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool(), lambda: self.run_now(fn, *args, **kwargs))

    async def read(
        self, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `run`, for what only reads: SQLite's one write lock is left to those who write."""
        if self._async is not None:
            done: T = await self._in_loop(self._async, fn, args, kwargs, reads=True)
            return done
        loop = asyncio.get_running_loop()
        seen: T = await loop.run_in_executor(
            self._pool(), lambda: self._blocking(fn, args, kwargs, reads=True)
        )
        return seen

    def run_now(self, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, in this thread; only over a sync engine."""
        done: T = self._blocking(fn, args, kwargs)
        return done

    def read_now(
        self, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `read`, in this thread; only over a sync engine."""
        seen: T = self._blocking(fn, args, kwargs, reads=True)
        return seen

    def _blocking(self, fn: Any, args: Any, kwargs: Any, *, reads: bool = False) -> Any:
        engine = self._sync_engine()
        try:
            if not self._ready:
                self._get_ready(engine)
            with (engine.execution_options(semel_reads=True) if reads else engine).begin() as connection:
                if not reads:
                    _take_write_lock(connection)
                return fn(connection, *args, **kwargs)
        except (DBAPIError, PoolTimeout) as error:
            raise self._unavailable(error) from error

    async def _in_loop(
        self, engine: AsyncEngine, fn: Any, args: Any, kwargs: Any, *, reads: bool = False
    ) -> Any:
        def prepared(connection: Connection) -> Any:
            if not reads:
                _take_write_lock(connection)
            return fn(connection, *args, **kwargs)

        try:
            if not self._ready:
                await greenlet_spawn(self._get_ready, engine.sync_engine)
            async with (
                engine.execution_options(semel_reads=True) if reads else engine
            ).begin() as connection:
                return await connection.run_sync(prepared)
        except (DBAPIError, PoolTimeout) as error:
            raise self._unavailable(error) from error

    def _sync_engine(self) -> Engine:
        if self._engine is None:
            raise ConfigurationError(
                "this outbox or inbox was given an AsyncEngine: await its methods, or give a URL or an Engine"
            )
        return self._engine

    def _unavailable(self, error: Exception) -> Exception:
        if self.is_away(error):
            said = str(getattr(error, "orig", None) or error).splitlines() or [type(error).__name__]
            return StoreUnavailable(f"the database {self.where} did not answer: {said[0]}")
        return error

    def is_away(self, error: BaseException) -> bool:
        """Whether it says that the database cannot be had now, which is nobody's fault and passes."""
        if not isinstance(error, DBAPIError):
            return isinstance(error, StoreUnavailable | PoolTimeout)
        if error.connection_invalidated or isinstance(error, InterfaceError):
            return True
        # Only what a driver calls operational: the text of a violated constraint may contain any word.
        text = str(error.orig or error).lower()
        return isinstance(error, OperationalError) and any(word in text for word in _GONE)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(8, thread_name_prefix="semel-messaging")
            return self._threads

    # ----------------------------------------------------------------------------------------- tables
    def check(self, connection: Connection) -> None:
        """Before the first use in a caller's transaction: are the tables there? What is missing is made elsewhere."""
        if self._ready:
            return
        if connection.dialect.name != self.dialect:
            raise self._missing(f"this connection speaks to {connection.dialect.name}")
        known_there = _are_there(connection, self.tables)
        try:
            self._get_ready(
                (self._async.sync_engine if self._async is not None else None) or self._sync_engine()
            )
        except SemelError:
            raise
        except Exception as error:
            raise self._missing(f"they could not be made on a connection of our own: {error}") from error
        if not known_there and not _are_there(connection, self.tables):
            self._ready = False
            raise self._missing(f"the outbox knows {self.where}, which is another database or schema")

    async def look(self, port: Port) -> None:
        """As `check`, on a driver's own connection: it is not asked whether tables exist, so we ask on our own."""
        if self._ready:
            return
        if port.dialect != ("mysql" if self.dialect == "mariadb" else self.dialect):
            raise self._missing(f"this connection speaks to {port.dialect}")
        if self._async is not None:
            await self.run(lambda _: None)
            return
        try:
            self._get_ready(self._sync_engine())
        except DBAPIError as error:
            raise self._missing(f"they could not be made on a connection of our own: {error}") from error

    def _get_ready(self, engine: Engine) -> None:
        """On connections of our own, never in the caller's transaction: see what is there, and write what is missing."""
        with engine.execution_options(semel_reads=True).begin() as own:
            there = _are_there(own, self.tables)
            complete = there and self._adopt(own)
        if not there and not self._may_create:
            raise self._missing("they are not made here (create=False)")
        if not complete:
            with engine.begin() as own:
                _take_write_lock(own)
                self._make(own)
        self._ready = True  # now that it is committed: others do not look again

    def create(self) -> None:
        """Make what is missing, now."""
        try:
            with self._sync_engine().begin() as own:
                _take_write_lock(own)
                self._make(own)
            self._ready = True
        except DBAPIError as error:
            raise self._unavailable(error) from error

    async def acreate(self) -> None:
        """As `create`, whatever the engine's colour."""
        if self._async is None:
            await asyncio.get_running_loop().run_in_executor(self._pool(), self.create)
            return
        async with self._async.begin() as own:
            await own.run_sync(self._make)
        self._ready = True

    def _make(self, connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
        try:
            self.tables.meta.metadata.create_all(connection)
        except DBAPIError:
            if not _are_there(connection, self.tables):
                raise
        meta = self.tables.meta
        known = {row.name: row.value for row in connection.execute(select(meta))}
        fresh = {"version": str(VERSION), "identity": uuid.uuid4().hex, "parts": str(self.parts)}
        for name, value in fresh.items():
            if name in self._needs - known.keys():
                connection.execute(meta.insert().values(name=name, value=value))
        if self._parts_given and (stored := int(known.get("parts", self.parts))) != self.parts:
            raise ConfigurationError(  # whatever is in them: another program may know this number
                f"this outbox is divided into {stored} parts, and parts={self.parts} was given: messages of one key would go two "
                f"ways. Leave parts= out, or give {stored}"
            )
        for name, number in self._settings.items():
            if name not in known:
                connection.execute(meta.insert().values(name=name, value=repr(number)))
            elif known[name] != repr(number):
                connection.execute(meta.update().where(meta.c.name == name).values(value=repr(number)))
        self._adopt(connection)

    def _adopt(self, connection: Connection) -> bool:
        """Read what the tables say of themselves; False if something is to be written first."""
        known = {row.name: row.value for row in connection.execute(select(self.tables.meta))}
        version = int(known.get("version", VERSION))
        if version > VERSION:
            raise ConfigurationError(
                f"the messaging tables in {self.where} have version {version}, this semel knows {VERSION}: "
                "update semel here before it writes there"
            )
        if not self._needs <= known.keys():
            return False  # made by a migration of the caller's, or by an inbox
        stored = int(known.get("parts", self.parts))
        if self._parts_given and stored != self.parts:
            return False
        if any(known.get(name) != repr(number) for name, number in self._settings.items()):
            return False
        numbers = {name: float(known[name]) for name in known.keys() - {"version", "identity", "parts"}}
        self.settings = numbers | self._settings
        self.identity, self.parts = known["identity"], stored
        return True

    def _missing(self, why: str) -> ConfigurationError:
        names = ", ".join(table.name for table in self.tables[:2])
        return ConfigurationError(
            f"this database has no messaging tables ({names}, …), and {why}. Call create() once at start-up, outside a "
            "transaction, or run what `semel schema sql URL` prints"
        )

    def ddl(self) -> str:
        """The statements that make the tables, for those who may not let a program do it."""
        dialect = (self._async or self._engine).dialect  # type: ignore[union-attr]
        identity = uuid.uuid4().hex
        name = (
            self.tables.meta.name
            if self.tables.meta.schema is None
            else f"{self.tables.meta.schema}.{self.tables.meta.name}"
        )
        rows = [
            f"INSERT INTO {name} (name, value) SELECT '{what}', '{value}'"
            f" WHERE NOT EXISTS (SELECT 1 FROM {name} AS known WHERE known.name = '{what}')"
            for what, value in (("version", VERSION), ("identity", identity), ("parts", self.parts))
        ]
        return "\n\n".join(f"{statement};" for statement in [*ddl(dialect, self.tables), *rows])

    # ------------------------------------------------------------------------------------------ close
    def close(self) -> None:
        """Close what was opened here; an engine that was handed in is left alone."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)
        if self._owned and self._engine is not None:
            self._engine.dispose()


class Resident:
    """What lives in a database of messaging: makes its tables, and closes what it opened."""

    home: Home

    def create(self) -> None:
        """Make the tables, on a connection of our own. Not needed where first use may make them."""
        self.home.create()

    async def acreate(self) -> None:
        """As `create`, awaited."""
        await self.home.acreate()

    def close(self) -> None:
        """Close what was opened here."""
        self.home.close()

    async def aclose(self) -> None:
        """As `close`."""
        self.home.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _take_write_lock(connection: Connection) -> None:
    """SQLite, whoever made the engine: the write lock at the start, so that what was read stays true until it is written."""
    if connection.dialect.name == "sqlite" and not connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _are_there(connection: Connection, tables: Tables) -> bool:
    look = inspect(connection)
    return all(look.has_table(table.name, schema=table.schema) for table in reversed(tables))


def _open(given: str | URL) -> Engine:
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
            return create_engine(url, pool_pre_ping=False, pool_size=8, isolation_level="READ COMMITTED")
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


def _after_fork() -> None:
    for database in list(_forked):
        database._after_fork()  # noqa: SLF001 - our own


os.register_at_fork(after_in_child=_after_fork)
