"""Ways to a PostgreSQL store: a URL, or a pool that somebody else made."""

from __future__ import annotations

from typing import Any, Literal

from semel.errors import ConfigurationError
from semel.store import Colour, Settings
from semel.stores.postgres import url as postgres_url
from semel.stores.postgres.link import Source
from semel.stores.postgres.store import PostgresStore

__all__ = ["adopt", "open_url"]


def open_url(url: str, settings: Settings, colour: Colour) -> PostgresStore:
    """Open by URL: `postgresql+asyncpg://`, `postgresql+psycopg://`, or plain, which takes the driver by colour.

    Options of ours: `pool` (connections per loop or process), `pgbouncer=1` (a transaction pooler is in between; it
    is also noticed by itself), `prepared=0` (no prepared statements).
    """
    address = postgres_url.parse(url, colour)
    source = postgres_url.source(address, colour)
    return PostgresStore(source, settings, pool=address.pool, listens=not address.pgbouncer)


def adopt(client: object, settings: Settings, colour: Colour) -> PostgresStore:
    """Use an asyncpg.Pool or a pool of psycopg_pool that the caller owns: its settings stay, it is never closed."""
    return PostgresStore(_borrow(client, colour), settings, pool=1000)


def _borrow(client: Any, colour: Colour) -> Source:
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    if kind.startswith("asyncpg.pool."):
        from semel.stores.postgres.asyncpg import AsyncpgLoans, AsyncpgPool

        source: Source = AsyncpgLoans(AsyncpgPool(client))
    elif kind.startswith("psycopg_pool.") and hasattr(client, "getconn"):
        from semel.stores.postgres.psycopg import PsycopgLoans, PsycopgPool

        own: Literal["sync", "async"] = "async" if "Async" in kind else "sync"
        source = PsycopgLoans(PsycopgPool(client, colour=own), colour=own)
    else:
        raise ConfigurationError(
            f"semel cannot use a {kind} as a store: pass an asyncpg.Pool, a psycopg_pool.ConnectionPool or "
            "AsyncConnectionPool, an SQLAlchemy engine, or a URL; one connection serves `within` only"
        )
    if colour != source.colour:
        face = "AsyncSemel" if source.colour == "async" else "Semel"
        raise ConfigurationError(f"a {kind} works with {face} only")
    return source
