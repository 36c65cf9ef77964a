"""From one outbox into another, on PostgreSQL, MariaDB and SQLite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import MetaData, text

from semel.messaging import Outbox, Relay
from semel.messaging.message import Message
from semel.messaging.sink import Fenced, Rejected, Sink
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.outbox import OutboxSink
from semel.messaging.tables import messaging_tables
from semel.testing.services import home as places
from semel.testing.sinks import Arrived, SinkContract, rows
from tests.messaging.conftest import Home, awaited


@pytest.mark.parametrize("home", ["sqlite", "postgres"], indirect=True)
class TestOutbox(SinkContract):
    there: Home
    too_large = 2_000_000

    @pytest.fixture(autouse=True)
    def _there(self, home: Home) -> None:
        self.there = home
        home.outbox().close()
        with home.engine.begin() as connection:
            connection.execute(text(f"DROP TABLE IF EXISTS {home.table}_outbox_arrivals"))

    def open(self) -> Sink:
        sep = "&" if "?" in self.there.url else "?"
        return open_sink(f"outbox+{self.there.url}{sep}table={self.there.table}")

    def unreachable(self) -> Sink:
        return open_sink(f"outbox+postgresql+psycopg://postgres@127.0.0.1:{places.free_port()}/x")

    async def arrived(self) -> Sequence[Arrived]:
        with self.there.engine.connect() as connection:
            table = messaging_tables(MetaData(), self.there.table).outbox
            found = connection.execute(table.select().order_by(text("seq"))).all()
        return [
            Arrived(
                id=row.id,
                body=bytes(row.body),
                topic=row.topic,
                key=row.key,
                tenant=row.tenant,
                type=row.type,
                schema=row.schema,
                headers=json.loads(row.headers),
            )
            for row in found
        ]

    async def lose_tail(self) -> bool:
        with self.there.engine.begin() as connection:
            for suffix in ("_outbox", "_outbox_ids", "_outbox_arrivals"):
                connection.execute(text(f"DELETE FROM {self.there.table}{suffix}"))
        return True


@pytest.mark.parametrize("home", ["mariadb"], indirect=True)
@awaited
async def test_mariadb_keeps_numbers_too(home: Home) -> None:
    outbox = home.outbox()
    old, new = OutboxSink(outbox), OutboxSink(outbox)
    old.bind(home.table)
    new.bind(home.table)
    assert (
        await asyncio.gather(*(old.publish(part, 1, 1, rows(3, start=3 * part)) for part in range(4)))
        == [0] * 4
    )
    assert await new.publish(0, 2, 1, rows(3)) == 1
    with pytest.raises(Fenced):
        await old.publish(0, 1, 2, rows(3, start=50))
    assert await new.publish(0, 2, 2, rows(3, start=100)) == 1
    assert home.count() == 15
    outbox.close()


@awaited
async def test_an_id_that_the_other_outbox_knows_otherwise_is_rejected_alone(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox()
    with sqlite_home.engine.begin() as connection:
        outbox.add(connection, Message("orders", {"another": "body"}, id="m-000001"))
    sink = OutboxSink(outbox)
    sent = rows(3, keys=0)
    with pytest.raises(Rejected) as caught:
        await sink.publish(0, 1, 1, sent)
    assert set(caught.value.reasons) == {"m-000001"}
    assert caught.value.final == {"m-000001"}
    assert sqlite_home.count() == 1
    assert await sink.publish(0, 1, 1, [sent[0], sent[2]]) == 0
    assert sqlite_home.count() == 3


@awaited
async def test_a_relay_carries_messages_into_another_outbox_once(sqlite_home: Home, tmp_path: Path) -> None:
    first = Outbox(f"sqlite:///{tmp_path}/first.db")
    first.create()
    second = sqlite_home.outbox()
    assert first.database.engine is not None
    with first.database.engine.begin() as connection:
        first.add(connection, *(Message("orders", {"n": n}, key=f"k{n % 5}") for n in range(50)))
    async with Relay(first, {"orders": OutboxSink(second)}) as relay:
        report = await relay.drain()
    assert report.sent == 50
    with sqlite_home.engine.connect() as connection:
        found = connection.execute(second.database.tables.outbox.select().order_by(text("seq"))).all()
    bodies = [msgspec.json.decode(row.body)["n"] for row in found]
    assert sorted(bodies) == list(range(50))
    for key in range(5):
        assert [n for n in bodies if n % 5 == key] == list(range(key, 50, 5))
    first.close()
