"""Sentinel, Cluster and Valkey: moved slots and lost masters are followed within the caller's time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores.redis.address import Endpoint, Target
from semel.stores.redis.calls import Lane
from semel.stores.redis.courier import Parcel
from semel.stores.redis.errors import NotSent
from semel.stores.redis.link import Call, open_link
from semel.stores.redis.topology import Topology
from semel.testing import services
from tests.ops.redis_link_lab import (
    COLOURS,
    COUNT,
    ECHO,
    FACES,
    ONCE,
    PUBLISH,
    Face,
    drive,
    fresh,
    once_keys,
    open_face,
    run,
)
from tests.ops.test_redis_link_watch import Bell


# ----------------------------------------------------------------------------------------------- cluster
@pytest.mark.parametrize("face", FACES)
def test_in_a_cluster_each_call_goes_straight_to_its_node(
    redis_cluster: services.RedisCluster, face: Face
) -> None:
    keys = [fresh() for _ in range(60)]

    async def body() -> None:
        link = open_face(redis_cluster.url, face)
        assert link.topology == "cluster"
        replies = await link.call_many([Call(ECHO, [key], [key]) for key in keys])
        assert replies == [[key, key] for key in keys]
        for key in keys:
            assert await link.call(COUNT, [key + b":n"]) == 1
            assert await link.command("GET", key + b":n", key=key) == b"1"
        told = await link.command_everywhere("INFO", "errorstats")
        assert len(told) == 3
        assert not any(b"errorstat_MOVED" in stats for stats in told.values())
        await link.aclose()

    for node in redis_cluster.masters():
        node.command("CONFIG", "RESETSTAT")
    run(face, body())


def test_in_a_cluster_a_tick_is_one_write_and_one_connection_per_node(
    redis_cluster: services.RedisCluster,
) -> None:
    keys = [fresh() for _ in range(60)]

    async def body() -> None:
        link = open_link(redis_cluster.url + "?client_name=counted", colour="async")
        for _ in range(5):
            replies = await asyncio.gather(*(link.call(ECHO, [key], [key]) for key in keys))
            assert replies == [[key, key] for key in keys]
        for node in redis_cluster.masters():
            assert str(node.command("CLIENT", "LIST")).count("counted") == 1
        await link.aclose()

    asyncio.run(body())


@pytest.mark.parametrize("face", COLOURS)
def test_in_a_cluster_wake_ups_come_from_the_channels_own_node(
    redis_cluster: services.RedisCluster, face: Face
) -> None:
    channels = [fresh("channel") for _ in range(12)]

    async def body() -> None:
        link = open_face(redis_cluster.url, face)
        bells = [Bell(face) for _ in channels]
        for channel, bell in zip(channels, bells, strict=True):
            await link.watch(channel, bell)
        for channel, bell in zip(channels, bells, strict=True):
            assert await link.call(PUBLISH, [channel]) == 1
            await bell.until(1)
        await link.aclose()

    run(face, body())


def test_cluster_clients_handed_in_are_read_and_never_closed(redis_cluster: services.RedisCluster) -> None:
    host, port = redis_cluster.addresses[0]
    client = redis.RedisCluster(host=host, port=port)
    link = open_link(client, colour="sync")
    key = fresh()
    assert drive(link.call(ECHO, [key], [key])) == [key, key]
    link.close()
    assert client.set(key, b"still open")
    with pytest.raises(ConfigurationError, match="sync client"):
        open_link(client, colour="async")
    client.close()

    async def body() -> None:
        client = redis.asyncio.RedisCluster(host=host, port=port)
        assert await client.initialize() is client
        link = open_link(client, colour="async")
        assert await link.call(ECHO, [key], [key]) == [key, key]
        await link.aclose()
        assert await client.set(key, b"still open")
        await client.aclose()

    asyncio.run(body())


@pytest.mark.parametrize("face", COLOURS)
def test_the_wrong_scheme_is_named(
    redis_server: services.RedisServer, redis_cluster: services.RedisCluster, face: Face
) -> None:
    async def body() -> None:
        plain = open_face(f"redis+cluster://{redis_server.host}:{redis_server.port}", face)
        with pytest.raises(ConfigurationError, match="not in cluster mode"):
            await plain.call(ECHO, [b"k"], [1])
        await plain.aclose()
        node = open_face(redis_cluster.nodes[0].url, face)
        with pytest.raises(ConfigurationError, match=r"redis\+cluster://"):
            for _ in range(20):
                await node.call(COUNT, [fresh()])
        await node.aclose()

    run(face, body())


# -------------------------------------------------------------------------------------- slots that move
@pytest.fixture(scope="module")
def moving_cluster() -> Iterator[services.RedisCluster]:
    with services.redis_cluster() as cluster:
        yield cluster


class Migration:
    """Moves the slot of `key` from its master to another one, step by step."""

    def __init__(self, cluster: services.RedisCluster, key: bytes) -> None:
        self.cluster = cluster
        self.source = cluster.master_of(key.decode())
        self.slot = int(self.source.command("CLUSTER", "KEYSLOT", key))
        self.target = next(node for node in cluster.masters() if node is not self.source)
        self.source_id = self.source.command("CLUSTER", "MYID")
        self.target_id = self.target.command("CLUSTER", "MYID")

    def begin(self) -> None:
        self.target.command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.source_id)
        self.source.command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.target_id)

    def carry(self, *keys: bytes) -> None:
        self.source.command("MIGRATE", self.target.host, self.target.port, "", 0, 5000, "KEYS", *keys)

    def finish(self) -> None:
        for node in (self.target, self.source, *self.cluster.masters()):
            node.command("CLUSTER", "SETSLOT", self.slot, "NODE", self.target_id)


@pytest.mark.parametrize("face", COLOURS)
def test_a_slot_on_the_move_is_followed_by_ask_then_moved(
    moving_cluster: services.RedisCluster, face: Face
) -> None:
    key = fresh()
    old, new = key + b":old", key + b":new"
    move = Migration(moving_cluster, key)

    async def body() -> None:
        link = open_face(moving_cluster.url, face)
        await link.call(COUNT, [old])
        move.begin()
        assert await link.call(COUNT, [new]) == 1, "absent here: ASK"
        assert await link.call(COUNT, [old]) == 2, "still here"
        assert await link.call(COUNT, [new]) == 2
        assert await link.call_many([Call(COUNT, [old]), Call(COUNT, [new])]) == [3, 3]
        move.carry(old)
        assert await link.call(COUNT, [old]) == 4
        move.finish()
        assert await link.call(COUNT, [old]) == 5, "MOVED"
        before = move.source.info("errorstats").get("errorstat_MOVED", {}).get("count", 0)
        assert await link.call(COUNT, [old]) == 6
        assert move.source.info("errorstats").get("errorstat_MOVED", {}).get("count", 0) == before, "learned"
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_keys_torn_apart_by_a_migration_are_waited_for(
    moving_cluster: services.RedisCluster, face: Face
) -> None:
    key = fresh()
    nonces, count = once_keys(key)
    move = Migration(moving_cluster, key)

    async def body() -> None:
        link = open_face(moving_cluster.url, face, timeout=10)
        await link.call(ONCE, [nonces, count], [b"first"])
        move.begin()
        move.carry(nonces)
        with pytest.raises(StoreUnavailable, match="TRYAGAIN"):
            await link.call(ONCE, [nonces, count], [b"second"], timeout=1)

        def end() -> None:
            move.carry(count)
            move.finish()

        later = threading.Timer(0.2, end)
        later.start()
        assert await link.call(ONCE, [nonces, count], [b"second"]) == [b"second", b"2"]
        later.join()
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_a_watched_channel_whose_slot_moves_is_watched_at_its_new_place(
    moving_cluster: services.RedisCluster, face: Face
) -> None:
    channel = fresh("channel")
    move = Migration(moving_cluster, channel)

    async def body() -> None:
        link = open_face(moving_cluster.url, face)
        bell = Bell(face)
        await link.watch(channel, bell)
        move.begin()
        move.finish()
        await bell.until(1)  # woken, because a message may have been missed on the way
        assert await link.call(PUBLISH, [channel]) == 1
        await bell.until(2)
        await link.aclose()

    run(face, body())


# -------------------------------------------------------------------------------------------- fail-over
@pytest.mark.slow
@pytest.mark.parametrize(
    "valkey", [False, pytest.param(True, marks=pytest.mark.long)], ids=["redis", "valkey"]
)
def test_a_killed_cluster_master_is_replaced_within_the_callers_time(valkey: bool) -> None:
    with services.redis_cluster(valkey=valkey) as cluster:
        key = fresh()
        victim = cluster.master_of(key.decode())
        blocking = open_link(cluster.url, colour="sync", timeout=60)
        drive(blocking.call(ONCE, once_keys(key), [b"warm"]))

        async def body() -> None:
            link = open_link(cluster.url, colour="async", timeout=60)
            bell = Bell("async")
            await link.watch(key, bell)
            await link.call(ONCE, once_keys(key), [b"warm"])
            await asyncio.to_thread(victim.kill)
            start = time.monotonic()
            with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{victim.port}"):
                await link.call(ONCE, once_keys(key), [b"too short"], timeout=0.3)
            assert time.monotonic() - start < 15, "its own time, not the link's"
            calls = [link.call(ONCE, once_keys(key), [f"n{number}"]) for number in range(20)]
            in_thread = asyncio.to_thread(lambda: drive(blocking.call(ONCE, once_keys(key), [b"thread"])))
            *replies, last = await asyncio.gather(*calls, in_thread)
            assert [reply[0] for reply in replies] == [f"n{number}".encode() for number in range(20)]
            assert last[0] == b"thread"
            await bell.until(1, timeout=60)
            rung = bell.rings
            assert await link.call(PUBLISH, [key]) == 1
            await bell.until(rung + 1)
            await link.aclose()

        asyncio.run(body())
        blocking.close()


@pytest.mark.parametrize("face", FACES)
def test_sentinel_names_the_master(redis_sentinel: services.RedisSentinel, face: Face) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(redis_sentinel.url, face)
        assert link.topology == "sentinel"
        assert await link.call(COUNT, [key]) == 1
        assert await link.command_everywhere("PING") == {f"127.0.0.1:{redis_sentinel.master().port}": b"PONG"}
        bell = Bell(face)
        await link.watch(key, bell)
        assert await link.call(PUBLISH, [key]) == 1
        await bell.until(1)
        await link.aclose()

    run(face, body())


@pytest.mark.parametrize("face", COLOURS)
def test_an_unknown_sentinel_service_is_a_configuration_error(
    redis_sentinel: services.RedisSentinel, face: Face
) -> None:
    async def body() -> None:
        link = open_face(redis_sentinel.url.replace("/semel/", "/nobody/"), face)
        with pytest.raises(ConfigurationError, match="'nobody'"):
            await link.call(ECHO, [b"k"], [1])
        await link.aclose()

    run(face, body())


def test_clients_of_sentinel_master_for_are_read_and_never_closed(
    redis_sentinel: services.RedisSentinel,
) -> None:
    made: Any = redis.sentinel  # untyped in redis-py
    guard = made.Sentinel(redis_sentinel.addresses)
    client = guard.master_for("semel", client_name="theirs")
    link = open_link(client, colour="sync")
    assert link.topology == "sentinel"
    assert b"name=theirs" in drive(link.command("CLIENT", "INFO"))
    link.close()
    assert client.ping()
    client.close()
    for each in guard.sentinels:  # redis-py closes what a garbage collection has not taken apart before
        each.close()

    async def body() -> None:
        made: Any = redis.asyncio.sentinel
        guard = made.Sentinel(redis_sentinel.addresses)
        client = guard.master_for("semel", client_name="theirs")
        link = open_link(client, colour="async")
        assert b"name=theirs" in await link.command("CLIENT", "INFO")
        await link.aclose()
        assert await client.ping()
        await client.aclose()
        await guard.aclose()

    asyncio.run(body())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "paused"])
@pytest.mark.parametrize(
    "valkey", [False, pytest.param(True, marks=pytest.mark.long)], ids=["redis", "valkey"]
)
def test_a_lost_master_under_sentinel_is_replaced_within_the_callers_time(how: str, valkey: bool) -> None:
    with services.redis_sentinel(valkey=valkey) as group:
        key = fresh()
        victim = group.master()
        timeout = 60 if how == "killed" else 16  # half of it is spent on waiting for one that says nothing
        blocking = open_link(group.url, colour="sync", timeout=timeout)
        drive(blocking.call(ONCE, once_keys(key), [b"warm"]))

        async def body() -> None:
            link = open_link(group.url, colour="async", timeout=timeout)
            await link.call(ONCE, once_keys(key), [b"warm"])
            await asyncio.to_thread(victim.kill if how == "killed" else victim.pause)
            calls = [link.call(ONCE, once_keys(key), [f"n{number}"]) for number in range(20)]
            in_thread = asyncio.to_thread(lambda: drive(blocking.call(ONCE, once_keys(key), [b"thread"])))
            *replies, last = await asyncio.gather(*calls, in_thread)
            assert [reply[0] for reply in replies] == [f"n{number}".encode() for number in range(20)]
            assert last[0] == b"thread"
            assert await link.command_everywhere("PING") == {
                f"127.0.0.1:{other(group, victim).port}": b"PONG"
            }
            await link.aclose()

        asyncio.run(body())
        blocking.close()


def other(group: services.RedisSentinel, victim: Any) -> services.RedisServer:
    return next(node for node in group.nodes if node is not victim)


@pytest.mark.parametrize("face", FACES)
def test_valkey_answers_as_redis_does(valkey_server: services.RedisServer, face: Face) -> None:
    key = fresh()

    async def body() -> None:
        link = open_face(valkey_server.url, face)
        assert await link.call(ONCE, once_keys(key), [b"n"]) == [b"n", b"1"]
        assert await link.call_many([Call(ECHO, [key], [1]), Call(ECHO, [key], [2])]) == [
            [key, b"1"],
            [key, b"2"],
        ]
        bell = Bell(face)
        await link.watch(key, bell)
        assert await link.call(PUBLISH, [key]) == 1
        await bell.until(1)
        await link.aclose()

    run(face, body())


# ---------------------------------------------------------------------------------------------- the map
def test_a_cluster_address_can_be_remapped_and_an_empty_host_means_the_asked_node() -> None:
    target = Target(
        "cluster", (Endpoint("inside", 1),), {}, remap=lambda address: ("outside", address[1] + 1000)
    )
    topology = Topology(target)

    async def ask(*_: object) -> Any:
        return [[0, 8191, [b"", 7000, b"id"]], [8192, 16383, [b"10.0.0.2", 7001, b"id"]]]

    drive(topology.refresh(ask, lambda _nodes, _first: 1.0))
    assert topology.masters() == [Endpoint("outside", 8000), Endpoint("outside", 8001)]
    assert topology.learn("MOVED 5 :7005", Endpoint("inside", 1)) == Endpoint("outside", 8005)
    plain = Topology(Target("cluster", (Endpoint("inside", 1),), {}))
    assert plain.learn("ASK 5 :7005", Endpoint("inside", 1)) == Endpoint("inside", 7005)
    assert plain.learn("ASK 5 ::1:7005", Endpoint("inside", 1)) == Endpoint("::1", 7005)


class Around:
    """A cluster that is asked for its map: who is asked, for how long, and what each node says (None: nothing)."""

    def __init__(self, **says: Any) -> None:
        self.says = says
        self.asked: list[str] = []
        self.topology = Topology(Target("cluster", tuple(Endpoint(name, 1) for name in says), {}))

    async def _ask(self, node: Endpoint, _sentinel: bool, _command: tuple[bytes, ...], _limit: float) -> Any:
        self.asked.append(node.host)
        said = self.says[node.host]
        if said is None:
            raise NotSent(TimeoutError("silent"))
        return said

    def refresh(self, *limits: float) -> list[str]:
        """Who was asked, in order; each for as long as `limits` say, or a second."""
        self.asked = []
        times = iter(limits)
        drive(self.topology.refresh(self._ask, lambda _nodes, _first: next(times, 1.0)))
        return self.asked


def slots(master: str, *replicas: str) -> list[Any]:
    return [[0, 16383, *([name.encode(), 1, b"id"] for name in (master, *replicas))]]


def test_who_was_silent_is_asked_last_and_who_told_something_new_first() -> None:
    told = slots("a", "b", "c", "d")
    around = Around(a=None, b=None, c=told, d=told)
    first = around.refresh()
    teller = first[-1]
    assert around.refresh() == [teller], "it told something new"
    around.says[teller] = None
    (other,) = {"c", "d"} - {teller}
    for _ in range(20):
        around.topology.silent(Endpoint("a", 1), 1.0)
        around.topology.silent(Endpoint("b", 1), 1.0)
        assert around.refresh()[-1] == other
        assert not {"a", "b"} & set(around.asked), "they were silent before"


def test_who_only_repeats_what_is_in_doubt_is_not_asked_first_for_ever() -> None:
    old, new = slots("a", "b", "c"), slots("b", "a", "c")
    around = Around(a=old, b=old, c=old)
    cut_off = around.refresh()[0]
    around.says = dict.fromkeys("abc", new) | {cut_off: old}
    for _ in range(100):
        if around.refresh() != [cut_off]:
            break
    assert around.topology.masters() == [Endpoint("b", 1)]


def test_of_the_silent_nodes_those_come_first_that_had_the_least_time() -> None:
    around = Around(a=None, b=None, c=None)
    with pytest.raises(NotSent):
        around.refresh(1.0, 0.2, 0.4)
    longest, shortest, middle = around.asked
    with pytest.raises(NotSent):
        around.refresh()
    assert around.asked == [shortest, middle, longest], "a slow one can show that it is well"
    around.says = dict.fromkeys("abc", slots("a"))
    around.refresh()
    assert len(around.asked) == 1


def test_the_replicas_of_the_map_are_asked_before_the_seeds_and_a_node_without_a_map_is_passed_over() -> None:
    around = Around(seed=slots("master", "replica"))
    around.refresh()
    around.says |= {"master": [], "replica": slots("replica")}
    around.topology.silent(Endpoint("stranger", 1), 1.0)
    for _ in range(20):
        around.topology.silent(Endpoint("seed", 1), 1.0)
        assert around.refresh()[-1] == "replica"
    assert around.topology.masters() == [Endpoint("replica", 1)]
    around.says = {name: [] for name in around.says}
    with pytest.raises(NotSent, match="no node knows of any slot"):
        around.refresh()


def test_when_the_time_is_over_nobody_else_is_asked() -> None:
    around = Around(a=slots("a"), b=slots("a"))
    with pytest.raises(NotSent, match="no time left"):
        around.refresh(0.0)
    assert around.asked == []


def test_the_time_to_ask_is_shared_so_that_the_last_node_is_reached() -> None:
    parcel = Parcel(None, None, (), (), Lane.MAIN, resend=True, timeout=2.0, deadline=2.0)
    assert parcel.share(0.0, 1, first=True) == 2.0, "alone it has all of it"
    now = 0.0
    shares = []
    for nodes in (6, 5, 4, 3, 2, 1):
        shares.append(parcel.share(now, nodes, first=nodes == 6))
        now += shares[-1]
    assert shares[0] == 1.0
    assert min(shares) >= 0.2 - 1e-9
    assert now <= 2.0
    assert parcel.share(1.9, 3, first=False) == pytest.approx(0.1), "never more than there is"


def test_the_right_to_ask_is_taken_over_from_who_does_not_go_on() -> None:
    topology = Around(a=None).topology
    first = topology.begin(60.0)
    assert first
    assert not topology.begin(60.0)
    second = topology.begin(0.0)
    assert second
    topology.end(first)
    assert not topology.begin(60.0), "it is not the first one's any more"
    topology.end(second)
    assert topology.begin(60.0)
