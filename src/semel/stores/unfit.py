"""Servers and tables that hold no records, or would not keep them: one sentence each, said by the doctor and at first use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from semel.errors import ConfigurationError

__all__ = [
    "REPLICA",
    "NoTables",
    "no_tables",
    "not_innodb",
    "other_engines",
    "temporary",
    "to_innodb",
    "unknown_engines",
    "unlogged",
]

REPLICA: Final = "this server is a replica (role: slave): point the URL to the master"


class NoTables(ConfigurationError):
    """Semel's tables are not there, and may not be made."""

    what: str = ""
    """Without the remedy, which for a command is another one than for a program."""


def no_tables(what: str, remedy: str) -> NoTables:
    error = NoTables(f"{what}: {remedy}")
    error.what = what
    return error


def unlogged(names: str) -> str:
    """`names` of PostgreSQL tables, as in `a, b`."""
    mend = "; ".join(f"ALTER TABLE {name} SET LOGGED" for name in names.split(", "))
    return f"semel's tables are UNLOGGED, a crash of the server empties them: {mend}"


def temporary(names: str) -> str:
    """`names` of PostgreSQL tables, as in `a, b`."""
    return (
        f"semel's tables {names} are temporary, no other connection sees them and they end with this one: take pg_temp out of "
        "search_path, or name other tables with table="
    )


def other_engines(rows: Iterable[Sequence[object]], *, transactional: bool = False) -> str:
    """Tables that somebody moved to an engine without transactions, or to another one that has them, as `a=MyISAM, b=Aria`.

    `rows` of MariaDB or MySQL: the table's name, its engine, and "YES" if that has transactions. A view has no engine.
    """
    return ", ".join(
        f"{name}={engine}"
        for name, engine, has in rows
        if engine not in ("InnoDB", None) and (has == "YES") is transactional
    )


def not_innodb(found: str) -> str:
    """`found` in MariaDB or MySQL, as `other_engines` tells it."""
    return f"semel's tables are not InnoDB ({found}): {to_innodb(found)}"


def to_innodb(found: str) -> str:
    """What mends it."""
    return "; ".join(f"ALTER TABLE `{one.partition('=')[0]}` ENGINE=InnoDB" for one in found.split(", "))


def unknown_engines(found: str) -> str:
    """`found` of engines with transactions, as `other_engines` tells it."""
    return f"{found}: semel knows the settings of InnoDB, and not whether a power loss forgets acknowledged writes there"
