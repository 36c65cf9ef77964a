"""Ports on drivers' own connections: sqlite3, psycopg, asyncpg, PyMySQL, asyncmy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from semel.errors import ConfigurationError
from semel.within.ports import Dialect, Row, Savepoint, Scripts, SqlSavepoint, Style, not_open

__all__ = [
    "AsyncmyPort",
    "AsyncpgPort",
    "PsycopgAsyncPort",
    "PsycopgPort",
    "PymysqlPort",
    "Sqlite3Port",
    "mysql_is_open",
    "sqlite_is_open",
]

_IN_TRANSACTION: Final = 1  # SERVER_STATUS_IN_TRANS
_BEGIN: Final = "Begin one first: connection.begin(), or open the connection with autocommit off"


class _DriverPort(ABC):
    colour: Literal["sync", "async"] = "sync"
    dialect: Dialect
    style: Style = "format"
    mariadb = False
    count = -1
    lingers = False
    begun = True

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @property
    def foreseen(self) -> Dialect:
        return self.dialect

    @property
    def inside(self) -> bool:
        return True

    @property
    def scripts(self) -> Scripts | None:
        return None

    @abstractmethod
    async def prepare(self) -> None: ...

    @abstractmethod
    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]: ...

    async def savepoint(self, name: str) -> Savepoint:
        return await SqlSavepoint.begin(self, name)

    def after_end(self, callback: Callable[[bool], None]) -> bool:
        del callback
        return False


# ------------------------------------------------------------------------------------------------ SQLite


def sqlite_is_open(connection: Any) -> bool:
    """Whether a transaction is open, or the module would begin one before the first write."""
    if connection.in_transaction:
        return True
    autocommit = getattr(
        connection, "autocommit", -1
    )  # Python 3.12; -1 is the legacy mode, the only one before
    return connection.isolation_level is not None if autocommit == -1 else not autocommit


class Sqlite3Port(_DriverPort):
    dialect: Dialect = "sqlite"
    style: Style = "qmark"

    @property
    def begun(self) -> bool:  # type: ignore[override]  # a property where the base has an attribute
        return bool(self.connection.in_transaction)

    @property
    def inside(self) -> bool:
        return self.begun

    async def prepare(self) -> None:
        if not sqlite_is_open(self.connection):
            raise not_open(
                "sqlite3.Connection",
                'Execute "BEGIN IMMEDIATE" first, or open it without isolation_level=None',
            )

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
        cursor = self.connection.cursor()
        cursor.row_factory = None
        try:
            cursor.execute(sql, args)
            return cursor.fetchall() if cursor.description else ()
        finally:
            cursor.close()


# -------------------------------------------------------------------------------------------- PostgreSQL

_PSYCOPG_REMEDY: Final = "Open it with autocommit=False, or use `with connection.transaction():` around it"


class _WholeTransaction:
    """The claim begins the transaction: undoing all of it is what a savepoint would do, without two round trips."""

    __slots__ = ("_port",)
    buffers = False
    counted = False
    spoilt = None

    def __init__(self, port: PsycopgPort | PsycopgAsyncPort) -> None:
        self._port = port

    @property
    def alive(self) -> bool:
        return self._port.inside

    async def flush(self) -> None:
        """A bare connection keeps nothing to itself."""

    async def release(self) -> None:
        """Nothing was opened."""

    async def rollback(self) -> None:
        await self._port.give_up()


def _check_psycopg(connection: Any, *, inside: bool) -> None:
    if connection.autocommit and not inside:
        raise not_open("psycopg connection", _PSYCOPG_REMEDY)
    _check_pipeline(connection)


def _check_pipeline(connection: Any) -> None:
    """What was only queued must not be taken for done."""
    if connection.pgconn.pipeline_status:
        raise ConfigurationError(
            "this psycopg connection is in pipeline mode, where answers come later: whether a key is claimed, settled or undone must "
            "be known at once. Call within(), and end a claim, outside of `with connection.pipeline():`; the function may open one "
            "of its own"
        )


class PsycopgPort(_DriverPort):
    dialect: Dialect = "postgresql"
    lingers = True

    def __init__(self, connection: Any) -> None:
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        super().__init__(connection)
        # Not connection.cursor(): the caller's row or cursor factory may give anything.
        self._cursor: Any = Cursor(connection, row_factory=tuple_row)

    @property
    def inside(self) -> bool:
        return bool(self.connection.info.transaction_status.value)  # 0 is idle

    async def prepare(self) -> None:
        _check_psycopg(self.connection, inside=self.inside)

    @property
    def scripts(self) -> Scripts | None:
        return self if self.inside else None  # before it is begun see `_WholeTransaction`

    async def script(self, sql: str) -> int:
        _check_pipeline(self.connection)
        cursor = self._cursor
        cursor.execute(sql, prepare=False)
        while cursor.nextset():
            pass
        return int(cursor.rowcount)

    async def savepoint(self, name: str) -> SqlSavepoint | _WholeTransaction:
        return await SqlSavepoint.begin(self, name) if self.inside else _WholeTransaction(self)

    async def give_up(self) -> None:
        _check_pipeline(self.connection)
        self.connection.rollback()

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
        _check_pipeline(self.connection)
        cursor = self._cursor
        if not args:
            cursor.execute(sql, prepare=False)
            return ()
        cursor.execute(sql, args)
        rows: Sequence[Row] = cursor.fetchall() if cursor.description else ()
        return rows


class PsycopgAsyncPort(_DriverPort):
    colour: Literal["sync", "async"] = "async"
    dialect: Dialect = "postgresql"
    lingers = True

    def __init__(self, connection: Any) -> None:
        from psycopg import AsyncCursor
        from psycopg.rows import tuple_row

        super().__init__(connection)
        self._cursor: Any = AsyncCursor(connection, row_factory=tuple_row)

    @property
    def inside(self) -> bool:
        return bool(self.connection.info.transaction_status.value)  # 0 is idle

    async def prepare(self) -> None:
        _check_psycopg(self.connection, inside=self.inside)

    @property
    def scripts(self) -> Scripts | None:
        return self if self.inside else None  # before it is begun see `_WholeTransaction`

    async def script(self, sql: str) -> int:
        _check_pipeline(self.connection)
        cursor = self._cursor
        await cursor.execute(sql, prepare=False)
        while cursor.nextset():
            pass
        return int(cursor.rowcount)

    async def savepoint(self, name: str) -> SqlSavepoint | _WholeTransaction:
        return await SqlSavepoint.begin(self, name) if self.inside else _WholeTransaction(self)

    async def give_up(self) -> None:
        _check_pipeline(self.connection)
        await self.connection.rollback()

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
        _check_pipeline(self.connection)
        cursor = self._cursor
        if not args:
            await cursor.execute(sql, prepare=False)
            return ()
        await cursor.execute(sql, args)
        rows: Sequence[Row] = await cursor.fetchall() if cursor.description else ()
        return rows


class AsyncpgPort(_DriverPort):
    colour: Literal["sync", "async"] = "async"
    dialect: Dialect = "postgresql"
    lingers = True
    style: Style = "dollar"

    @property
    def inside(self) -> bool:
        return bool(self.connection.is_in_transaction())

    @property
    def scripts(self) -> Scripts | None:
        return self

    async def script(self, sql: str) -> int:
        status: str = await self.connection.execute(sql)
        if status == "SELECT 1":  # as a claim that is won is answered
            return 1
        count = status.rpartition(" ")[2]
        return int(count) if count.isdigit() else 0

    async def prepare(self) -> None:
        if not self.connection.is_in_transaction():
            raise not_open("asyncpg connection", "Use `async with connection.transaction():` around it")

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
        if not args:
            await self.connection.execute(sql)
            return ()
        rows: Sequence[Row] = await self.connection.fetch(sql, *args)
        return rows


# ----------------------------------------------------------------------------------------- MariaDB, MySQL


def mysql_is_open(connection: Any) -> bool:
    """Whether a transaction is open, or the server will begin one by itself because autocommit is off."""
    ask = getattr(connection, "get_autocommit", None)
    autocommit = ask() if ask is not None else getattr(connection, "autocommit", False)
    if not autocommit:
        return True
    if hasattr(connection, "get_transaction_status"):
        return bool(connection.get_transaction_status())
    return bool(getattr(connection, "server_status", 0) & _IN_TRANSACTION)


class PymysqlPort(_DriverPort):
    dialect: Dialect = "mysql"

    def __init__(self, connection: Any) -> None:
        from pymysql.cursors import Cursor

        super().__init__(connection)
        self._cursors = Cursor
        self.mariadb = "MariaDB" in str(connection.server_version)

    async def prepare(self) -> None:
        if not mysql_is_open(self.connection):
            raise not_open("PyMySQL connection", _BEGIN)

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
        with self.connection.cursor(self._cursors) as cursor:
            cursor.execute(sql, args or None)
            self.count = cursor.rowcount
            rows: Sequence[Row] = cursor.fetchall() if cursor.description else ()
            return rows


class AsyncmyPort(_DriverPort):
    colour: Literal["sync", "async"] = "async"
    dialect: Dialect = "mysql"

    def __init__(self, connection: Any) -> None:
        from asyncmy.cursors import Cursor

        super().__init__(connection)
        self._cursors = Cursor
        self.mariadb = "MariaDB" in str(connection.get_server_info())

    async def prepare(self) -> None:
        if not mysql_is_open(self.connection):
            raise not_open("asyncmy connection", _BEGIN.replace("connection.begin", "await connection.begin"))

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
        async with self.connection.cursor(self._cursors) as cursor:
            await cursor.execute(sql, args or None)
            self.count = cursor.rowcount
            rows: Sequence[Row] = await cursor.fetchall() if cursor.description else ()
            return rows
