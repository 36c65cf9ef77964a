"""Kafka on librdkafka's mock cluster: the code runs, numbers are kept, an overtaken relay is fenced. It is no proof: the mock
has no real transactions, so that Kafka stays out of the guarantee table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from semel.messaging.sink import Fenced, Rejected, SinkUnavailable
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.kafka import KafkaSink
from semel.testing.services import home
from semel.testing.sinks import Arrived, rows
from tests.messaging.conftest import awaited

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    host = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "ignored", "log_level": 0})
    (broker,) = host.list_topics(timeout=10).brokers.values()
    host.list_topics("semel.frontier", timeout=10)  # the mock makes a topic that is asked for
    yield f"{broker.host}:{broker.port}"
    host.flush(1)


def read(cluster: str, topic: str, count: int) -> list[Arrived]:
    consumer = Consumer({"bootstrap.servers": cluster, "group.id": "reader"})
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    found: list[Arrived] = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        for message in consumer.consume(500, 0.2):
            if message.error() is None:
                pairs: Any = message.headers() or ()
                headers = {name: value.decode() for name, value in pairs}
                key: Any = message.key() or b""
                body = message.value() or b""
                found.append(Arrived(id=headers["semel-id"], body=body, key=key.decode(), headers=headers))
    consumer.close()
    return found


@awaited
async def test_batches_arrive_once_in_order_of_keys_and_the_overtaken_is_fenced(cluster: str) -> None:
    url = f"kafka://{cluster}?topic=orders&create=no"
    async with KafkaSink.from_url(url) as old, KafkaSink.from_url(url) as new:
        assert await old.publish(0, 1, 1, rows(30)) == 0
        assert await old.publish(0, 1, 1, rows(30)) == 1
        assert await new.publish(0, 2, 1, rows(30)) == 1
        assert await new.publish(0, 2, 4, rows(30, start=90)) == 1
        assert await new.publish(0, 2, 2, rows(30, start=30)) == 1
        async with KafkaSink.from_url(url) as late:
            with pytest.raises(Fenced):
                await late.publish(0, 1, 3, rows(30, start=60))
    found = read(cluster, "orders", 60)
    assert sorted(message.id for message in found) == [row.id for row in rows(60)]
    for key in ("k-0", "k-1", "k-2"):
        ids = [message.id for message in found if message.key == key]
        assert ids == sorted(ids)


@awaited
async def test_a_large_message_is_rejected_each_time_and_the_rest_of_its_batch_goes_once(
    cluster: str,
) -> None:
    batch = [*rows(1, keys=0), *rows(1, start=1, keys=1, body=b"x" * 1_100_000), *rows(1, start=2, keys=1)]
    async with KafkaSink(f"kafka://{cluster}", "large", create=False) as sink:
        for _ in range(2):
            with pytest.raises(Rejected) as caught:
                await sink.publish(0, 1, 1, batch)
            assert set(caught.value.reasons) == {"m-000001"}
            assert caught.value.delivered == {"m-000000"}
        assert await sink.publish(0, 1, 2, rows(1, start=3)) == 1
    assert sorted(message.id for message in read(cluster, "large", 2)) == ["m-000000", "m-000003"]


@pytest.mark.parametrize(("part", "size", "header"), [(1, 999_990, 0), (2, 960_000, 60_000)])
@awaited
async def test_what_is_around_a_message_counts(cluster: str, part: int, size: int, header: int) -> None:
    """MW12: librdkafka refuses it when it is written; as an outage of the sink it would stop all others for ever."""
    large = msgspec.structs.replace(rows(1, size=size)[0], headers={"h": "x" * header})
    async with KafkaSink(f"kafka://{cluster}", "nearly", create=False) as sink:
        with pytest.raises(Rejected) as caught:
            await sink.publish(part, 1, 1, [large, *rows(1, start=1, size=900_000)])
        assert set(caught.value.reasons) == caught.value.final == {"m-000000"}
        assert caught.value.delivered == {"m-000001"}


@awaited
async def test_a_cluster_that_is_not_there_is_unavailable() -> None:
    sink = KafkaSink(f"kafka://127.0.0.1:{home.free_port()}", "x", timeout=1, settings={"log_level": 0})
    async with sink:
        with pytest.raises(SinkUnavailable):
            await sink.publish(0, 1, 1, rows(1))


def test_kafka_claims_no_more_than_was_shown() -> None:
    assert open_sink("kafka://127.0.0.1:1?topic=x").guarantee == "at-least-once"
