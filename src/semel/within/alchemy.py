"""Ports on SQLAlchemy: Session and Connection, sync and async, over whichever driver the engine has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from semel.errors import ConfigurationError
from semel.within.drivers import mysql_is_open, sqlite_is_open
from semel.within.failures import let_go
from semel.within.ports import Dialect, Row, Scripts, Style, not_open

__all__ = ["AsyncConnectionPort", "AsyncSessionPort", "ConnectionPort", "SessionPort"]

_DIALECTS: Final[dict[str, Dialect]] = {
    "postgresql": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
_STYLES: Final[dict[str, Style]] = {
    "numeric_dollar": "dollar",
    "format": "format",
    "pyformat": "format",
    "qmark": "qmark",
}
_WAITING: Final = "semel: after this transaction"
_REMEDY: Final = 'Use an engine or connection without isolation_level="AUTOCOMMIT"'


class _Nested:
    """`begin_nested()` of SQLAlchemy, so that its own bookkeeping (ORM state, outer savepoints) stays right."""

    __slots__ = ("_around", "_port", "_released", "_transaction")
    buffers = True
    counted = True

    def __init__(self, port: Any, transaction: Any, around: Any) -> None:
        self._port = port
        self._transaction = transaction
        self._around = around
        self._released = False

    @property
    def alive(self) -> bool:
        return bool((self._around if self._released else self._transaction).is_active)

    @property
    def spoilt(self) -> BaseException | None:
        """Of a session: a flush failed, its error was caught, and nobody has ended this since."""
        transaction = getattr(self._transaction, "sync_transaction", self._transaction)
        session = getattr(transaction, "session", None)
        if session is None or session.get_nested_transaction() is not transaction:
            return None
        error: BaseException | None = getattr(transaction, "_rollback_exception", None)  # told nowhere else
        return error

    async def flush(self) -> None:
        await self._port.flush()

    async def release(self) -> None:
        await self._port.settle(self._transaction.commit(), self._was_released)

    def _was_released(self) -> None:
        self._released = True

    async def rollback(self) -> None:
        if self._released:  # its caller was cancelled when that was done
            raise ConfigurationError("it is part of the transaction already: roll the whole transaction back")
        if not self._is_over():
            await self._port.settle(self._transaction.rollback())

    def _is_over(self) -> bool:
        """Of a connection: somebody ended the transaction around it. SQLAlchemy would warn of one more end; a session does not."""
        transaction = getattr(self._transaction, "sync_transaction", self._transaction)
        if transaction.is_active or hasattr(transaction, "session"):
            return False
        return transaction.connection.get_nested_transaction() is not transaction


class _AlchemyPort:
    """`target` is a Session or Connection of either colour; what differs is whether its answers are awaited."""

    colour: Literal["sync", "async"] = "sync"
    dialect: Dialect
    style: Style
    mariadb = False
    count = -1
    lingers = False  # SQLAlchemy counts its savepoints
    scripts: Scripts | None = None

    def __init__(self, target: Any) -> None:
        self._target = target
        self._connection: Any = None

    @property
    def foreseen(self) -> Dialect | None:
        return _dialect_of(self._target)

    async def settle(self, answer: Any, then: Callable[[], None] | None = None) -> Any:
        """The sync colour's answers are there already. `then` is called if all went well, even if its caller is cancelled."""
        if then is not None:
            then()
        return answer

    async def flush(self) -> None:
        """A Connection keeps nothing to itself."""

    async def _connect(self) -> Any:
        return self._target

    async def _connect_again(self) -> Any:
        """In a transaction that is begun: without a wait for the pool."""
        return await self._connect()

    def _sync_connection(self) -> Any:
        return self._connection

    @property
    def connection(self) -> object:
        return self._raw()

    def _raw(self) -> Any:
        return self._sync_connection().connection.driver_connection

    async def prepare(self) -> None:
        await self.flush()  # what is pending belongs to the caller's transaction, not to our savepoint
        self._connection = await self._connect()
        dialect = self._connection.dialect
        name, style = _DIALECTS.get(dialect.name), _STYLES.get(dialect.paramstyle)
        if name is None or style is None:
            raise ConfigurationError(
                f"within() knows PostgreSQL, MariaDB/MySQL and SQLite; this SQLAlchemy engine is for {dialect.name!r} "
                f"(driver {dialect.driver!r})"
            )
        self.dialect, self.style = name, style
        self.mariadb = bool(getattr(dialect, "is_mariadb", False))
        if not self._is_open() and not await self._opens():
            raise not_open("SQLAlchemy connection", _REMEDY)

    def _is_open(self) -> bool:
        connection = self._sync_connection()
        if self.dialect == "sqlite":
            return sqlite_is_open(self._raw())
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            return False
        if self.dialect == "mysql":
            return mysql_is_open(self._raw())
        adapted = connection.connection.dbapi_connection
        return getattr(adapted, "isolation_level", None) != "autocommit" and not getattr(
            self._raw(), "autocommit", False
        )

    async def _opens(self) -> bool:
        """Begun, as its first statement would do it: an event of the engine may send the BEGIN (SQLAlchemy's own recipe for
        SQLite). Where that opens nothing, nothing is left begun."""
        if self._connection.in_transaction():
            return False
        await self.settle(self._connection.begin())
        if self._is_open():
            return True
        await self.settle(self._connection.rollback())
        return False

    @property
    def begun(self) -> bool:
        return bool(self._raw().in_transaction)

    async def run(self, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
        result = await self.settle(self._connection.exec_driver_sql(sql, tuple(args)))
        self.count = result.rowcount
        rows: Sequence[Row] = result.fetchall() if result.returns_rows else ()
        return rows

    async def savepoint(self, name: str) -> _Nested:
        del name  # SQLAlchemy numbers its own
        nested = self._target.begin_nested()
        try:
            await self.settle(nested)
            # A session sends SAVEPOINT when the connection is next asked for: ask now.
            self._connection = await self._connect_again()
        except BaseException as error:
            if self.dialect == "sqlite" and not isinstance(error, Exception):
                with suppress(Exception):  # cancelled, or struck by a signal: that is what tells
                    await self.settle(nested.rollback())
            raise
        return _Nested(self, nested, self._sync_connection().get_transaction())

    def after_end(self, callback: Callable[[bool], None]) -> bool:
        del callback
        return False


def _dialect_of(place: Any) -> Dialect | None:
    return _DIALECTS.get(getattr(getattr(place, "dialect", None), "name", ""))


def _dialect_of_session(session: Any) -> Dialect | None:
    """Of its engine, unless a `get_bind` of its own may choose another one."""
    own = getattr(session, "sync_session", session)  # whose class may be the application's
    chooses = not type(own).get_bind.__module__.startswith("sqlalchemy.")
    return None if chooses else _dialect_of(session.bind)


class ConnectionPort(_AlchemyPort):
    """A sync Connection: begun by its first statement if it was not."""


class SessionPort(_AlchemyPort):
    """A sync Session: pending objects are flushed before the savepoint and before it is released."""

    @property
    def foreseen(self) -> Dialect | None:
        return _dialect_of_session(self._target)

    async def _connect(self) -> Any:
        return self._target.connection()

    async def flush(self) -> None:
        await self.settle(self._target.flush())

    def after_end(self, callback: Callable[[bool], None]) -> bool:
        _call_after(self._target, self._sync_connection(), callback)
        return True


class _AsyncAlchemyPort(_AlchemyPort):
    colour: Literal["sync", "async"] = "async"

    async def settle(self, answer: Any, then: Callable[[], None] | None = None) -> Any:
        if self.dialect == "sqlite":
            return await _to_its_end(answer, then)
        value = await answer
        if then is not None:
            then()
        return value

    def _sync_connection(self) -> Any:
        return self._connection.sync_connection


class AsyncConnectionPort(_AsyncAlchemyPort):
    """An AsyncConnection. One that was never started is refused by SQLAlchemy itself."""

    @property
    def foreseen(self) -> Dialect | None:
        return _dialect_of(self._target.sync_connection)  # None before it is started


class AsyncSessionPort(_AsyncAlchemyPort):
    """An AsyncSession, as `SessionPort`."""

    @property
    def foreseen(self) -> Dialect | None:
        return _dialect_of_session(self._target)

    async def _connect(self) -> Any:
        return await self._target.connection()

    async def flush(self) -> None:
        try:  # not to its end: these are the caller's own statements, and may be many
            await self._target.flush()
        except asyncio.CancelledError as error:
            let_go(error)
            raise

    async def _connect_again(self) -> Any:
        return await self.settle(self._target.connection())

    def after_end(self, callback: Callable[[bool], None]) -> bool:
        _call_after(self._target.sync_session, self._sync_connection(), callback)
        return True


async def _to_its_end(work: Awaitable[Any], then: Callable[[], None] | None) -> Any:
    """Its value. Who is cancelled meanwhile hears of it at its end: SQLAlchemy would give up the connection, which keeps SQLite's
    lock on the whole file for as long as anything refers to the cursor of the statement that was left.

    Not in a task of its own: that would have another context and another `current_task`, and `asyncio.run`, which cancels all
    tasks at its end, would cancel this one in the middle of its statement.
    """
    struck: BaseException | None = None
    steps = work.__await__()
    try:
        while True:
            future = next(steps)
            while True:
                try:
                    await (asyncio.sleep(0) if future is None else _end_of(future))
                except GeneratorExit:
                    raise  # its loop has been given up: nothing can be waited for
                except BaseException as error:  # noqa: BLE001 - a cancellation, or a signal's handler: raised below
                    struck = error
                if future is None or future.done():
                    break
    except StopIteration as end:
        if then is not None:
            then()
        if struck is None:
            return end.value
    except Exception:
        if struck is None:
            raise
    try:
        raise struck
    finally:
        del struck  # a traceback that leads back to itself would live until the next collection of cycles


def _end_of(future: asyncio.Future[Any]) -> asyncio.Future[None]:
    """Cancelling it leaves the other one alone. As `asyncio.wait`, at a fraction of its cost."""
    ended = future.get_loop().create_future()

    def tell(_: asyncio.Future[Any]) -> None:
        if not ended.done():
            ended.set_result(None)

    future.add_done_callback(tell)
    return ended


def _call_after(session: Any, connection: Any, callback: Callable[[bool], None]) -> None:
    """After the root transaction (`after_commit` would also fire for every released savepoint). One listener per session."""
    from sqlalchemy import event

    waiting = session.info.get(_WAITING)
    if waiting is None:
        waiting = session.info[_WAITING] = []
        event.listen(session, "after_transaction_end", _ended)
    waiting.append((connection, callback))


def _ended(session: Any, transaction: Any) -> None:
    if transaction.parent is None:
        callbacks, session.info[_WAITING] = session.info[_WAITING], []
        for connection, callback in callbacks:
            # A session that joined a connection's transaction has ended; that one goes on, and its locks with it.
            callback(not connection.in_transaction())
