"""Whether the messaging tables are there, ours, and of a version that is known; and the making of what is missing.

That is asked and made on connections of our own, never in the caller's transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from semel.errors import ConfigurationError, SemelError
from semel.messaging.belonging import Belonging, spoken
from semel.messaging.engines import AnyEngine, sync_engine_of, take_write_lock
from semel.messaging.failures import translating, unavailable
from semel.messaging.files import missing_file
from semel.messaging.message import PARTS
from semel.messaging.tables import VERSION, Tables, ddl, tables_named
from semel.stores.unfit import no_tables
from semel.within.ports import Port

__all__ = ["Schema"]

_MAKE: Final = (
    "Call create() once at start-up, outside a transaction, or run what `semel schema sql URL` prints"
)
_LOCK: Final = 0x73656D656C  # "semel": two processes that make the tables at once take turns


class Schema:
    """The tables behind an engine, and what they say of themselves: `identity`, `parts` and `settings`, known once they were
    looked at (`ready`)."""

    def __init__(
        self,
        engine: AnyEngine,
        table: str,
        *,
        create: bool,
        parts: int | None,
        divides: bool,
        settings: Mapping[str, float | None] | None,
    ) -> None:
        self._engine = engine
        self.where = engine.url.render_as_string(hide_password=True)
        self.tables: Tables = tables_named(table)
        self.identity = ""
        self.parts = parts or PARTS
        self._parts_given = parts is not None
        # Only an outbox is divided: an inbox that makes the tables first leaves the number to it.
        self._needs = {"version", "identity", "parts"} if divides else {"version", "identity"}
        # What one program says of the messages here holds for those that say nothing, such as `semel relay`.
        self._settings = {name: value for name, value in (settings or {}).items() if value is not None}
        self.settings: dict[str, float] = dict(self._settings)
        self._may_create = create
        self.ready = False
        self._belonging = Belonging(table, self.where)

    # ------------------------------------------------------------------------- in a caller's transaction
    def check(self, connection: Connection) -> None:
        """Before an engine is first used in a caller's transaction: are the tables there, and are they ours? What is missing is
        made elsewhere."""
        looked = not self.ready
        if looked:
            self._first_look(connection)
        if not self._belonging.check(connection, self.identity, there=looked):
            raise self._missing(f"the outbox knows {self.where}, which is another database or schema")

    def _first_look(self, connection: Connection) -> None:
        if spoken(connection.dialect.name) != spoken(self._engine.dialect.name):
            raise self._missing(f"this connection speaks to {connection.dialect.name}")
        known_there = _are_there(connection, self.tables)
        try:
            self.get_ready()
        except SemelError:
            raise
        except Exception as error:
            raise self._missing(f"they could not be made on a connection of our own: {error}") from error
        if not known_there and not _are_there(connection, self.tables):
            self.ready = False
            raise self._missing(f"the outbox knows {self.where}, which is another database or schema")

    async def verify(self, port: Port) -> None:
        """As `check`, on a driver's own connection."""
        await self.look(port)
        await self._belonging.verify(port, self.identity)

    async def look(self, port: Port) -> None:
        """Are the tables there? A driver's own connection is not asked whether they exist, so we ask on our own."""
        if self.ready:
            return
        if port.dialect != spoken(self._engine.dialect.name):
            raise self._missing(f"this connection speaks to {port.dialect}")
        if isinstance(self._engine, AsyncEngine):
            try:
                with translating():
                    await greenlet_spawn(self.get_ready)
            except (DBAPIError, PoolTimeout) as error:
                raise unavailable(error, self.where) from error
            return
        try:
            self.get_ready()
        except DBAPIError as error:
            raise self._missing(f"they could not be made on a connection of our own: {error}") from error

    # ------------------------------------------------------------------------ on connections of our own
    def get_ready(self) -> None:
        """See what is there, and write what is missing. Below an AsyncEngine, inside of a greenlet."""
        engine = sync_engine_of(self._engine)
        if not self._may_create and (name := missing_file(engine)) is not None:
            raise no_tables(f"there is no file {name!r}", f"create=False makes none. {_MAKE}")
        with engine.execution_options(semel_reads=True).begin() as own:
            there = _are_there(own, self.tables)
            complete = there and self._adopt(own)
        if not there and not self._may_create:
            raise no_tables(self._none(), f"they are not made here (create=False). {_MAKE}")
        if not complete:
            self.make()
        self.ready = True  # now that it is committed: others do not look again

    def make(self) -> None:
        """Make what is missing, now. Below an AsyncEngine, inside of a greenlet."""
        with sync_engine_of(self._engine).begin() as own:
            take_write_lock(own)
            self._make(own)
        self.ready = True

    def _make(self, connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
        try:
            self.tables.meta.metadata.create_all(connection)
        except DBAPIError:
            if not _are_there(connection, self.tables):
                raise
        meta = self.tables.meta
        known = {row.name: row.value for row in connection.execute(select(meta))}
        fresh = {"version": str(VERSION), "identity": uuid.uuid4().hex, "parts": str(self.parts)}
        for name, value in fresh.items():
            if name in self._needs - known.keys():
                connection.execute(meta.insert().values(name=name, value=value))
        if self._parts_given and (stored := int(known.get("parts", self.parts))) != self.parts:
            raise ConfigurationError(  # whatever is in them: another program may know this number
                f"this outbox is divided into {stored} parts, and parts={self.parts} was given: messages of one key would go two "
                f"ways. Leave parts= out, or give {stored}"
            )
        for name, number in self._settings.items():
            if name not in known:
                connection.execute(meta.insert().values(name=name, value=repr(number)))
            elif known[name] != repr(number):
                connection.execute(meta.update().where(meta.c.name == name).values(value=repr(number)))
        self._adopt(connection)

    def _adopt(self, connection: Connection) -> bool:
        """Read what the tables say of themselves; False if something is to be written first."""
        known = {row.name: row.value for row in connection.execute(select(self.tables.meta))}
        version = int(known.get("version", VERSION))
        if version > VERSION:
            raise ConfigurationError(
                f"the messaging tables in {self.where} have version {version}, this semel knows {VERSION}: "
                "update semel here before it writes there"
            )
        if not self._needs <= known.keys():
            return False  # made by a migration of the caller's, or by an inbox
        stored = int(known.get("parts", self.parts))
        if self._parts_given and stored != self.parts:
            return False
        if any(known.get(name) != repr(number) for name, number in self._settings.items()):
            return False
        numbers = {name: float(known[name]) for name in known.keys() - {"version", "identity", "parts"}}
        self.settings = numbers | self._settings
        self.identity, self.parts = known["identity"], stored
        return True

    def _missing(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"{self._none()}, and {why}. {_MAKE}")

    def _none(self) -> str:
        names = ", ".join(table.name for table in self.tables[:2])
        return f"this database has no messaging tables ({names}, …)"

    def ddl(self) -> str:
        """The statements that make the tables, for those who may not let a program do it."""
        meta = self.tables.meta
        name = meta.name if meta.schema is None else f"{meta.schema}.{meta.name}"
        told = (("version", VERSION), ("identity", uuid.uuid4().hex), ("parts", self.parts))
        rows = [
            f"INSERT INTO {name} (name, value) SELECT '{what}', '{value}'"
            f" WHERE NOT EXISTS (SELECT 1 FROM {name} AS known WHERE known.name = '{what}')"
            for what, value in told
        ]
        return "\n\n".join(f"{statement};" for statement in [*ddl(self._engine.dialect, self.tables), *rows])


def _are_there(connection: Connection, tables: Tables) -> bool:
    look = inspect(connection)
    return all(look.has_table(table.name, schema=table.schema) for table in reversed(tables))
