"""An SQLAlchemy engine for PostgreSQL as a lender of connections: its pool, its settings, its way to connect."""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool, PoolProxiedConnection, QueuePool
from sqlalchemy.util import greenlet_spawn

from semel.errors import ConfigurationError
from semel.stores.connecting import in_time
from semel.stores.postgres.link import Source

__all__ = ["engine_source"]


def engine_source(engine: Engine | AsyncEngine) -> Source:
    """Links on the engine's connections. A driver that semel does not speak is a ConfigurationError."""
    driver = engine.dialect.driver
    if driver == "asyncpg" and isinstance(engine, AsyncEngine):
        from semel.stores.postgres.asyncpg import AsyncpgLoans

        return AsyncpgLoans(_LoopLender(engine))
    if driver.startswith("psycopg") and driver != "psycopg2":
        from semel.stores.postgres.psycopg import PsycopgLoans

        if isinstance(engine, AsyncEngine):
            return PsycopgLoans(_LoopLender(engine), colour="async")
        return PsycopgLoans(_ThreadLender(engine), colour="sync")
    raise ConfigurationError(
        f"semel does not speak to PostgreSQL through {driver}: make the engine with postgresql+psycopg:// (both "
        "colours) or postgresql+asyncpg:// (async), or give semel a URL"
    )


class _Lender:
    """What was lent, by the driver's connection."""

    def __init__(self, engine: Engine | AsyncEngine) -> None:
        self.where = f"{engine.url.host or 'localhost'}:{engine.url.port or 5432}/{engine.url.database or ''}"
        self.errors: tuple[type[BaseException], ...] = (SQLAlchemyError, OSError, *_driver_errors(engine))
        self._pool = engine.pool
        self._lent: dict[Any, PoolProxiedConnection] = {}

    @property
    def size(self) -> int:
        return self._pool.size() if isinstance(self._pool, QueuePool) else 1

    @property
    def _spares(self) -> bool:
        """Whether a connection can be taken out of the pool for good: it makes another one when needed."""
        return isinstance(self._pool, QueuePool | NullPool)

    def _note(self, proxied: PoolProxiedConnection) -> Any:
        connection = proxied.driver_connection
        self._lent[connection] = proxied
        return connection

    def _return(self, connection: Any) -> None:
        proxied = self._lent.pop(connection)
        closed = connection.closed if hasattr(connection, "closed") else connection.is_closed()
        if closed:
            proxied.invalidate()
        proxied.close()


def _driver_errors(engine: Engine | AsyncEngine) -> tuple[type[BaseException], ...]:
    if engine.dialect.driver == "asyncpg":
        import asyncpg

        return asyncpg.PostgresError, asyncpg.InterfaceError
    import psycopg

    return (psycopg.Error,)


class _LoopLender(_Lender):
    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self._engine = engine

    async def lend(self, timeout: float) -> Any:
        async with asyncio.timeout(timeout):
            return self._note(await self._engine.raw_connection())

    async def take_back(self, connection: Any) -> None:
        await greenlet_spawn(self._return, connection)

    async def spare(self, timeout: float) -> Any:
        if not self._spares:
            return None
        connection = await self.lend(timeout)
        await greenlet_spawn(self._lent.pop(connection).detach)
        return connection


def _discard(late: PoolProxiedConnection) -> None:
    """Closed, not given back: the engine may have been disposed of meanwhile, and nobody closes what its old pool holds."""
    late.invalidate()
    late.close()


class _ThreadLender(_Lender):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._engine = engine

    async def lend(self, timeout: float) -> Any:
        if isinstance(self._pool, QueuePool) and self._pool.checkedin():
            return self._note(self._engine.raw_connection())
        # It may have to connect, or to wait for another's connection, for longer than we have.
        return self._note(in_time(self._engine.raw_connection, timeout, late=_discard))

    async def take_back(self, connection: Any) -> None:
        self._return(connection)

    async def spare(self, timeout: float) -> Any:
        if not self._spares:
            return None
        connection = await self.lend(timeout)
        self._lent.pop(connection).detach()
        return connection
