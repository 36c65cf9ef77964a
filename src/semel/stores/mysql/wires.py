"""The two drivers: asyncmy for the async colour, PyMySQL for the sync one. Small adapters, no decisions."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal

from semel.errors import ConfigurationError
from semel.stores.mysql.errors import unreachable
from semel.stores.mysql.session import Answers

__all__ = ["AsyncmyWire", "PymysqlWire", "adopt_asyncmy", "dial_asyncmy", "dial_pymysql", "need"]


def need(driver: Literal["asyncmy", "pymysql"]) -> None:
    """Refuse now, by the extra's name, when the driver is not installed."""
    try:
        __import__(driver)
    except ImportError as error:
        raise ConfigurationError(
            f'the MariaDB/MySQL store needs {driver}: pip install "semel[mysql]"'
        ) from error


def _is_mariadb(version: str) -> bool:
    return "mariadb" in version.lower()


class AsyncmyWire:
    """An asyncmy connection."""

    def __init__(self, connection: Any, *, owned: bool) -> None:
        from asyncmy.cursors import Cursor
        from asyncmy.errors import MySQLError

        self.errors: tuple[type[Exception], ...] = (MySQLError, OSError)
        self.connection = connection
        self.owned = owned
        self.mariadb = _is_mariadb(connection.server_version)
        self.escape = connection.escape
        # Named, because an adopted pool may make dictionaries of rows.
        self._cursor = connection.cursor(Cursor)

    async def send(self, sql: bytes, patience: float) -> Answers:
        del patience  # the pool's caller bounds the time of an async verb as a whole
        cursor = self._cursor
        await cursor.execute(sql)
        answers: Answers = [(cursor.rowcount, await cursor.fetchall())]
        while await cursor.nextset():
            answers.append((cursor.rowcount, await cursor.fetchall()))
        return answers

    @property
    def alive(self) -> bool:
        connection = self.connection
        return bool(connection.connected) and not connection._stream_broken  # noqa: SLF001 - its pool looks there too

    @property
    def in_transaction(self) -> bool:
        return bool(self.connection.get_transaction_status())

    async def quit(self) -> None:
        await self.connection.ensure_closed()

    def cut(self) -> None:
        self.connection.close()


async def dial_asyncmy(options: Mapping[str, Any], where: str) -> AsyncmyWire:
    """A new connection, or an error that says what to do."""
    import asyncmy
    from asyncmy.errors import MySQLError

    try:
        return AsyncmyWire(await asyncmy.connect(**options), owned=True)
    except (MySQLError, OSError, RuntimeError) as error:
        raise unreachable(error, where) from error


def adopt_asyncmy(connection: Any) -> AsyncmyWire:
    """A connection of the caller's pool; refused when its settings would corrupt what is stored."""
    from asyncmy.constants.SERVER_STATUS import SERVER_STATUS_NO_BACKSLASH_ESCAPES

    if connection.character_set_name() != "utf8mb4":
        raise ConfigurationError(
            f"the pool's connections speak {connection.character_set_name()}, which cannot carry every key: "
            "make the pool with charset='utf8mb4'"
        )
    if connection.server_status & SERVER_STATUS_NO_BACKSLASH_ESCAPES:
        raise ConfigurationError(
            "the pool's connections run with sql_mode NO_BACKSLASH_ESCAPES: remove it from the pool's sql_mode, or give "
            "semel a URL"
        )
    return AsyncmyWire(connection, owned=False)


class PymysqlWire:
    """A PyMySQL connection."""

    owned = True

    def __init__(self, connection: Any) -> None:
        from pymysql.cursors import Cursor
        from pymysql.err import MySQLError

        self.errors: tuple[type[Exception], ...] = (MySQLError, OSError)
        self.connection = connection
        self.mariadb = _is_mariadb(connection.server_version)
        self.escape = connection.escape
        # Named, because an engine may make dictionaries of rows.
        self._cursor = connection.cursor(Cursor)

    async def send(self, sql: bytes, patience: float) -> Answers:
        connection, cursor = self.connection, self._cursor
        # PyMySQL takes time-outs for the life of a connection; a verb's time is what is left of it.
        connection._read_timeout = connection._write_timeout = patience  # noqa: SLF001 - PyMySQL tells it nowhere else
        cursor.execute(sql)
        answers: Answers = [(cursor.rowcount, cursor.fetchall())]
        while cursor.nextset():
            answers.append((cursor.rowcount, cursor.fetchall()))
        return answers

    @property
    def alive(self) -> bool:
        return bool(self.connection.open) and not _readable(self.connection._sock)  # noqa: SLF001 - PyMySQL tells it nowhere else

    @property
    def in_transaction(self) -> bool:
        from pymysql.constants.SERVER_STATUS import SERVER_STATUS_IN_TRANS

        return bool(self.connection.server_status & SERVER_STATUS_IN_TRANS)

    async def quit(self) -> None:
        with contextlib.suppress(Exception):  # it is being closed: whatever the server still had to say
            self.connection.close()

    def cut(self) -> None:
        self.connection._force_close()  # noqa: SLF001 - close() would first speak to a server that may be gone


def _readable(sock: Any) -> bool:
    """Nothing is due on an idle connection: what is readable is the end of it, or the server's last words."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


@cache
def _connection_class() -> Any:
    from pymysql.connections import Connection

    class Sharing(Connection):
        """Where TLS is preferred but not asked for, PyMySQL would read all authorities of the system (60 ms) for every
        connection, to trust any certificate. One such context serves all; one that was asked for is the pool's own."""

        _unasked: ClassVar[Any] = None

        def _create_ssl_ctx(self, sslp: Any) -> Any:
            if sslp:
                return super()._create_ssl_ctx(sslp)  # type: ignore[misc]  # of the driver that this is mixed into
            if Sharing._unasked is None:
                Sharing._unasked = super()._create_ssl_ctx(sslp)  # type: ignore[misc]  # of the driver that this is mixed into
            return Sharing._unasked

    return Sharing


def dial_pymysql(
    options: Mapping[str, Any], where: str, patience: float, *, prefers_tls: bool = False
) -> PymysqlWire:
    """A new connection, or an error that says what to do."""
    import pymysql
    from pymysql.constants import CLIENT

    try:
        connection = _connection_class()(
            **options,
            ssl_disabled=options["ssl"] is None and not prefers_tls,
            client_flag=CLIENT.MULTI_STATEMENTS,
            connect_timeout=patience,
            read_timeout=patience,
            write_timeout=patience,
        )
    except (pymysql.MySQLError, OSError, RuntimeError) as error:
        raise unreachable(error, where) from error
    return PymysqlWire(connection)
