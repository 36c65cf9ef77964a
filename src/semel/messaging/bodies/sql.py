"""Bodies in a table beside the outbox: nothing else to run, and no body without its message."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, select
from sqlalchemy.ext.asyncio import AsyncEngine

from semel.messaging.bodies.reference import BodyMissing
from semel.messaging.bodies.store import Stored
from semel.messaging.database import Database

__all__ = ["SqlBodies"]


class SqlBodies:
    """Reads bodies that an `Outbox(…, claim_check="sql")` keeps. `where` is its database: a URL, an engine or the like.

    Bodies are written in the transaction of their message and removed with it, so there is nothing to put or to delete.
    """

    takes = False  # for whoever looks for a store that does

    def __init__(self, where: object, *, table: str = "semel") -> None:
        engine = where.any_engine if isinstance(where, Database) else where
        self._owned = not isinstance(where, Database) or isinstance(engine, AsyncEngine)
        if isinstance(where, Database) and not self._owned:
            self._database = where
        else:  # an AsyncEngine cannot be asked by a plain call: its database is opened once more, beside it
            given = engine.url if isinstance(engine, AsyncEngine) else engine
            named = where.table if isinstance(where, Database) else table
            self._database = Database(given, table=named, create=False)

    def put(self, name: str, data: bytes) -> None:
        """The outbox writes it with the message."""

    def get(self, name: str) -> bytes:
        """The body, over a connection of our own."""
        found = self._database.read_now(self._get, name)
        if found is None:
            raise BodyMissing(f"the body {name} is not in {self._database.where}")
        return found

    def _get(self, connection: Connection, name: str) -> bytes | None:
        rows = self._database.tables.bodies.c
        home, _, digest = name.partition("/")
        if home != self._database.identity[:16]:
            raise BodyMissing(f"the body {name} is of another outbox than the one in {self._database.where}")
        statement = select(rows.body).where(rows.sha256 == digest, rows.body.is_not(None)).limit(1)
        body = connection.execute(statement).scalar()
        return None if body is None else bytes(body)

    def delete(self, name: str) -> None:
        """It goes with its message."""

    def stored(self, home: str) -> Iterator[Stored]:
        """None without a message."""
        del home
        return iter(())

    def close(self) -> None:
        """Close the connections that were opened here."""
        if self._owned:
            self._database.close()
