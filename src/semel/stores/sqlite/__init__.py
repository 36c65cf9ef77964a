"""SQLite, from the standard library."""

from __future__ import annotations

from semel.stores.sqlite.store import SqliteStore, adopt, open_url, schema_sql

__all__ = ["SqliteStore", "adopt", "open_url", "schema_sql"]
