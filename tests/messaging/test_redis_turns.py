"""A Redis sink has a few batches on their way at a time. To wait for one's turn is no silence of the server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from semel.messaging.sink import Row, SinkUnavailable
from semel.messaging.sinks import redis as module
from semel.messaging.sinks.redis import RedisStreamSink
from tests.messaging.conftest import awaited


def rows(number: int) -> list[Row]:
    return [Row(number, f"m{number}", "default", "orders", None, None, None, {}, b"1", 0.0)]


class Busy:
    """A sink all of whose turns are taken, with a clock of this test's own: it says when somebody last got through."""

    def __init__(self, sink: RedisStreamSink) -> None:
        self.sink = sink
        self.ago = 0.0
        self.asked = 0
        self.often = asyncio.Event()

    def clock(self) -> float:
        self.asked += 1
        if self.asked >= 3:
            self.often.set()
        return self.sink._answered + self.ago

    def free(self) -> None:
        self.sink._timeout = 30.0
        for _ in range(module._AT_ONCE_SHARED):
            self.sink._turns.release()


@asynccontextmanager
async def busy(server: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Busy]:
    client = aioredis.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0))
    sink = RedisStreamSink(client, "turns", timeout=30.0)
    await client.delete("turns", sink._frontier(0, "turns"))
    assert await sink.publish(0, 1, 1, rows(1)) == 0
    for _ in range(module._AT_ONCE_SHARED):
        await sink._turns.acquire()
    made = Busy(sink)
    sink._timeout = 0.01
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.clock))
    try:
        yield made
    finally:
        await client.aclose()


@awaited
async def test_a_batch_waits_for_its_turn_as_long_as_others_get_through(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy(redis_server, monkeypatch) as others:
        waiting = asyncio.create_task(others.sink.publish(0, 1, 2, rows(2)))
        done, _ = await asyncio.wait(
            [waiting, asyncio.create_task(others.often.wait())],
            timeout=30,
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert waiting not in done  # three timeouts long
        others.free()
        assert await asyncio.wait_for(waiting, 30) == 1


@awaited
async def test_nobody_that_gets_through_for_a_timeout_is_a_server_that_is_away(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy(redis_server, monkeypatch) as others:
        others.ago = 1.0
        with pytest.raises(SinkUnavailable, match="did not answer"):
            await asyncio.wait_for(others.sink.publish(0, 1, 2, rows(2)), 30)
        assert others.asked == 1
        others.free()
        assert await others.sink.publish(0, 1, 2, rows(2)) == 1


@pytest.mark.parametrize(
    ("connections", "most"), [(10, 4), (100, 4), (5, 2), (2, 1), (1, 1)], ids=lambda each: str(each)
)
@awaited
async def test_a_client_that_is_shared_keeps_half_of_its_connections_for_the_application(
    redis_server: Any, connections: int, most: int
) -> None:
    client = aioredis.Redis.from_url(
        redis_server.url, max_connections=connections, retry=Retry(NoBackoff(), 0)
    )
    sink = RedisStreamSink(client, "shared", timeout=30.0)
    await client.delete("shared", *(sink._frontier(part, "shared") for part in range(20)))
    batches = (sink.publish(part, 1, 1, rows(part)) for part in range(20))
    assert await asyncio.gather(*batches) == [0] * 20  # none is refused
    assert sink._turns._value == most
    await client.aclose()


@awaited
async def test_a_cluster_that_is_shared_keeps_half_of_its_connections_too() -> None:
    retry = Retry(NoBackoff(), 0)
    client = aioredis.RedisCluster(host="127.0.0.1", port=1, max_connections=20, retry=retry)
    sink = RedisStreamSink(client, "shared")
    sink._opened()
    assert sink._turns._value == 10
    await client.aclose()


@awaited
async def test_a_client_of_the_sink_s_own_is_used_fully(redis_server: Any) -> None:
    for query, most in (("", module._AT_ONCE), ("&max_connections=3", 3)):
        sink = RedisStreamSink.from_url(f"{redis_server.url}?stream=own{query}")
        sink._opened()
        assert sink._turns._value == most
        await sink.aclose()


@awaited
async def test_a_batch_that_is_cancelled_while_it_waits_takes_no_turn_away(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy(redis_server, monkeypatch) as others:
        waiting = asyncio.create_task(others.sink.publish(0, 1, 2, rows(2)))
        await asyncio.wait_for(others.often.wait(), 30)
        others.free()
        waiting.cancel()  # it may have its turn by now
        await asyncio.gather(waiting, return_exceptions=True)
        assert await others.sink.publish(0, 1, 2, rows(2)) in {1, 2}
        for _ in range(module._AT_ONCE_SHARED):
            await asyncio.wait_for(others.sink._turns.acquire(), 30)
        assert others.sink._turns.locked()
