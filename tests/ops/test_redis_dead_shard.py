"""One shard of a cluster is down: the others are used without it, and it is looked at when it is back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from redis.crc import key_slot

from semel.errors import ConfigurationError, SemelWarning, StoreUnavailable
from semel.store import Query
from semel.stores.redis import RedisStore
from semel.stores.redis.absent import Absent
from semel.stores.redis.address import Endpoint
from semel.stores.redis.link import open_link
from semel.testing import services
from semel.testing.services.redis import redis_program
from semel.testing.services.topology import SLOTS
from tests.ops.redis_link_lab import COLOURS, COUNT, ECHO, Face, fresh, open_face
from tests.ops.redis_link_lab import run as run_face
from tests.ops.redis_store_lab import BOTH, Colour, hurried, opened, run, scope, win

pytestmark = [pytest.mark.services, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[services.RedisCluster]:
    config = {"cluster-require-full-coverage": "no"}
    with services.RedisCluster(program=redis_program(), config=config, replicas=False).open() as found:
        yield found.patient()


@pytest.fixture
def dead(cluster: services.RedisCluster) -> Iterator[services.RedisServer]:
    """The master of the first shard, which is down; afterwards it is back, and all is as it was."""
    node = cluster.nodes[0]
    node.kill()
    yield node
    revive(cluster)
    for each in cluster.nodes:
        each.command("CONFIG", "SET", "maxmemory", "0")
        each.command("CONFIG", "SET", "maxmemory-policy", "noeviction")


def revive(cluster: services.RedisCluster) -> None:
    cluster.nodes[0].start()
    cluster.patient().wait_healthy()


def eats(node: services.RedisServer) -> None:
    node.command("CONFIG", "SET", "maxmemory", "100mb")
    node.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")


def key_of(store: RedisStore, shard: int, name: str = "key") -> str:
    """A key that this shard serves."""
    own = range(SLOTS * shard // 3, SLOTS * (shard + 1) // 3)
    names = (f"{name}-{number}" for number in range(1000))
    return next(name for name in names if key_slot(store.tag(scope(name)).encode()) in own)


def wake() -> None: ...


@BOTH
def test_a_fresh_face_uses_the_healthy_shards(
    cluster: services.RedisCluster, dead: services.RedisServer, colour: Colour
) -> None:
    async def main() -> None:
        store = opened(cluster.url, colour)
        await win(store, key_of(store, 1, f"{colour}-healthy"))
        await win(store, key_of(store, 2, f"{colour}-healthy"))
        lost = key_of(store, 0, f"{colour}-lost")
        with hurried(store, 0.5):
            for call in (win(store, lost), store.scan(Query()), store.purge(10), store.facts()):
                with pytest.raises(StoreUnavailable, match=str(dead.port)):
                    await call
            with pytest.raises(StoreUnavailable):
                await store.watch(scope(lost), wake)
        revive(cluster)
        unwatch = await store.watch(scope(lost), wake)
        await win(store, lost)
        await unwatch()
        assert not (await store.facts()).evicts
        await store.aclose()

    run(colour, main)


@BOTH
def test_a_shard_that_comes_back_and_would_eat_records_is_refused_at_its_first_use(
    cluster: services.RedisCluster, dead: services.RedisServer, colour: Colour
) -> None:
    async def main() -> None:
        store = opened(cluster.url, colour)
        await win(store, key_of(store, 1, f"{colour}-first"))
        revive(cluster)
        eats(dead)
        back = key_of(store, 0, f"{colour}-back")
        for call in (
            win(store, back),
            win(store, back),
            store.watch(scope(back), wake),
            store.peek(scope(back)),
        ):
            with pytest.raises(
                ConfigurationError, match=f"{dead.port} drops keys.*maxmemory-policy noeviction"
            ):
                await call
        await win(store, key_of(store, 2, f"{colour}-second"))
        dead.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await win(store, back)
        await store.aclose()

    run(colour, main)


@BOTH
def test_a_healthy_shard_that_would_eat_records_is_refused_though_another_one_is_down(
    cluster: services.RedisCluster, dead: services.RedisServer, colour: Colour
) -> None:
    eats(cluster.nodes[2])

    async def main() -> None:
        store = opened(cluster.url, colour)
        for shard in (1, 2):
            with pytest.raises(ConfigurationError, match=f"{cluster.nodes[2].port} drops keys"):
                await win(store, key_of(store, shard, f"{colour}-eaten"))
        await store.aclose()

    assert not dead.running
    run(colour, main)


@BOTH
def test_a_user_of_a_cluster_who_may_not_ask_about_eviction_is_warned(
    cluster: services.RedisCluster, colour: Colour
) -> None:
    for node in cluster.nodes:
        node.command("ACL", "SETUSER", "blind", "on", ">pass", "~*", "&*", "+@all", "-info")

    async def main() -> None:
        store = opened(cluster.url.replace("://", "://blind:pass@"), colour)
        with pytest.warns(SemelWarning, match=r"\+info"):
            await win(store, f"{colour}-blind")
        await store.aclose()

    run(colour, main)


# ------------------------------------------------------------------------------------------------- the link
@pytest.mark.parametrize("face", COLOURS)
def test_a_command_for_everywhere_says_who_was_absent_and_raises_when_all_are(
    cluster: services.RedisCluster, dead: services.RedisServer, face: Face
) -> None:
    async def body() -> None:
        link: Any = open_face(cluster.url, face)
        told = await link.command_everywhere("PING")
        absent = told.pop(f"127.0.0.1:{dead.port}")
        assert isinstance(absent, Absent)
        assert list(told.values()) == [b"PONG"] * 2
        revive(cluster)
        assert await absent.again() == b"PONG"
        link._topology._slots = [
            Endpoint("127.0.0.1", port) for port in (_closed(), _closed()) * (SLOTS // 2)
        ]
        with pytest.raises(StoreUnavailable, match="cannot reach Redis"):
            await link.command_everywhere("PING", timeout=0.5)
        await link.aclose()

    run_face(face, body())


def _closed() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("face", COLOURS)
def test_masters_that_all_take_their_time_are_waited_for(cluster: services.RedisCluster, face: Face) -> None:
    async def body() -> None:
        link = open_face(cluster.url, face, timeout=6)
        await link.command_everywhere("PING")
        for node in cluster.nodes:
            node.command("CLIENT", "PAUSE", 3500, "ALL")
        assert list((await link.command_everywhere("PING")).values()) == [b"PONG"] * 3
        await link.aclose()

    run_face(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_master_is_looked_at_once_before_its_first_use(cluster: services.RedisCluster, face: Face) -> None:
    seen: list[Any] = []

    async def body() -> None:
        link: Any = open_face(cluster.url, face)
        assert await link.call(ECHO, [b"k"], [1]) == [b"k", b"1"]
        topology = link._topology
        for node in topology.masters():
            topology.strangers[node] = (("PING",), seen.append)
        assert topology.locate(None) is None
        assert len(await link.command("TIME")) == 2
        assert seen == [b"PONG"]
        for _ in range(20):
            await link.call(COUNT, [fresh()])
        assert seen == [b"PONG"] * 3
        assert topology.strangers == {}
        assert await link._meet(topology.masters()[0], link._plain((), None, 0, None, resend=True)) is None
        assert seen == [b"PONG"] * 3, "somebody had done it"
        await link.aclose()

    run_face(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_master_that_does_not_come_back_is_left_for_the_one_that_took_over(
    cluster: services.RedisCluster, face: Face
) -> None:
    async def body() -> None:
        link: Any = open_face(cluster.url, face)
        assert await link.call(ECHO, [b"k"], [1]) == [b"k", b"1"]
        gone = Endpoint("127.0.0.1", _closed())
        link._topology._slots = [gone] * SLOTS
        link._topology.strangers[gone] = (("PING",), lambda _: pytest.fail("it cannot answer"))
        assert await link.call(ECHO, [b"k"], [1]) == [b"k", b"1"]
        await link.aclose()

    run_face(face, body())


def test_a_question_to_all_masters_breaks_no_connection_that_others_use(
    redis_cluster: services.RedisCluster,
) -> None:
    """It has a part of a call's time for each of them; the calls beside it have all of theirs."""

    async def body() -> None:
        link = open_link(redis_cluster.url, colour="async", timeout=6.0)
        await link.command_everywhere("PING")
        keys = [b"beside %d" % number for number in range(30)]
        for key in keys:
            await link.command("PING", key=key)
        for node in redis_cluster.nodes:
            node.command("CLIENT", "PAUSE", 1500, "ALL")
        calls = [asyncio.create_task(link.command("INCR", key, key=key, resend=False)) for key in keys]
        await asyncio.sleep(0.01)
        await link.command_everywhere("INFO")
        assert all(isinstance(count, int) for count in await asyncio.gather(*calls))
        await link.aclose()

    asyncio.run(body())
