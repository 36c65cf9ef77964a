"""Consumers on RabbitMQ and NATS JetStream: handled once, acknowledged after the commit, handed out again after a death."""

from __future__ import annotations

import asyncio
import secrets
import threading
from contextlib import suppress
from typing import Any

import aio_pika
import pytest
from nats.aio.client import Client
from sqlalchemy import text
from sqlalchemy.orm import Session

from semel import StoreUnavailable
from semel.messaging import Inbox, Message, Relay
from semel.messaging.consumer import Consumer
from semel.messaging.sources import Delivery, Source, open_source
from semel.testing import services
from tests.messaging.conftest import Home, awaited


@pytest.fixture(params=["rabbitmq", "nats"])
def broker(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The URL of a sink, and of the source behind it."""
    name = f"q{secrets.token_hex(4)}"
    if request.param == "rabbitmq":
        server: services.RabbitServer = request.getfixturevalue("rabbitmq_server")
        return f"{server.url}?routing_key={name}", f"{server.url}?queue={name}"
    nats: services.NatsServer = request.getfixturevalue("nats_server")
    return f"{nats.url}?stream={name}&subject={name}.{{topic}}", f"{nats.url}?stream={name}&idle=0.5"


def _prepare(home: Home) -> None:
    home.outbox().close()
    with home.engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id varchar(60), n int)"))


async def _send(home: Home, sink: str, messages: list[Message]) -> None:
    outbox = home.outbox()
    with Session(home.engine) as session, session.begin():
        outbox.add(session, *messages)
    async with Relay(outbox, {"*": sink}) as relay:
        report = await relay.drain()
    assert report.pending == {}, report
    outbox.close()


def _handle(session: Session, message: Message) -> None:
    session.execute(text("INSERT INTO effects VALUES (:id, :n)"), {"id": message.id, "n": message.body["n"]})


@awaited
async def test_from_outbox_to_handler(sqlite_home: Home, broker: tuple[str, str]) -> None:
    sink, source = broker
    _prepare(sqlite_home)
    inbox = Inbox(sqlite_home.url, consumer="shipping", table=sqlite_home.table)
    inbox.handler("orders")(_handle)
    first = inbox.consuming(source)
    await first.source.receive(1) if "amqp" in source else None  # the queue is made by who reads it
    messages = [
        Message("orders", {"n": n}, key=f"k{n % 2}", id=f"m{n}", headers={"x": "ü"}, tenant="acme")
        for n in range(10)
    ]
    await _send(sqlite_home, sink, messages)
    got = list(await _some(first))
    assert got[0].message.tenant == "acme"
    assert got[0].message.headers["x"] == "ü"
    assert await first._handle(got[0].message) is True  # committed, not acknowledged: then it dies
    await first.source.aclose()
    consumer = inbox.consuming(source)
    task = asyncio.create_task(consumer.run())
    async with asyncio.timeout(30):
        while consumer.counts.handled + consumer.counts.duplicates < 10:
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await consumer.source.aclose()
    with sqlite_home.engine.connect() as connection:
        found = sorted(connection.execute(text("SELECT n FROM effects")).scalars())
    assert found == list(range(10))
    assert consumer.counts.duplicates >= 1
    last = inbox.consuming(source)
    assert list(await last.source.receive(10)) == [], "something was not acknowledged"
    await last.source.aclose()
    inbox.close()


@awaited
async def test_what_was_fetched_goes_back_when_a_consumer_is_closed(
    sqlite_home: Home, broker: tuple[str, str]
) -> None:
    """R49: `async with`; the next one does not wait for what the first had and did not begin."""
    sink, source = broker
    _prepare(sqlite_home)
    inbox = Inbox(sqlite_home.url, consumer="shipping", table=sqlite_home.table)
    started, goes_on = threading.Event(), threading.Event()

    @inbox.handler("orders")
    def slow(session: Session, message: Message) -> None:
        started.set()
        goes_on.wait(30)
        _handle(session, message)

    async with inbox.consuming(source, concurrency=1) as first:
        await first.source.receive(1) if "amqp" in source else None  # the queue is made by who reads it
        await _send(sqlite_home, sink, [Message("orders", {"n": n}, id=f"m{n}") for n in range(10)])
        task = asyncio.create_task(first.run())
        await asyncio.to_thread(started.wait, 30)
        task.cancel()
        goes_on.set()
        await asyncio.gather(task, return_exceptions=True)
    async with inbox.consuming(source) as second:
        task = asyncio.create_task(second.run())
        async with asyncio.timeout(30):
            while sqlite_home.scalar("SELECT count(*) FROM effects") != 10:
                await asyncio.sleep(0.02)
    await asyncio.wait_for(task, 5)  # ended by the close
    inbox.close()


async def _some(consumer: Consumer) -> list[Any]:
    async with asyncio.timeout(30):
        while True:
            found = list(await consumer.source.receive(5))
            if found:
                return found


async def _next(source: Source) -> Delivery:
    async with asyncio.timeout(30):
        while True:
            with suppress(StoreUnavailable):
                if found := await source.receive(1):
                    return found[0]


@pytest.mark.parametrize("ends", ["the channel", "the queue"])
@awaited
async def test_a_consumption_that_rabbitmq_ends_begins_anew(
    rabbitmq_server: services.RabbitServer, ends: str
) -> None:
    """The connection stands: nobody would notice that nothing comes any more."""
    name = f"q{secrets.token_hex(4)}"
    other = await aio_pika.connect(rabbitmq_server.url)
    channel = await other.channel()

    async def put(identity: str) -> None:
        await channel.declare_queue(name, durable=True)
        sent = aio_pika.Message(b"{}", message_id=identity)
        await channel.default_exchange.publish(sent, routing_key=name)

    source = open_source(f"{rabbitmq_server.url}?queue={name}", group="c")
    await put("m1")
    first: Any = await _next(source)
    if ends == "the channel":
        await first._raw.channel.basic_ack(99)  # no such delivery: closed, as after consumer_timeout
    else:
        await first.ack()
        await channel.queue_delete(name)
    await asyncio.sleep(0.2)
    await put("m2")
    names = {(await _next(source)).message.id for _ in range(2 if ends == "the channel" else 1)}
    assert names == ({"m1", "m2"} if ends == "the channel" else {"m2"})
    await source.aclose()
    await other.close()


@pytest.mark.parametrize("ends", ["the consumer", "the stream"])
@awaited
async def test_a_durable_consumer_that_is_deleted_is_made_anew(
    nats_server: services.NatsServer, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NATS tells nobody who fetches: nothing would come any more."""
    monkeypatch.setattr("semel.messaging.sources.nats._LOOK", 0.0)
    name = f"q{secrets.token_hex(4)}"
    client = Client()
    await client.connect(nats_server.url)
    stream = client.jetstream()
    await stream.add_stream(name=name, subjects=[f"{name}.>"])
    source = open_source(f"{nats_server.url}?stream={name}", group="c")
    await stream.publish(f"{name}.t", b"{}", headers={"Nats-Msg-Id": "m1"})
    await (await _next(source)).ack()
    if ends == "the consumer":
        await stream.delete_consumer(name, "c")
    else:
        await stream.delete_stream(name)
        await stream.add_stream(name=name, subjects=[f"{name}.>"])
    await stream.publish(f"{name}.t", b"{}", headers={"Nats-Msg-Id": "m2"})
    found = [(await _next(source)).message.id for _ in range(2 if ends == "the consumer" else 1)]
    assert found[-1] == "m2"
    await source.aclose()
    await client.close()
