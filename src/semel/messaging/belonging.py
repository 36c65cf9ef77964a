"""Whether a caller's transaction is of the outbox's own database.

Another database may have messaging tables too, divided in another way: what an outbox of here wrote there, some of it no relay
would ever look for. Each engine, and each connection of a driver, is asked once for the identity of the tables that it leads to.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Final

from sqlalchemy import Connection, inspect, text

from semel.errors import ConfigurationError
from semel.within.failures import is_missing_table
from semel.within.ports import Port
from semel.within.records import query

__all__ = ["Belonging", "refuse_elsewhere", "spoken"]

_IDENTITY: Final = "SELECT value FROM {table}_messaging WHERE name = $1"
# MariaDB: a locking read sees what is committed, whatever snapshot the caller's transaction has.
_LATEST: Final = {"mysql": " LOCK IN SHARE MODE"}
_NOTHING: Final[dict[str, str]] = {}


def spoken(dialect: str) -> str:
    """MariaDB's and MySQL's is one language."""
    return "mysql" if dialect == "mariadb" else dialect


def refuse_elsewhere(error: BaseException, port: Port, table: str, where: str) -> None:
    """ConfigurationError if what went wrong is that the caller's database has no inbox. That costs nothing while all is well; an
    inbox that another database has is as good as this one for whoever always comes with its sessions."""
    if is_missing_table(error, port.dialect):
        raise ConfigurationError(
            f"the {port.dialect} database of this session or connection has no table {table}_inbox (or not in its search path), "
            f"and the inbox knows {where}, which is another database or schema: an admission commits with your rows, so it "
            "must be beside them. Use a session of the inbox's database, or an Inbox of the session's"
        ) from error


# By engine's pool or driver's connection: the identity of the tables of each name there. All outboxes of a process share it.
_seen: Final[weakref.WeakKeyDictionary[Any, dict[str, str]]] = weakref.WeakKeyDictionary()


class Belonging:
    """Whether somebody's tables are those of `table` at `where`."""

    def __init__(self, table: str, where: str) -> None:
        self._table = table
        self._where = where

    def check(self, connection: Connection, identity: str, *, there: bool) -> bool:
        """ConfigurationError unless the tables are those with this identity. False: there are none at all."""
        pool = connection.engine.pool
        if self._is_known(pool, identity):
            return True
        schema, _, prefix = self._table.rpartition(".")
        if not there and not inspect(connection).has_table(f"{prefix}_messaging", schema=schema or None):
            return False
        question = self._question(spoken(connection.dialect.name)).replace("$1", ":name")
        self._note(pool, connection.execute(text(question), {"name": "identity"}).scalar(), identity)
        return True

    async def verify(self, port: Port, identity: str) -> None:
        """As `check`, on a driver's own connection, which is not asked whether there are tables."""
        known: Any = port.connection
        known = getattr(known, "_con", known)  # asyncpg's pool hands out a new face each time
        if not self._is_known(known, identity):
            rows = await query(port, self._question(port.dialect), ("identity",))
            self._note(known, rows[0][0] if rows else None, identity)

    def _is_known(self, place: Any, identity: str) -> bool:
        try:
            return _seen.get(place, _NOTHING).get(self._table) == identity
        except TypeError:  # sqlite3's connections cannot be referred to weakly, and need no round trip
            return False

    def _question(self, dialect: str) -> str:
        return _IDENTITY.format(table=self._table) + _LATEST.get(dialect, "")

    def _note(self, place: Any, found: str | None, identity: str) -> None:
        if found is None:
            return  # no answer: the caller's snapshot may be older than the tables
        with contextlib.suppress(TypeError):
            _seen.setdefault(place, {})[self._table] = found
        if found != identity:
            raise ConfigurationError(
                f"this transaction is of another database: it has messaging tables ({self._table}_…) of its own, and those of "
                f"this outbox are in {self._where}. Use an Outbox of the transaction's database: there it is divided into parts "
                "in its own way, and what is added from here would not be found by its relays"
            )
