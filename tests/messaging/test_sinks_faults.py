"""What is particular to each broker: killed servers, wrong credentials, places that are not there, several streams."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import aio_pika
import msgspec
import nats
import pytest
from aio_pika import Exchange
from nats.aio.client import Client as NatsClient
from rstream.client import Client
from sqlalchemy.orm import Session

from semel import ConfigurationError
from semel.messaging import Message, Relay
from semel.messaging.sink import Fenced, Rejected, Row, Sink, SinkUnavailable
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.nats import NatsSink
from semel.messaging.sinks.rabbit_queues import RabbitQueueSink
from semel.messaging.sinks.rabbit_streams import RabbitStreamSink, _Link
from semel.testing import services
from semel.testing.sinks import Arrived, rows
from tests.messaging.conftest import Home, awaited
from tests.messaging.test_sinks_brokers import TestNats as NatsSuite
from tests.messaging.test_sinks_brokers import TestRabbitStreams as StreamSuite


async def streamed(server: services.RabbitServer, place: str) -> Sequence[Arrived]:
    suite = StreamSuite()
    suite.server, suite.__dict__["_place"] = server, place
    return await suite.arrived()


async def jetstreamed(server: services.NatsServer, place: str) -> Sequence[Arrived]:
    suite = NatsSuite()
    suite.server, suite.__dict__["_place"] = server, place
    return await suite.arrived()


async def insist(sink: Sink, batch: int, some: Sequence[Row], *, epoch: int = 1) -> None:
    """What a relay does: send the same batch until the sink has it."""
    async with asyncio.timeout(90):
        while True:
            with contextlib.suppress(SinkUnavailable):
                found = await sink.publish(0, epoch, batch, some)
                assert found in {None, batch - 1, batch}  # queues know no numbers
                return
            await asyncio.sleep(0.05)


# -- servers that are killed ----------------------------------------------------------------------------------------------
async def killed_in_the_middle(
    sink: Sink, server: services.Server, read: Callable[[], Any], *, batches: int, kills: Sequence[int]
) -> None:
    """Publish batch after batch while the server dies; nothing is lost, doubled or out of order."""
    sent: list[Row] = []
    for batch in range(1, batches + 1):
        some = rows(200, start=200 * batch, size=200)
        if batch in kills:
            publishing = asyncio.create_task(insist(sink, batch, some))
            await asyncio.sleep(0)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.restart)
            await publishing
        else:
            await insist(sink, batch, some)
        sent += some
    assert [message.id for message in await read()] == [row.id for row in sent]


@awaited
async def test_a_killed_nats_loses_and_doubles_nothing() -> None:
    with services.nats() as server:
        async with NatsSink(server.url, "orders", "orders.{topic}") as sink:
            await killed_in_the_middle(
                sink, server, lambda: jetstreamed(server, "orders"), batches=12, kills=(3, 6, 9)
            )


@pytest.mark.slow
@awaited
async def test_a_killed_rabbitmq_stream_loses_and_doubles_nothing() -> None:
    with services.rabbitmq() as server:
        async with RabbitStreamSink(server.stream_url, "orders") as sink:
            await killed_in_the_middle(
                sink, server, lambda: streamed(server, "orders"), batches=6, kills=(3,)
            )


@awaited
async def test_a_paused_server_is_unavailable_and_a_zombie_of_before_is_fenced() -> None:
    with services.nats() as server:
        async with (
            NatsSink(server.url, "orders", "orders.{topic}", timeout=0.3) as old,
            NatsSink(server.url, "orders", "orders.{topic}") as new,
        ):
            await insist(old, 1, rows(5))
            with server.paused(), pytest.raises(SinkUnavailable):
                await old.publish(0, 1, 2, rows(5, start=5))
            await insist(new, 2, rows(5, start=5), epoch=2)
            with pytest.raises(Fenced):
                await insist(old, 2, rows(5, start=5))
            assert [message.id for message in await jetstreamed(server, "orders")] == [
                row.id for row in rows(10)
            ]


@pytest.mark.parametrize("way", ["nats", "queues", "streams"])
@awaited
async def test_a_broker_that_stops_in_the_middle_of_a_batch_holds_nobody(
    way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is more than the buffers of both sides take: neither the call nor the closing waits until the broker goes on."""
    place, many = f"stops{secrets.token_hex(4)}", rows(200, keys=0, size=100_000)
    server: Any = request.getfixturevalue("nats_server" if way == "nats" else "rabbitmq_server")
    sink: Any
    owner: Any
    if way == "nats":
        sink, owner, name = NatsSink(server.url, place, f"{place}.{{topic}}", timeout=1), NatsSink, "_send"
    elif way == "streams":
        sink, owner, name = RabbitStreamSink(server.stream_url, place, timeout=1), _Link, "write"
    else:
        await declare(server, place)
        sink, owner, name = RabbitQueueSink(server.url, routing_key=place, timeout=1), Exchange, "publish"
    await insist(sink, 1, rows(1, keys=0))
    go_on = getattr(owner, name)
    with contextlib.ExitStack() as pause:

        async def stop(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(owner, name, go_on)
            pause.enter_context(server.paused())
            return await go_on(*args, **kwargs)

        monkeypatch.setattr(owner, name, stop)
        async with asyncio.timeout(30):
            with pytest.raises(SinkUnavailable):
                await sink.publish(0, 1, 2, many)
            await sink.aclose()


# -- a batch that was cut ---------------------------------------------------------------------------------------------------
@awaited
async def test_a_stream_batch_of_several_frames_that_was_cut_is_completed(
    rabbitmq_server: services.RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, many = f"cut-{secrets.token_hex(4)}", rows(60, keys=0, size=100_000)
    frames = 0
    send = Client.send_frame

    async def cut(self: Client, frame: Any, version: int = 1) -> None:
        nonlocal frames
        if type(frame).__name__ == "PublishSubBatching":
            frames += 1
            if frames == 4:
                async with asyncio.timeout(30):
                    while not await streamed(rabbitmq_server, place):  # else the cut is before the batch
                        await asyncio.sleep(0.05)
                raise ConnectionResetError("cut in the middle of a batch")
        await send(self, frame, version)

    async with RabbitStreamSink(rabbitmq_server.stream_url, place) as sink:
        with monkeypatch.context() as patch:
            patch.setattr(Client, "send_frame", cut)
            with pytest.raises(SinkUnavailable):
                await sink.publish(0, 1, 1, many)
        assert 0 < len(await streamed(rabbitmq_server, place)) < len(many)
        assert await sink.publish(0, 1, 1, many) == 0
        assert await sink.publish(0, 1, 1, many) == 1
    found = [message.id for message in await streamed(rabbitmq_server, place)]
    assert found == [row.id for row in many]


@awaited
async def test_a_jetstream_batch_that_was_cut_is_completed_within_the_window(
    nats_server: services.NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, many = f"cut{secrets.token_hex(4)}", rows(100, keys=0)
    sent = 0
    publish = NatsClient.publish

    async def cut(self: Any, subject: str, *args: Any, **kwargs: Any) -> None:
        nonlocal sent
        if subject.startswith(place):
            sent += 1
            if sent == 40:
                # No `flush`: its PING overtakes what waits to be written, and a connection that is closed loses that.
                while len(await jetstreamed(nats_server, place)) < 39:
                    await asyncio.sleep(0.01)
                raise ConnectionResetError("cut in the middle of a batch")
        await publish(self, subject, *args, **kwargs)

    async with NatsSink(nats_server.url, place, f"{place}.{{topic}}", timeout=60) as sink:
        with monkeypatch.context() as patch:
            patch.setattr(NatsClient, "publish", cut)
            with pytest.raises(SinkUnavailable, match="cut in the middle of a batch"):
                await sink.publish(0, 1, 1, many)
        assert len(await jetstreamed(nats_server, place)) == 39
        assert await sink.publish(0, 1, 1, many) == 0
    assert [message.id for message in await jetstreamed(nats_server, place)] == [row.id for row in many]


# -- queues ---------------------------------------------------------------------------------------------------------------
@pytest.fixture
def queue_name() -> str:
    return f"q-{secrets.token_hex(4)}"


async def declare(server: services.RabbitServer, name: str, arguments: dict[str, Any] | None = None) -> None:
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True, arguments=arguments)


@awaited
async def test_a_message_that_no_queue_takes_is_rejected_and_others_go(
    rabbitmq_server: services.RabbitServer, queue_name: str
) -> None:
    await declare(rabbitmq_server, f"{queue_name}.orders")
    there, nowhere = rows(2, keys=0), rows(1, start=2, keys=0, topic="unknown")
    async with RabbitQueueSink(rabbitmq_server.url, routing_key=f"{queue_name}.{{topic}}") as sink:
        with pytest.raises(Rejected) as caught:
            await sink.publish(0, 1, 1, [*there, *nowhere])
    assert set(caught.value.reasons) == {nowhere[0].id}
    assert "unroutable" in caught.value.reasons[nowhere[0].id]
    assert caught.value.delivered == {row.id for row in there}


@awaited
async def test_a_full_queue_rejects_and_nothing_of_a_key_passes_what_was_refused(
    rabbitmq_server: services.RabbitServer, queue_name: str
) -> None:
    await declare(rabbitmq_server, queue_name, {"x-max-length": 2, "x-overflow": "reject-publish"})
    async with RabbitQueueSink(rabbitmq_server.url, routing_key=queue_name) as sink:
        with pytest.raises(Rejected) as caught:
            await sink.publish(0, 1, 1, rows(6, keys=1))
    assert caught.value.delivered == {"m-000000", "m-000001"}
    assert set(caught.value.reasons) == {"m-000002"}
    assert copy.copy(caught.value).later == {"m-000002"}


@awaited
async def test_a_full_queue_uses_no_attempts_up(
    rabbitmq_server: services.RabbitServer, queue_name: str, sqlite_home: Home
) -> None:
    await declare(rabbitmq_server, queue_name, {"x-max-length": 1, "x-overflow": "reject-publish"})
    outbox = sqlite_home.outbox(parts=1)
    with Session(sqlite_home.engine) as session, session.begin():
        outbox.add(session, *(Message("t", n, id=f"m{n}", key="k") for n in range(3)))
    sink = RabbitQueueSink(rabbitmq_server.url, routing_key=queue_name)
    got: list[str | None] = []
    async with sink, await aio_pika.connect(rabbitmq_server.url) as connection:
        relay = Relay(outbox, {"t": sink}, max_attempts=2, backoff=(0.05, 0.05))
        queue = await (await connection.channel()).get_queue(queue_name)
        for _ in range(4):
            await relay.drain()
            await asyncio.sleep(0.06)
        (line,) = await relay.backing_off()
        assert (line.id, line.attempts, await relay.parked()) == ("m1", 0, [])
        assert "full queue" in line.reason
        async with asyncio.timeout(30):
            while len(got) < 3:
                if (message := await queue.get(fail=False)) is not None:
                    await message.ack()
                    got.append(message.message_id)
                await relay.drain()
                await asyncio.sleep(0.06)
    assert got == ["m0", "m1", "m2"]
    outbox.close()


# -- what is set up wrongly -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "broker, query",
    [("amqp", "?routing_key=x"), ("stream", "?stream=x"), ("nats", "?stream=x")],
)
@awaited
async def test_wrong_credentials_name_the_cause_and_not_the_password(
    broker: str, query: str, rabbitmq_server: services.RabbitServer
) -> None:
    with services.nats(password="right") as server:
        url = {"amqp": rabbitmq_server.url, "stream": rabbitmq_server.stream_url, "nats": server.url}[broker]
        scheme, _, rest = url.partition("://")
        sink: Any = open_sink(f"{scheme}://somebody:hunter2@{rest.partition('@')[2]}{query}")
        async with sink:
            with pytest.raises(ConfigurationError, match="somebody") as caught:
                await sink.publish(0, 1, 1, rows(1))
    assert "hunter2" not in str(caught.value)
    assert "password" in str(caught.value)


@pytest.mark.parametrize(
    "url, text",
    [
        ("ftp://host/x", "no sink answers to the URL scheme 'ftp'"),
        ("nats://host", r"needs \?stream=NAME"),
        ("nats://host?stream=a.b", "without dots"),
        ("nats://host?stream=a&queue=b", "no option 'queue'"),
        ("rabbitmq+stream://u:hunter2@host?steam=a", "no option 'steam'"),
        ("amqp://host?timeout=-1", "a number above 0"),
        ("amqp://host:port/", "port"),
        ("kafka://host?create=maybe", "yes or no"),
        ("https://", "with a host"),
        ("https://host/x?secret_env=NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        open_sink(url)
    assert "hunter2" not in str(caught.value)


@awaited
async def test_places_that_are_not_there_and_may_not_be_made(
    rabbitmq_server: services.RabbitServer, nats_server: services.NatsServer
) -> None:
    urls = {
        f"{rabbitmq_server.stream_url}?stream=nowhere&create=no": "has no stream 'nowhere'",
        f"{rabbitmq_server.url}?exchange=nowhere": "has no exchange 'nowhere'",
        f"{nats_server.url}?stream=nowhere&create=no": "has no stream 'nowhere'",
        f"{nats_server.url}?stream=nowhere&subject={{topic}}": "begin the subject with a fixed token",
    }
    for url, text in urls.items():
        sink: Any = open_sink(url)
        async with sink:
            with pytest.raises(ConfigurationError, match=text):
                await sink.publish(0, 1, 1, rows(1))


@awaited
async def test_a_jetstream_without_room_for_markers_is_refused(nats_server: services.NatsServer) -> None:
    name = f"plain{secrets.token_hex(4)}"
    client = await nats.connect(nats_server.url)
    await client.jetstream().add_stream(name=name, subjects=[f"{name}.>"])
    await client.close()
    async with NatsSink(nats_server.url, name) as sink:
        with pytest.raises(ConfigurationError, match=f"semel.frontier.{name}.>"):
            await sink.publish(0, 1, 1, rows(1))


# -- several streams ----------------------------------------------------------------------------------------------------------
@awaited
async def test_each_topic_may_have_a_stream_with_numbers_of_its_own(
    rabbitmq_server: services.RabbitServer,
) -> None:
    mark = secrets.token_hex(4)
    async with RabbitStreamSink(rabbitmq_server.stream_url, f"{mark}-{{topic}}") as sink:
        assert sink.lane(rows(1)[0]) == f"{mark}-orders"
        assert await sink.publish(0, 1, 1, rows(2)) == 0
        assert await sink.publish(0, 1, 1, rows(2, start=2, topic="bills")) == 0
    assert [message.id for message in await streamed(rabbitmq_server, f"{mark}-bills")] == [
        "m-000002",
        "m-000003",
    ]


def test_a_stream_has_room_for_255_producers() -> None:
    async def use() -> None:
        async with RabbitStreamSink("rabbitmq+stream://127.0.0.1:1/", "x") as sink:
            await sink.publish(255, 1, 1, rows(1))

    with pytest.raises(ConfigurationError, match="fewer parts"):
        asyncio.run(use())


# -- with a relay -------------------------------------------------------------------------------------------------------------
@awaited
async def test_a_relay_fills_both_brokers_once_and_a_second_one_goes_on(
    sqlite_home: Home, rabbitmq_server: services.RabbitServer, nats_server: services.NatsServer
) -> None:
    place = f"relayed{secrets.token_hex(4)}"
    routes = {
        "orders*": [
            f"{rabbitmq_server.stream_url}?stream={place}",
            f"{nats_server.url}?stream={place}&subject={place}.{{topic}}",
        ]
    }
    outbox = sqlite_home.outbox(parts=4)
    for run in range(2):
        with sqlite_home.engine.begin() as connection:
            outbox.add(
                connection,
                *(Message("orders.new", {"n": n}, key=f"k{n % 7}", id=f"{run}-{n}") for n in range(100)),
            )
        async with Relay(outbox, routes) as relay:
            await relay.drain()
    outbox.close()
    for found in (await streamed(rabbitmq_server, place), await jetstreamed(nats_server, place)):
        assert sorted(message.id for message in found) == sorted(
            f"{r}-{n}" for r in range(2) for n in range(100)
        )
        for key in range(7):
            mine = [message.id for message in found if message.key == f"k{key}"]
            assert mine == [f"{r}-{n}" for r in range(2) for n in range(100) if n % 7 == key]


@awaited
async def test_a_message_that_rabbitmq_closes_the_channel_for_stops_no_other(
    rabbitmq_server: services.RabbitServer, queue_name: str
) -> None:
    """MW12: one that is too large, or has a header that RabbitMQ reads otherwise, is to blame; not the sink."""
    await declare(rabbitmq_server, queue_name)
    some = rows(4, keys=2)
    bad = msgspec.structs.replace(rows(1, start=4, keys=0)[0], headers={"CC": "boss"})
    async with RabbitQueueSink(rabbitmq_server.url, routing_key=queue_name) as sink:
        for batch in (1, 2):
            with pytest.raises(Rejected, match="unacceptable_type_in_header") as caught:
                await sink.publish(0, 1, batch, [bad, *some])
            assert set(caught.value.reasons) == caught.value.final == {bad.id}
            assert caught.value.delivered == {row.id for row in some}
        assert await sink.publish(0, 1, 3, some) is None
    async with await aio_pika.connect(rabbitmq_server.url) as connection:
        queue = await (await connection.channel()).get_queue(queue_name)
        found: set[str | None] = set()
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            found.add(message.message_id)
    assert found == {row.id for row in some}


@pytest.mark.parametrize("header", ["Nats-Rollup: all", "Nats-Expected-Last-Sequence: 77", "nats-ttl: 1s"])
@awaited
async def test_a_header_that_is_an_order_to_nats_is_not_passed_on(
    nats_server: services.NatsServer, header: str
) -> None:
    """One erases the stream, another one stops the sink for ever."""
    name = f"orders{secrets.token_hex(4)}"
    key, _, value = header.partition(": ")
    bad = msgspec.structs.replace(rows(1, start=5)[0], headers={key: value, "x": "y"})
    async with NatsSink(nats_server.url, name) as sink:
        assert await sink.publish(0, 1, 1, rows(5)) == 0
        assert await sink.publish(0, 1, 2, [bad]) == 1
    client = await nats.connect(nats_server.url)
    stream = client.jetstream()
    assert (await stream.stream_info(name)).state.messages == 7  # and the marker
    last = await stream.get_last_msg(name, f"{name}.orders")
    assert last.headers is not None
    assert (last.headers.get("x"), last.headers.get(key)) == ("y", None)
    await client.close()
