"""A loop that was busy elsewhere reads what lies in the socket before it calls a reply late."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from semel.errors import StoreUnavailable
from semel.stores.redis import wire
from semel.stores.redis.link import Link, open_link
from semel.testing import services
from tests.ops.redis_link_lab import ECHO, Face, fresh, run

pytestmark = pytest.mark.services
ASYNC: list[Face] = ["async", "uvloop"]
# More than a loop reads of a socket at once: 256 KiB.
CALLS, SIZE = 400, 2048


async def asked_by_a_busy_loop(link: Link) -> list[Any]:
    """What many calls end in whose replies are there, all of them, long before the loop looks at them."""
    await link.call(ECHO, [fresh()], ["warm"])
    calls = [asyncio.create_task(link.call(ECHO, [fresh()], ["x" * SIZE])) for _ in range(CALLS)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    time.sleep(1.2)
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("face", ASYNC)
def test_a_busy_loop_calls_no_reply_late_that_is_there(
    redis_server: services.RedisServer, face: Face
) -> None:
    async def body() -> None:
        link = open_link(redis_server.url, colour="async", timeout=1.0, connect_timeout=20)
        told = await asked_by_a_busy_loop(link)
        assert [error for error in told if isinstance(error, Exception)] == []
        assert len(told) == CALLS
        await link.aclose()

    run(face, body())


def test_it_reads_no_further_than_it_must(
    redis_server: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_CATCH_UP", 1)

    async def body() -> None:
        link = open_link(redis_server.url, colour="async", timeout=1.0, connect_timeout=20)
        told = await asked_by_a_busy_loop(link)
        late = [error for error in told if isinstance(error, Exception)]
        assert {type(error) for error in late} == {StoreUnavailable}
        assert 0 < len(late) < CALLS
        await link.aclose()

    asyncio.run(body())


def test_what_it_read_of_old_counts_no_longer_once_all_is_well(redis_server: services.RedisServer) -> None:
    async def body() -> None:
        link: Any = open_link(redis_server.url, colour="async", timeout=1.0, connect_timeout=20)
        await asked_by_a_busy_loop(link)
        (line,) = [each for lane in link.home().wires for each in lane.values()]
        line._behind = wire._CATCH_UP - 1
        await link.command("PING", timeout=5)
        line._sweep()
        assert line._behind == 0
        await link.aclose()

    asyncio.run(body())
