"""PostgreSQL, through asyncpg or psycopg."""

from __future__ import annotations

from semel.stores.postgres.opening import adopt, open_url
from semel.stores.postgres.sql import schema_sql
from semel.stores.postgres.store import PostgresStore
from semel.stores.postgres.url import DRIVERS

__all__ = ["DRIVERS", "PostgresStore", "adopt", "open_url", "schema_sql"]
