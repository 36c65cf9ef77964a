"""The sink contract on real brokers: RabbitMQ streams and queues, NATS JetStream, Redis streams."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from typing import Any

import aio_pika
import nats
import pytest
import redis

from semel.messaging.sink import Sink
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.envelope import from_line
from semel.testing import services
from semel.testing.services import home
from semel.testing.sinks import Arrived, SinkContract

FIELDS = ("topic", "key", "tenant", "type", "schema")


def arrived(name_of_it: str | None, body: bytes, headers: dict[str, str]) -> Arrived:
    assert name_of_it is not None
    named: dict[str, Any] = {name: headers.get(f"semel-{name}") for name in FIELDS}
    return Arrived(id=name_of_it, body=body, headers=headers, **named)


class TestRabbitStreams(SinkContract):
    too_large = 1 << 20
    server: services.RabbitServer

    @pytest.fixture(autouse=True)
    def _server(self, rabbitmq_server: services.RabbitServer) -> None:
        self.server = rabbitmq_server

    def open(self) -> Sink:
        return open_sink(f"{self.server.stream_url}?stream={self.place}")

    def unreachable(self) -> Sink:
        return open_sink(f"rabbitmq+stream://127.0.0.1:{home.free_port()}/?stream=x")

    async def arrived(self) -> Sequence[Arrived]:
        # AMQP has no end of a stream: messages are read until one comes that is sent now, behind them all.
        found: list[Arrived] = []
        done = asyncio.Event()
        end = f"the end {secrets.token_hex(4)}"

        async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            await message.ack()
            if message.message_id == end:
                done.set()
            if done.is_set() or (message.message_id or "").startswith("the end"):
                return
            headers = {name: str(value) for name, value in message.headers.items()}
            found.append(arrived(message.message_id, message.body, headers))

        async with await aio_pika.connect(self.server.url) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=1000)
            await channel.default_exchange.publish(aio_pika.Message(b"", message_id=end), self.place)
            queue = await channel.get_queue(self.place, ensure=False)
            tag = await queue.consume(take, arguments={"x-stream-offset": "first"})
            async with asyncio.timeout(30):
                await done.wait()
            await queue.cancel(tag)
        return found

    async def lose_tail(self) -> bool:
        async with await aio_pika.connect(self.server.url) as connection:
            channel = await connection.channel()
            await channel.queue_delete(self.place)
        return True


class TestRabbitQueues(SinkContract):
    server: services.RabbitServer
    ordered = False

    @pytest.fixture(autouse=True)
    def _server(self, rabbitmq_server: services.RabbitServer) -> None:
        self.server = rabbitmq_server

    async def prepare(self) -> None:
        async with await aio_pika.connect(self.server.url) as connection:
            channel = await connection.channel()
            await channel.declare_queue(self.place, durable=True)

    def open(self) -> Sink:
        return open_sink(f"{self.server.url}?routing_key={self.place}")

    def unreachable(self) -> Sink:
        return open_sink(f"amqp://127.0.0.1:{home.free_port()}/?routing_key=x")

    async def arrived(self) -> Sequence[Arrived]:
        found: list[Arrived] = []
        async with await aio_pika.connect(self.server.url) as connection:
            channel = await connection.channel()
            queue = await channel.get_queue(self.place)
            while (message := await queue.get(no_ack=True, fail=False)) is not None:
                headers = {name: str(value) for name, value in message.headers.items()}
                found.append(arrived(message.message_id, message.body, headers))
        return found


class TestNats(SinkContract):
    server: services.NatsServer
    too_large = 1 << 20

    @pytest.fixture(autouse=True)
    def _server(self, nats_server: services.NatsServer) -> None:
        self.server = nats_server

    def open(self) -> Sink:
        return open_sink(f"{self.server.url}?stream={self.place}&subject={self.place}.{{topic}}")

    def unreachable(self) -> Sink:
        return open_sink(f"nats://127.0.0.1:{home.free_port()}?stream=x")

    async def arrived(self) -> Sequence[Arrived]:
        found: list[Arrived] = []
        client = await nats.connect(self.server.url)
        js = client.jetstream()
        subjects = (await js.stream_info(self.place, subjects_filter=f"{self.place}.>")).state.subjects or {}
        subscription = await js.subscribe(f"{self.place}.>", ordered_consumer=True)
        while len(found) < sum(subjects.values()):
            message = await subscription.next_msg(timeout=30)
            headers = {name: from_line(value) for name, value in (message.headers or {}).items()}
            found.append(arrived((message.headers or {})["semel-id"], message.data, headers))
        await client.close()
        return found

    async def lose_tail(self) -> bool:
        client = await nats.connect(self.server.url)
        await client.jetstream().purge_stream(self.place)
        await client.close()
        return True


class TestRedisStreams(SinkContract):
    server: services.RedisServer

    @pytest.fixture(autouse=True)
    def _server(self, redis_server: services.RedisServer) -> None:
        self.server = redis_server

    def open(self) -> Sink:
        return open_sink(f"{self.server.url}?stream={self.place}")

    def unreachable(self) -> Sink:
        return open_sink(f"redis://127.0.0.1:{home.free_port()}/0?stream=x")

    async def arrived(self) -> Sequence[Arrived]:
        found: list[Arrived] = []
        with redis.Redis.from_url(self.server.url) as client:
            entries: Any = client.xrange(self.place)
        for _, entry in entries:
            fields = {name.decode(): value for name, value in entry.items()}
            named: dict[str, Any] = {
                name: fields[name].decode() if name in fields else None for name in FIELDS
            }
            found.append(
                Arrived(
                    id=fields["id"].decode(),
                    body=fields["data"],
                    headers=json.loads(fields["headers"]),
                    **named,
                )
            )
        return found

    async def lose_tail(self) -> bool:
        with redis.Redis.from_url(self.server.url) as client:
            for key in client.scan_iter(f"*{self.place}*"):
                client.delete(key)
        return True
