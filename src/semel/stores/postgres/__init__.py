"""PostgreSQL, through asyncpg or psycopg."""

from __future__ import annotations

from semel.stores.postgres.store import PostgresStore, adopt, open_url, schema_sql
from semel.stores.postgres.url import DRIVERS

__all__ = ["DRIVERS", "PostgresStore", "adopt", "open_url", "schema_sql"]
