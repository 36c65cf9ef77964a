"""An SQLAlchemy engine for MariaDB/MySQL as a maker of connections: its TLS, connect_args, events and creator hold.

Each connection is made anew by the engine's own way to connect, and is not of its pool: the application's connections stay its
own, and ours have the session settings that records need.
"""

from __future__ import annotations

import struct
from typing import Any

from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import greenlet_spawn

from semel.errors import ConfigurationError
from semel.stores.connecting import in_time
from semel.stores.mysql.address import DEFAULT_POOL, driver_for
from semel.stores.mysql.errors import unreachable
from semel.stores.mysql.pools import LoopPool, Pool, ThreadPool
from semel.stores.mysql.wires import AsyncmyWire, PymysqlWire, need

__all__ = ["engine_pool"]

_MULTI_STATEMENTS_ON = struct.pack("<H", 0)


def engine_pool(engine: Engine | AsyncEngine) -> Pool:
    """A pool of connections that the engine makes. A driver that semel does not speak is a ConfigurationError."""
    driver = driver_for(
        engine.dialect.name, engine.dialect.driver, "async" if isinstance(engine, AsyncEngine) else "sync"
    )
    need(driver)
    login = _EngineLogin(engine, DEFAULT_POOL[driver])
    return LoopPool(login) if driver == "asyncmy" else ThreadPool(login)


class _EngineLogin:
    def __init__(self, engine: Engine | AsyncEngine, size: int) -> None:
        url = engine.url
        place = (
            f"{url.host}:{url.port or 3306}, database {url.database!r}" if url.host else "the engine's server"
        )
        self.where = f"MariaDB/MySQL at {place}"
        self.size = size
        self._engine = engine

    def connect(self, patience: float) -> PymysqlWire:
        import pymysql

        try:
            # Time-outs are the engine's own, and may be longer than we have, or none.
            return in_time(self._ready, patience, late=PymysqlWire.cut)
        except (pymysql.MySQLError, SQLAlchemyError, OSError, RuntimeError) as error:
            raise unreachable(error, self.where) from error

    def _ready(self) -> PymysqlWire:
        connection = self._make()
        try:
            self._check(connection)
            connection.autocommit(True)
            _allow_several_statements(connection)
            return PymysqlWire(connection)
        except BaseException:
            connection._force_close()  # noqa: SLF001 - as `PymysqlWire.cut`
            raise

    async def connect_async(self) -> AsyncmyWire:
        from asyncmy.errors import MySQLError

        try:
            connection = await greenlet_spawn(self._make)
        except (MySQLError, SQLAlchemyError, OSError, RuntimeError) as error:
            raise unreachable(error, self.where) from error
        try:
            self._check(connection)
            await connection.autocommit(True)
            return AsyncmyWire(connection, owned=True)
        except BaseException as error:
            connection.close()
            if isinstance(error, MySQLError | OSError):
                raise unreachable(error, self.where) from error
            raise

    def _make(self) -> Any:
        # A pool of the same kind for this one connection: the engine's own has idle ones that may be dead, and a limit.
        proxied: PoolProxiedConnection = self._engine.pool.recreate().connect()
        connection = proxied.driver_connection
        proxied.detach()
        return connection

    def _check(self, connection: Any) -> None:
        if (charset := connection.character_set_name()) != "utf8mb4":
            raise ConfigurationError(
                f"{self.where}: the engine's connections speak {charset}, which cannot carry every key: make the engine with "
                "?charset=utf8mb4 in its URL"
            )


def _allow_several_statements(connection: Any) -> None:
    """What the flag MULTI_STATEMENTS does when a connection is made, for one that is there."""
    from pymysql.constants.COMMAND import COM_SET_OPTION

    connection._execute_command(COM_SET_OPTION, _MULTI_STATEMENTS_ON)  # noqa: SLF001 - PyMySQL has no name for it
    connection._read_packet()  # noqa: SLF001 - its answer, or the error
