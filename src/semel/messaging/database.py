"""The database of an outbox or inbox: an engine of our own or the caller's, and the tables in it.

Everything that messaging says in SQL is written once, as plain functions of an SQLAlchemy Connection. `run` calls one in a
transaction: in a thread for a sync engine, in the loop for an AsyncEngine. That is not the path of a message that is
added: it uses the caller's own connection.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from semel.errors import ConfigurationError
from semel.messaging.engines import AnyEngine, engine_of, take_write_lock
from semel.messaging.failures import translating, unavailable
from semel.messaging.schema import Schema
from semel.messaging.sql_ledger import SqlLedger
from semel.messaging.tables import Tables
from semel.within.ports import Port

__all__ = ["Database"]

P = ParamSpec("P")
T = TypeVar("T")

_forked: weakref.WeakSet[Database] = weakref.WeakSet()


class Database:
    """An engine and semel's messaging tables. `given` is a URL, an Engine or an AsyncEngine; `timeout` is how long each answer of
    one that is opened from its URL is waited for, in seconds."""

    def __init__(
        self,
        given: object,
        *,
        table: str = "semel",
        create: bool = True,
        parts: int | None = None,
        divides: bool = False,
        settings: Mapping[str, float | None] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.any_engine: AnyEngine = engine_of(given, timeout=timeout)
        """The engine, of whichever colour."""
        self._owned = self.any_engine is not given
        self.dialect = self.any_engine.dialect.name
        self.table = table
        self._schema = Schema(
            self.any_engine, table, create=create, parts=parts, divides=divides, settings=settings
        )
        self._reset()
        _forked.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def _after_fork(self) -> None:
        self._reset()
        if self._owned and self.engine is not None:
            self.engine.dispose(close=False)

    @property
    def where(self) -> str:
        """The database for people; never with a password."""
        return self._schema.where

    @property
    def engine(self) -> Engine | None:
        """The sync engine, if there is one."""
        return self.any_engine if isinstance(self.any_engine, Engine) else None

    def ledger(self, team: str) -> SqlLedger:
        """What the relays of a team read and write here."""
        return SqlLedger(self, team)

    # -------------------------------------------------------------------------------------------- run
    async def run(
        self, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`fn(connection, …)` in a transaction of its own. StoreUnavailable when the database cannot be reached."""
        done: T = await self._apart(fn, args, kwargs, reads=False)
        return done

    async def read(
        self, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `run`, for what only reads: SQLite's one write lock is left to those who write."""
        seen: T = await self._apart(fn, args, kwargs, reads=True)
        return seen

    def run_now(self, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, in this thread; only over a sync engine."""
        done: T = self._blocking(fn, args, kwargs, reads=False)
        return done

    def read_now(
        self, fn: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `read`, in this thread; only over a sync engine."""
        seen: T = self._blocking(fn, args, kwargs, reads=True)
        return seen

    async def _apart(self, fn: Any, args: Any, kwargs: Any, *, reads: bool) -> Any:
        """In a thread, or in the loop over an AsyncEngine."""
        if isinstance(self.any_engine, AsyncEngine):
            return await self._in_loop(self.any_engine, fn, args, kwargs, reads=reads)
        return await self._aside(lambda: self._blocking(fn, args, kwargs, reads=reads))

    def _blocking(self, fn: Any, args: Any, kwargs: Any, *, reads: bool) -> Any:
        engine = self._sync_engine()
        try:
            if not self._schema.ready:
                self._schema.get_ready()
            with (engine.execution_options(semel_reads=True) if reads else engine).begin() as connection:
                if not reads:
                    take_write_lock(connection)
                return fn(connection, *args, **kwargs)
        except (DBAPIError, PoolTimeout) as error:
            raise unavailable(error, self.where) from error

    async def _in_loop(self, engine: AsyncEngine, fn: Any, args: Any, kwargs: Any, *, reads: bool) -> Any:
        def prepared(connection: Connection) -> Any:
            if not reads:
                take_write_lock(connection)
            return fn(connection, *args, **kwargs)

        try:
            with translating():
                if not self._schema.ready:
                    await greenlet_spawn(self._schema.get_ready)
                async with (
                    engine.execution_options(semel_reads=True) if reads else engine
                ).begin() as connection:
                    return await connection.run_sync(prepared)
        except (DBAPIError, PoolTimeout) as error:
            raise unavailable(error, self.where) from error

    def _sync_engine(self) -> Engine:
        if self.engine is None:
            raise ConfigurationError(
                "this outbox or inbox was given an AsyncEngine: await its methods (acreate() is create()), or give a URL or an Engine"
            )
        return self.engine

    async def _aside(self, work: Callable[[], T]) -> T:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(8, thread_name_prefix="semel-messaging")
            threads = self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    # ----------------------------------------------------------------------------------------- tables
    @property
    def tables(self) -> Tables:
        """The tables, for statements."""
        return self._schema.tables

    @property
    def ready(self) -> bool:
        """Whether the tables are known to be there."""
        return self._schema.ready

    @property
    def identity(self) -> str:
        """Of these tables, wherever they are moved; known after the first look."""
        return self._schema.identity

    @property
    def parts(self) -> int:
        """How many ways an outbox here is divided."""
        return self._schema.parts

    @property
    def settings(self) -> Mapping[str, float]:
        """What programs said of the messages here."""
        return self._schema.settings

    def check(self, connection: Connection) -> None:
        """Before an engine is first used in a caller's transaction: are the tables there, and are they ours?"""
        self._schema.check(connection)

    async def verify(self, port: Port) -> None:
        """As `check`, on a driver's own connection."""
        await self._schema.verify(port)

    async def look(self, port: Port) -> None:
        """Are the tables there?"""
        if not self._schema.ready:
            await self._schema.look(port)

    def create(self) -> None:
        """Make what is missing, now."""
        self._sync_engine()
        try:
            self._schema.make()
        except DBAPIError as error:
            raise unavailable(error, self.where) from error

    async def acreate(self) -> None:
        """As `create`, whatever the engine's colour."""
        if self.engine is not None:
            await self._aside(self.create)
            return
        try:
            with translating():
                await greenlet_spawn(self._schema.make)
        except DBAPIError as error:
            raise unavailable(error, self.where) from error

    def ddl(self) -> str:
        """The statements that make the tables, for those who may not let a program do it."""
        return self._schema.ddl()

    # ------------------------------------------------------------------------------------------ close
    def close(self) -> None:
        """Close what was opened here; an engine that was handed in is left alone."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)
        if self._owned and self.engine is not None:
            self.engine.dispose()


def _after_fork() -> None:
    for database in list(_forked):
        database._after_fork()  # noqa: SLF001 - our own


os.register_at_fork(after_in_child=_after_fork)
