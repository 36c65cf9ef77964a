"""Another semel outbox: exact. Messages and the number of their batch are written in one transaction of its database, or in
one script if it is in Redis.

`Relay(outbox, {"orders": OutboxSink(Outbox("postgresql+psycopg://…"))})`, or the URL `outbox+postgresql+psycopg://…` (with
`?table=` if it is not `semel`). A message keeps its id, tenant, key, headers and body, whatever `tenant=` the other
outbox gives to what is added to it. One that the other outbox knows already is not
added again; one whose id it knows with another content is rejected.

The numbers are kept in a table beside the outbox, `semel_outbox_arrivals`, or in a key beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Self

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError

from semel.errors import ConfigurationError, InvalidKey, KeyMismatch, SemelError, StoreUnavailable
from semel.messaging.bodies import HEADER, BodyStore, inlined
from semel.messaging.database import Database
from semel.messaging.message import Message
from semel.messaging.outbox import Outbox
from semel.messaging.sink import Fenced, Guarantee, Rejected, Row, SinkUnavailable
from semel.messaging.sinks.closing import Closing
from semel.messaging.sinks.envelope import shortened
from semel.messaging.sinks.options import check_database_options
from semel.runtime import run_sync

__all__ = ["OutboxSink"]

_PREFIX: Final = "outbox+"


class OutboxSink(Closing):
    """Adds to `outbox`, an `Outbox` of another database (or of other tables in the same one), which is not closed here."""

    guarantee: Guarantee = "exact"

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._arrivals = outbox.arrivals()
        if self._arrivals is not None and self._arrivals.is_divided:
            self.lane = self._arrivals.lane
        self._owned = False
        self._source = "semel"
        schema, _, prefix = outbox.table.rpartition(".")
        self._table = Table(
            f"{prefix}_outbox_arrivals",
            MetaData(),
            Column("source", String(120), primary_key=True),
            Column("part", Integer, primary_key=True, autoincrement=False),
            Column("epoch", BigInteger, nullable=False),
            Column("batch", BigInteger, nullable=False),
            schema=schema or None,
            mysql_engine="InnoDB",
        )
        self._bodies: BodyStore | None = None
        self._from = ""
        self._made = False
        self._making = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `outbox+postgresql+psycopg://…?table=NAME`: the URL of a database behind `outbox+`."""
        place, _, query = url.removeprefix(_PREFIX).partition("?")
        options = [pair for pair in query.split("&") if pair]
        tables = [pair.removeprefix("table=") for pair in options if pair.startswith("table=")]
        rest = "&".join(pair for pair in options if not pair.startswith("table="))
        there = f"{place}?{rest}" if rest else place
        check_database_options(there, {"table"})
        sink = cls(Outbox(there, table=tables[-1] if tables else "semel"))
        sink._owned = True
        return sink

    def bind(self, source: str) -> None:
        """Who publishes: two outboxes that write to a third have numbers of their own."""
        self._source = shortened(source, 120)
        self._from = source.partition(":")[0]

    def attach(self, bodies: BodyStore | None) -> None:
        """Where bodies are that travel as references. The other outbox gets the body, and keeps it as it likes."""
        self._bodies = bodies

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        """Add the rows under their number; the number that was there."""
        try:
            if not self._made:
                await self._look()
            try:
                return await self._add(part, epoch, batch, rows)
            except (
                Rejected
            ):  # what is in is never rejected, though a body may be over since, or a limit lowered
                found = await self._number(part, epoch, rows[0])
                if found >= batch:
                    return found
                raise
        except (StoreUnavailable, DBAPIError) as error:
            reason = str(error).splitlines()[0]
            raise SinkUnavailable(
                f"the outbox in {self._outbox.home.where} did not take the batch: {reason}"
            ) from error

    async def _add(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int:
        if any(HEADER in row.headers for row in rows):
            rows = await asyncio.to_thread(self._inlined, rows)
        try:
            if self._arrivals is not None:
                return await self._arrivals.publish(
                    self._source, part, epoch, batch, _messages(self._outbox, rows)
                )
            return await self._database.run(self._write, part, epoch, batch, rows)
        except KeyMismatch as error:
            reasons = await self._conflicts(rows)
            if not reasons:  # whoever was in the way is gone: the next attempt will show
                raise SinkUnavailable(str(error)) from error
            raise Rejected(reasons, final=reasons.keys()) from error

    async def _number(self, part: int, epoch: int, row: Row) -> int:
        """The last batch that is in."""
        if self._arrivals is not None:
            return await self._arrivals.number(self._source, part, row)
        return await self._database.run(self._own, part, epoch)

    def _inlined(self, rows: Sequence[Row]) -> list[Row]:
        found, reasons = [], {}
        for row in rows:
            try:
                found.append(inlined(self._bodies, row))
            except StoreUnavailable as error:
                raise SinkUnavailable(str(error)) from error
            except SemelError as error:  # missing, damaged, or no store was given
                reasons[row.id] = str(error)
        if reasons:
            raise Rejected(reasons)
        return found

    @property
    def _database(self) -> Database:
        return self._outbox.database

    async def _look(self) -> None:
        """Before the first batch: an outbox that is relayed into itself knows every id, would add nothing, and be emptied."""
        if self._arrivals is None:
            await self._make()
        else:
            await self._outbox.home.ledger("relay").read(lambda page: page.alive())
        if self._from and self._outbox.home.identity.startswith(self._from):
            self._made = False
            raise ConfigurationError(
                f"the outbox in {self._outbox.home.where} would be relayed into itself: give the route another outbox, or another "
                "table"
            )
        self._made = True

    async def _make(self) -> None:
        """The table of numbers, on a transaction of its own."""
        database, loop = self._database, asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._making = loop, asyncio.Lock()
        async with self._making:
            if self._made:
                return
            try:
                await database.run(self._table.create, checkfirst=True)
            except DBAPIError:  # another process was first, or it cannot be made: then this fails too
                await database.read(lambda connection: connection.execute(select(self._table).limit(1)).all())
            self._made = True

    def _write(self, connection: Connection, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int:
        found = self._own(connection, part, epoch)
        if found == batch - 1:
            messages = _messages(self._outbox, rows)
            run_sync(self._outbox.arrive(connection, messages))
            connection.execute(update(self._table).where(*self._place(part)).values(batch=batch))
        return found

    def _own(self, connection: Connection, part: int, epoch: int) -> int:
        """Lock the part's row; its number. Raises Fenced if a later owner was here, and notes that this one is."""
        table = self._table
        statement = select(table.c.epoch, table.c.batch).where(*self._place(part)).with_for_update()
        known = connection.execute(statement).first()
        if known is None:
            try:
                with connection.begin_nested():
                    connection.execute(
                        insert(table).values(source=self._source, part=part, epoch=epoch, batch=0)
                    )
                return 0
            except IntegrityError:  # another relay was first
                known = connection.execute(statement).one()
        if known.epoch > epoch:
            raise Fenced(f"part {part} has epoch {known.epoch} at the other outbox, this relay {epoch}")
        if known.epoch < epoch:
            connection.execute(update(table).where(*self._place(part)).values(epoch=epoch))
        return int(known.batch)

    def _place(self, part: int) -> tuple[Any, Any]:
        return self._table.c.source == self._source, self._table.c.part == part

    async def _conflicts(self, rows: Sequence[Row]) -> dict[str, str]:
        """Which of the rows the other outbox will not have: each is tried alone, and taken back."""
        reasons: dict[str, str] = {}
        for row in rows:
            try:
                await self._database.run(self._attempt, row)
            except KeyMismatch as error:
                reasons[row.id] = str(error)
            except _TakenBack:
                continue
        return reasons

    def _attempt(self, connection: Connection, row: Row) -> None:
        run_sync(self._outbox.arrive(connection, _messages(self._outbox, [row])))
        raise _TakenBack

    async def aclose(self) -> None:
        """Close the outbox if it was opened here, by URL."""
        if self._owned:
            self._outbox.close()


class _TakenBack(Exception):  # ends a transaction that only looked
    pass


def _messages(outbox: Outbox, rows: Sequence[Row]) -> list[Message]:
    """Rows as messages again, their bodies byte by byte. Raises Rejected for what the other outbox has no room for."""
    messages: list[Message] = []
    reasons: dict[str, str] = {}
    for row in rows:
        if len(row.body) > outbox.max_body:
            reasons[row.id] = (
                f"{len(row.body)} bytes are more than max_body={outbox.max_body} of the other outbox"
            )
            continue
        try:
            messages.append(
                Message(
                    topic=row.topic,
                    body=row.body if row.raw else msgspec.Raw(row.body),
                    key=row.key,
                    id=row.id,
                    type=row.type,
                    schema=row.schema,
                    headers=row.headers,
                    tenant=row.tenant,
                )
            )
        except (ConfigurationError, InvalidKey) as error:
            reasons[row.id] = str(error)
    if reasons:
        raise Rejected(reasons, final=reasons.keys())
    return messages
