"""From one outbox into another, on PostgreSQL, MariaDB, SQLite and Redis."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import MetaData, text

from semel.messaging import Outbox, Relay
from semel.messaging.bodies import HEADER
from semel.messaging.bodies.files import FileBodies
from semel.messaging.message import Message
from semel.messaging.sink import Fenced, Rejected, Sink
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.outbox import OutboxSink
from semel.messaging.tables import messaging_tables
from semel.testing import services
from semel.testing.services import home as places
from semel.testing.sinks import Arrived, SinkContract, rows
from tests.messaging.conftest import Home, RedisPlace, awaited, redis_place


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


class TestRedisOutbox(SinkContract):
    there: RedisPlace
    too_large = 2_000_000

    @pytest.fixture(autouse=True)
    def _there(self, redis_server: services.RedisServer) -> Iterator[None]:
        self.there = redis_place(redis_server)
        yield
        self.there.close()

    def open(self) -> Sink:
        return open_sink(f"outbox+{self.there.url}?table={self.there.table}")

    def unreachable(self) -> Sink:
        return open_sink(f"outbox+redis://127.0.0.1:{places.free_port()}/0")

    async def arrived(self) -> Sequence[Arrived]:
        return in_redis(self.there)

    async def lose_tail(self) -> bool:
        names = self.there.names("*")
        self.there.client.delete(*(name for name in names if not name.endswith(b":meta")))
        return True


def in_redis(place: RedisPlace) -> list[Arrived]:
    """What waits there, in the order of its arrival."""
    client: Any = place.client
    entries = [entry for name in place.names("messages:*") for entry in client.xrange(name)]
    found = []
    for _, fields in sorted(entries, key=lambda entry: int(entry[0].partition(b"-")[0])):
        said = {name.decode(): value for name, value in fields.items()}
        texts = {name: said[name].decode() or None for name in ("key", "type", "schema")}
        found.append(
            Arrived(
                id=said["id"].decode(),
                body=said["body"],
                topic=said["topic"].decode(),
                tenant=said["tenant"].decode(),
                headers=json.loads(said["headers"]),
                **texts,
            )
        )
    return found


@pytest.fixture
def redis_home(redis_server: services.RedisServer) -> Iterator[RedisPlace]:
    made = redis_place(redis_server)
    yield made
    made.close()


@awaited
async def test_redis_rejects_an_id_that_it_knows_otherwise_alone(redis_home: RedisPlace) -> None:
    outbox = redis_home.outbox()
    with redis_home.transaction() as pipe:
        outbox.add(pipe, Message("orders", {"another": "body"}, id="m-000001"))
    sink = OutboxSink(outbox)
    sent = rows(3, keys=0)
    with pytest.raises(Rejected) as caught:
        await sink.publish(0, 1, 1, sent)
    assert set(caught.value.reasons) == caught.value.final == {"m-000001"}
    assert redis_home.count() == 1
    assert await sink.publish(0, 1, 1, [sent[0], sent[2]]) == 0
    assert redis_home.count() == 3
    assert await sink.publish(0, 1, 2, sent[:1]) == 1, "known, and not added again"
    assert redis_home.count() == 3
    outbox.close()


@awaited
async def test_redis_repeats_its_answer_to_a_call_that_comes_twice(
    redis_home: RedisPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to Redis sends again what was not answered: that must not look like somebody else's batch."""
    outbox = redis_home.outbox()
    sink, original, answers = OutboxSink(outbox), outbox.home.call, []  # type: ignore[attr-defined]  # a home in Redis has it

    def twice(script: Any, *given: Any, **named: Any) -> Any:
        if script.name == "outbox_arrive":
            answers.append(original(script, *given, **named))
        return original(script, *given, **named)

    monkeypatch.setattr(outbox.home, "call", twice)
    assert await sink.publish(0, 1, 1, rows(3)) == 0
    assert answers == [[0, 0]]
    assert redis_home.count() == 3
    outbox.close()


