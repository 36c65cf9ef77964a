"""The tables of an SQLite store: their DDL, and who creates or refuses them."""

from __future__ import annotations

import re
import sqlite3
from importlib.resources import files
from typing import Final

from semel.errors import ConfigurationError
from semel.stores.sqlite.writer import patiently, roll_back
from semel.stores.unfit import no_tables

__all__ = ["VERSION", "check_table", "ensure_schema", "schema_sql"]

VERSION: Final = 1
_TABLE: Final = re.compile(r"(?!sqlite_)[A-Za-z_][A-Za-z0-9_]{0,47}", re.IGNORECASE)


def check_table(table: str) -> str:
    if not _TABLE.fullmatch(table):
        raise ConfigurationError(
            f"table={table!r} cannot be a table name: use letters, digits and underscores, beginning with a letter or an "
            "underscore (not with sqlite_), 48 characters at most"
        )
    return table


def schema_sql(table: str = "semel") -> str:
    """The DDL, for people who may not let a program create tables; running it twice does no harm."""
    text = files("semel.stores").joinpath("sql/sqlite.sql").read_text("utf-8")
    return text.replace("{table}", check_table(table))


def ensure_schema(db: sqlite3.Connection, table: str, *, create: bool, deadline: float) -> None:
    """See that the tables are there and of our version; create them if allowed. Many processes may do so at once."""
    version = _version(db, table, deadline)
    if version is None and create:
        try:
            patiently(db, "BEGIN IMMEDIATE", deadline)
            for statement in _statements(schema_sql(table)):
                db.execute(statement)
            db.execute("COMMIT")
        except BaseException:
            roll_back(db)
            raise
        version = _version(db, table, deadline)
    if version is None:
        raise no_tables(
            f"the SQLite file has no tables {table}, {table}_audit and {table}_schema, and semel may not create them",
            "run the statements that `semel schema sql` prints, or allow it (create=True)",
        )
    if version > VERSION:
        raise ConfigurationError(
            f"the tables {table}… are of schema version {version}, this semel knows version {VERSION}: install the semel "
            "that wrote them, or a newer one; or use another `table`"
        )


def _version(db: sqlite3.Connection, table: str, deadline: float) -> int | None:
    # Patiently: readers too find the file locked while its log begins, or ends with the last of its users.
    named = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    if not patiently(db, named, deadline, f"{table}_schema"):
        return None
    (version,) = patiently(db, f'SELECT max(version) FROM "{table}_schema"', deadline)[0]
    return None if version is None else int(version)


def _statements(script: str) -> list[str]:
    # Not executescript: it commits first, and the tables are to appear together or not at all.
    plain = re.sub(r"--[^\n]*", "", script)
    return [statement for part in plain.split(";") if (statement := part.strip())]
