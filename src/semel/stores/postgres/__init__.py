"""PostgreSQL, through asyncpg or psycopg."""

from __future__ import annotations

from semel.stores.postgres.store import PostgresStore, adopt, open_url, schema_sql

__all__ = ["PostgresStore", "adopt", "open_url", "schema_sql"]