@pytest.mark.parametrize("via", ["sqlite", "redis"])
@awaited
async def test_a_relay_carries_messages_into_an_outbox_in_redis_once(
    redis_home: RedisPlace, redis_server: services.RedisServer, tmp_path: Path, via: str
) -> None:
    """Large bodies are fetched, and kept again as the other outbox likes."""
    near, far = FileBodies(tmp_path / "near"), FileBodies(tmp_path / "far")
    other = redis_place(redis_server)
    first = Outbox(
        other.url if via == "redis" else f"sqlite:///{tmp_path}/first.db",
        table=other.table,
        claim_check=near,
        claim_over=300,
    )
    first.create()
    second = redis_home.outbox(claim_check=far, claim_over=200)
    messages = [
        Message("orders", {"n": n, "text": "x" * (400 if n % 10 == 0 else 1)}, key=f"k{n % 5}")
        for n in range(50)
    ]
    if via == "redis":
        with other.transaction() as pipe:
            first.add(pipe, *messages)
    else:
        with first.database.engine.begin() as connection:  # type: ignore[union-attr]  # a home in SQL has it
            first.add(connection, *messages)
    async with Relay(first, {"orders": OutboxSink(second)}, batch=7) as relay:
        assert (await relay.drain()).sent == 50
    assert await second.sweep(grace=-1) == 0
    got: list[Message] = []
    async with Relay(second, {"*": got.append}) as relay:
        await relay.drain()
    assert sorted(message.id for message in got) == sorted(message.id for message in messages)
    bodies = {message.id: message.body for message in messages}
    assert all(message.body == bodies[message.id] and HEADER not in message.headers for message in got)
    for key in range(5):
        assert [message.body["n"] for message in got if message.key == f"k{key}"] == list(range(key, 50, 5))
    assert len(list(far.stored(second.home.identity[:16]))) == 5
    other.close()
    first.close()
    second.close()


@awaited
async def test_a_body_that_is_swept_before_its_message_is_in_is_stored_again(
    redis_home: RedisPlace, tmp_path: Path
) -> None:
    files = FileBodies(tmp_path / "bodies")
    swept: list[int] = []
    other = redis_home.outbox(claim_check=files, claim_over=100)

    class Swept(FileBodies):
        def put(self, name: str, data: bytes) -> None:
            super().put(name, data)
            if not swept:
                thread = threading.Thread(target=lambda: swept.append(asyncio.run(other.sweep(grace=-1))))
                thread.start()
                thread.join()

    outbox = redis_home.outbox(claim_check=Swept(tmp_path / "bodies"), claim_over=100)
    (row,) = rows(1)
    row = msgspec.structs.replace(row, body=b'"' + b"x" * 500 + b'"', raw=False)
    assert await OutboxSink(outbox).publish(0, 1, 1, [row]) == 0
    assert swept == [1]
    got: list[Message] = []
    async with Relay(outbox, {"*": got.append}) as relay:
        await relay.drain()
    assert got[0].body == "x" * 500
    other.close()
    outbox.close()


@awaited
async def test_a_cluster_takes_a_batch_part_by_part(
    redis_cluster: services.RedisCluster, sqlite_home: Home
) -> None:
    first = sqlite_home.outbox(parts=4)
    second = Outbox(redis_cluster.url, table=f"c{secrets.token_hex(4)}", parts=4)
    second.create()
    with sqlite_home.transaction() as session:
        first.add(session, *(Message("orders", {"n": n}, key=f"k{n % 5}") for n in range(50)))
    async with Relay(first, {"orders": OutboxSink(second)}, batch=7) as relay:
        assert (await relay.drain()).sent == 50
    got: list[Message] = []
    async with Relay(second, {"*": got.append}) as relay:
        await relay.drain()
    for key in range(5):
        assert [message.body["n"] for message in got if message.key == f"k{key}"] == list(range(key, 50, 5))
    first.close()
    second.close()


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


@awaited
async def test_a_message_of_another_outbox_keeps_its_tenant(place: Home | RedisPlace) -> None:
    """An outbox that gives a tenant to what is added to it takes what arrives as it is: two tenants may have the same id."""
    outbox, sink_rows = place.outbox(tenant="acme", parts=4), rows(2, keys=1)
    theirs = msgspec.structs.replace(sink_rows[0], tenant="acme", body=b"another body")
    sink = OutboxSink(outbox)
    sink.bind(secrets.token_hex(4))
    assert await sink.publish(0, 1, 1, [sink_rows[0], theirs, sink_rows[1]]) == 0
    found = {(each.tenant, each.id) for each in await outbox.waiting()}
    assert found == {("default", "m-000000"), ("acme", "m-000000"), ("default", "m-000001")}
    outbox.close()
