"""Nodes that say nothing (a lost zone, a firewall): the live ones are found within the caller's time, by every loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from semel.errors import StoreUnavailable
from semel.stores.redis.link import open_link
from semel.testing import services
from semel.testing.services.server import wait_until
from tests.ops.redis_link_lab import (
    COLOURS,
    COUNT,
    ECHO,
    Face,
    Scripted,
    drive,
    fresh,
    open_face,
    run,
)

pytestmark = [pytest.mark.services, pytest.mark.slow]


class Half:
    """A cluster whose first three nodes are silent; their replicas have taken over. `before` is the map of that time."""

    def __init__(self, cluster: services.RedisCluster) -> None:
        self.url = cluster.url
        self.only_silent = f"redis+cluster://{cluster.nodes[0].host}:{cluster.nodes[0].port}"
        used: Any = open_link(cluster.url, colour="sync", timeout=20)
        drive(used.call(ECHO, [b"k"], [1]))
        self.before = used._topology
        used.close()

    def recall(self, link: Any) -> None:
        """As if it had been used before."""
        link._topology._slots = list(self.before._slots)
        link._topology._replicas = set(self.before._replicas)


@pytest.fixture(scope="module")
def half() -> Iterator[Half]:
    with services.redis_cluster() as cluster, ExitStack() as stack:
        cluster.patient()
        wait_until(
            lambda: all(_shards(node) == 3 for node in cluster.nodes),
            timeout=30,
            what="every node knows whose replica each one is",
        )
        found = Half(cluster)
        for node in cluster.nodes[:3]:
            stack.enter_context(node.paused())
        for node in cluster.nodes[3:]:
            node.command("CLUSTER", "FAILOVER", "TAKEOVER")
        new = cluster.nodes[3:]
        wait_until(
            lambda: all(_owners(node) == {other.port for other in new} for node in new),
            timeout=30,
            what="the replicas are masters, and know it of each other",
        )
        yield found


def _owners(node: services.RedisServer) -> set[int]:
    return {int(row[2][1]) for row in node.command("CLUSTER", "SLOTS")}


def _shards(node: services.RedisServer) -> int:
    """How many masters it knows that have a replica."""
    return sum(len(row) > 3 for row in node.command("CLUSTER", "SLOTS"))


def unluckily(monkeypatch: pytest.MonkeyPatch, silent: set[int]) -> None:
    """Where servers are asked in any order, the silent ones come first."""
    monkeypatch.setattr(
        random, "sample", lambda nodes, _count: sorted(nodes, key=lambda n: n.port not in silent)
    )


@pytest.mark.parametrize("face", COLOURS)
def test_a_fresh_face_finds_the_live_half_of_a_cluster(
    half: Half, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    unluckily(monkeypatch, {node.port for node in half.before.masters()})

    async def body() -> None:
        link: Any = open_face(half.url, face, timeout=8)
        assert await link.call(ECHO, [b"k"], [b"x"]) == [b"k", b"x"]
        start = time.monotonic()
        await link._look_up()
        await link._look_up()
        assert time.monotonic() - start < 2, "who was silent is remembered"
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_used_face_whose_every_master_is_silent_finds_the_replicas_that_took_over(
    half: Half, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    unluckily(monkeypatch, {node.port for node in half.before.masters()})

    async def body() -> None:
        link = open_face(
            half.only_silent, face, timeout=12
        )  # half of it is spent on the master that says nothing
        half.recall(link)
        assert await link.call(ECHO, [b"k"], [b"x"]) == [b"k", b"x"]
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_two_silent_sentinels_of_three_cost_a_part_of_the_time_and_only_once(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    with services.redis_sentinel() as group, ExitStack() as stack:
        group.patient()
        unluckily(monkeypatch, {sentinel.port for sentinel in group.sentinels[:2]})
        for sentinel in group.sentinels[:2]:
            stack.enter_context(sentinel.paused())

        async def body() -> None:
            link: Any = open_face(group.url, face, timeout=6)
            assert await link.call(ECHO, [b"k"], [b"x"]) == [b"k", b"x"]
            start = time.monotonic()
            for _ in range(3):
                link._topology.suspect()
                assert await link.call(ECHO, [b"k"], [b"x"]) == [b"k", b"x"]
            assert time.monotonic() - start < 2, "who was silent is remembered"
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_slow_network_is_not_taken_for_silent_nodes(face: Face) -> None:
    def answer(command: bytes) -> bytes:
        time.sleep(1.3)  # the network
        if b"SLOTS" in command:
            node = f"*3\r\n$9\r\n127.0.0.1\r\n:{servers[0].port}\r\n$2\r\nid\r\n"
            return f"*1\r\n*3\r\n:0\r\n:16383\r\n{node}".encode()
        return b"+slowly\r\n"

    with ExitStack() as stack:
        servers = [stack.enter_context(Scripted(answer)) for _ in range(6)]
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)

        async def body() -> None:
            link = open_face(url, face, timeout=5)
            assert await link.call(ECHO, [b"k"], [1]) == b"slowly"
            await link.aclose()

        run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_cluster_without_slots_is_told_in_time(face: Face) -> None:
    with Scripted(lambda _: b"*0\r\n") as server:

        async def body() -> None:
            link = open_face(f"redis+cluster://127.0.0.1:{server.port}", face, timeout=0.5)
            for call in (link.call(ECHO, [b"k"], [1]), link.command_everywhere("PING")):
                with pytest.raises(
                    StoreUnavailable, match=f"127.0.0.1:{server.port}.*no node knows of any slot"
                ):
                    await call
            await link.aclose()

        run(face, body())


# --------------------------------------------------------------------------------- a loop that is held up
@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_a_loop_that_is_held_up_while_it_asks_for_the_map_does_not_hold_up_others(
    redis_sentinel: services.RedisSentinel, redis_cluster: services.RedisCluster, kind: str
) -> None:
    url = redis_sentinel.url if kind == "sentinel" else redis_cluster.url
    link: Any = open_link(url, colour="async", timeout=6)
    held_up = asyncio.new_event_loop()
    key, other = fresh(), fresh()
    first = held_up.create_task(link.call(COUNT, [key], timeout=60))
    while not link._topology.refreshing:
        held_up.call_soon(held_up.stop)
        held_up.run_forever()
    assert asyncio.run(link.call(COUNT, [other])) == 1
    assert held_up.run_until_complete(first) == 1
    assert not link._topology.refreshing
    held_up.run_until_complete(link.aclose())
    held_up.close()


@pytest.mark.parametrize("face", COLOURS)
def test_who_waits_in_vain_for_the_map_names_the_servers(
    redis_cluster: services.RedisCluster, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        link: Any = open_face(redis_cluster.url, face, timeout=0.3)
        monkeypatch.setattr(link._topology, "begin", lambda _patience: 0.0)  # somebody always asks
        names = ", ".join(f"{host}:{port}" for host, port in redis_cluster.addresses)
        for call in (link.call(ECHO, [b"k"], [1]), link.command_everywhere("PING")):
            with pytest.raises(StoreUnavailable, match=f"Redis at {names} did not answer"):
                await call
        await link.aclose()

    run(face, body())
