"""The file of a SQLite database, which opening it would make: whoever only looks must not leave one behind."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

__all__ = ["missing_file"]


def missing_file(engine: Engine) -> str | None:
    """The name of the engine's SQLite file, if there is none yet."""
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return None if Path(name).exists() else name
