"""R28 in a Redis Cluster that changes: a pipeline follows its slot, to where it was moved and to who took over."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import MovedError, RedisClusterException

from semel import AsyncSemel, ConfigurationError, Semel, StoreUnavailable, points
from semel.runtime import run_sync
from semel.stores.redis.store import RedisStore
from semel.testing import services
from semel.within.pipelines import Queue
from tests.within.lab import wait

COLOURS = ["sync", "async"]


@pytest.fixture(scope="module")
def moving() -> Iterator[services.RedisCluster]:
    with services.redis_cluster() as cluster:
        yield cluster.patient()


@pytest.fixture(autouse=True)
def _deaf_afterwards() -> Iterator[None]:
    yield
    points.listen(None)


class Shop:
    """A face and a cluster's client of one colour, which know the cluster as it was."""

    def __init__(self, cluster: services.RedisCluster, colour: str, **settings: Any) -> None:
        import redis.asyncio.cluster
        import redis.cluster

        self.colour = colour
        kind = Semel if colour == "sync" else AsyncSemel
        self.tenant = uuid.uuid4().hex
        patient: dict[str, Any] = {"tenant": self.tenant, "timeout": 20, "settle_timeout": 20}
        self.once: Any = kind(cluster.url, **(patient | settings))
        module: Any = redis.cluster if colour == "sync" else redis.asyncio.cluster
        host, port = cluster.addresses[0]
        self.client = module.RedisCluster(
            host=host, port=port, socket_timeout=5, socket_connect_timeout=5, require_full_coverage=False
        )
        self.ran: list[str] = []

    def run(self, body: Any) -> None:
        async def closing() -> None:
            try:
                await body
            finally:
                await wait(self.once.close())
                await wait(self.client.close() if self.colour == "sync" else self.client.aclose())

        (run_sync if self.colour == "sync" else asyncio.run)(closing())

    async def count(self, key: str, at: str | None = None) -> Any:
        """Count in the slot of a key, once."""
        pipe = self.client.pipeline(transaction=True)

        async def work() -> str:
            self.ran.append(key)
            pipe.incr(self.name(key) if at is None else at)
            return key

        fn: Any = work if self.colour == "async" else lambda: run_sync(work())
        return await wait(self.once.within(pipe).execute(key, fn))

    async def counted(self, key: str) -> int:
        return int(await wait(self.client.get(self.name(key))) or 0)

    def name(self, key: str) -> str:
        """Its own: there are 1,024 tags only, and the cluster is shared."""
        return f"{self.tenant}:{key}:{self.once.tag(key)}"

    async def warm(self) -> None:
        """Let the client read its map."""
        await wait(self.client.ping())


class Move:
    """Moves the slot of a key from its master to another one, step by step."""

    def __init__(self, cluster: services.RedisCluster, tag: str) -> None:
        self.cluster = cluster
        self.source = cluster.master_of(tag)
        self.slot = int(self.source.command("CLUSTER", "KEYSLOT", tag))
        self.target = next(node for node in cluster.masters() if node is not self.source)
        self._ids = [node.command("CLUSTER", "MYID") for node in (self.source, self.target)]

    def begin(self) -> None:
        self.target.command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self._ids[0])
        self.source.command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self._ids[1])

    def carry(self) -> None:
        import redis

        with redis.Redis(host=self.source.host, port=self.source.port) as source:
            while keys := source.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 100):
                source.execute_command(
                    "MIGRATE", self.target.host, self.target.port, "", 0, 5000, "KEYS", *keys
                )

    def finish(self) -> None:
        for node in (self.target, self.source, *self.cluster.masters()):
            node.command("CLUSTER", "SETSLOT", self.slot, "NODE", self._ids[1])

    def all(self) -> None:
        self.begin()
        self.carry()
        self.finish()


def at(point: str, act: Any) -> None:
    def reached(name: str) -> None:
        if name == point:
            points.listen(None)
            act()

    points.listen(reached)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("when", ["before", "run.returned", "settle.sent"])
def test_R28_a_pipeline_follows_a_slot_that_was_moved(
    moving: services.RedisCluster, colour: str, when: str
) -> None:
    shop = Shop(moving, colour)

    async def body() -> None:
        await shop.warm()
        move = Move(moving, shop.once.tag("k1"))
        if when == "before":
            move.all()
        else:
            at(when, move.all)
        outcome = await shop.count("k1")
        assert (outcome.value, outcome.replayed) == ("k1", False)
        assert (await shop.counted("k1"), shop.ran) == (1, ["k1"])
        assert (await shop.count("k1")).replayed

    shop.run(body())


@pytest.mark.parametrize("colour", COLOURS)
def test_R28_a_slot_that_was_moved_after_the_exec_whose_answer_was_lost(
    moving: services.RedisCluster, colour: str
) -> None:
    """What was applied where the slot was is found where it is."""
    import redis

    shop = Shop(moving, colour)

    async def body() -> None:
        await shop.warm()
        move = Move(moving, shop.once.tag("k1"))

        def lose() -> None:
            move.all()
            raise redis.ConnectionError("the answer was lost")

        at("settle.stored", lose)
        assert (await shop.count("k1")).value == "k1"
        assert (await shop.counted("k1"), shop.ran) == (1, ["k1"])

    shop.run(body())


@pytest.mark.parametrize("colour", COLOURS)
def test_R28_a_slot_that_is_on_the_move_is_waited_for(moving: services.RedisCluster, colour: str) -> None:
    shop = Shop(moving, colour, lease=60)

    async def body() -> None:
        await shop.warm()
        move = Move(moving, shop.once.tag("k1"))
        later = threading.Timer(1, move.finish)

        def halfway() -> None:
            move.begin()
            move.carry()
            later.start()

        at("run.returned", halfway)
        try:
            assert (await shop.count("k1")).value == "k1"
        finally:
            later.join()
        assert (await shop.counted("k1"), shop.ran) == (1, ["k1"])

    shop.run(body())


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("store", ["there", "away"])
def test_R28_a_slot_that_cannot_be_followed_in_time_applies_nothing_and_frees_the_key(
    moving: services.RedisCluster, colour: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(moving, colour, settle_timeout=0.5, lease=60, on_unknown="hold")

    async def blind(self: Queue) -> None:
        raise RedisClusterException("no node tells its map")

    async def away(self: Any, ends: Any) -> Any:
        raise StoreUnavailable("for now")

    async def body() -> None:
        await shop.warm()
        monkeypatch.setattr(Queue, "look_again", blind)
        at("run.returned", Move(moving, shop.once.tag("k1")).all)
        if store == "away":
            monkeypatch.setattr(RedisStore, "settle", away)
        with pytest.raises(StoreUnavailable, match="Nothing was applied") as caught:
            await shop.count("k1")
        assert isinstance(caught.value.__cause__, MovedError)
        monkeypatch.undo()
        if store == "away":  # it has nobody who renews it, and ends with its lease
            assert (await wait(shop.once.peek("k1"))).state == "running"
            return
        assert (await wait(shop.once.peek("k1"))).state == "released"
        assert (await shop.count("k1")).value == "k1"
        assert (await shop.counted("k1"), shop.ran) == (1, ["k1", "k1"])

    shop.run(body())


@pytest.mark.parametrize("colour", COLOURS)
def test_R28_a_key_of_another_slot_is_refused_though_that_slot_was_moved(
    moving: services.RedisCluster, colour: str
) -> None:
    """MOVED and ASK tell of the caller's key here, not of the record's."""
    shop = Shop(moving, colour, settle_timeout=60)

    async def body() -> None:
        await shop.warm()
        home = moving.master_of(shop.once.tag("k1"))
        elsewhere = next(tag for n in range(1000) if moving.master_of(tag := f"{{{n}}}") is not home)
        with pytest.raises(ConfigurationError, match=r"once\.tag\(key\)"):
            await shop.count("k1", elsewhere)
        near = next(
            tag
            for n in range(1000)
            if moving.master_of(tag := f"{{{n}}}") is home and tag != shop.once.tag("k1")
        )
        move = Move(moving, near)
        move.begin()
        try:
            with pytest.raises(ConfigurationError, match=r"once\.tag\(key\)"):
                await shop.count("k1", near)
        finally:
            move.finish()
        assert (await wait(shop.once.peek("k1"))).state == "released"

    shop.run(body())


@pytest.mark.parametrize("colour", COLOURS)
def test_R28_a_map_without_the_slot_is_read_anew(
    moving: services.RedisCluster, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when that fails at first."""
    shop = Shop(moving, colour)
    real, tries = Queue.look_again, iter([RedisClusterException("no node is there"), OSError("nor this one")])

    async def look_again(self: Queue) -> None:
        failed = next(tries, None)
        if failed is not None:
            raise failed
        await real(self)

    async def body() -> None:
        await shop.warm()
        monkeypatch.setattr(Queue, "look_again", look_again)
        at("run.returned", shop.client.nodes_manager.slots_cache.clear)
        assert (await shop.count("k1")).value == "k1"
        assert next(tries, None) is None
        assert (await shop.counted("k1"), shop.ran) == (1, ["k1"])

    shop.run(body())


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("when", ["before", "run.returned"])
def test_R28_a_pipeline_follows_a_fail_over(colour: str, when: str) -> None:
    with services.redis_cluster() as cluster:
        shop = Shop(cluster, colour, settle_timeout=60, timeout=60, lease=30)

        def killed(tag: str) -> None:
            """Wait for a replica that has the record first: what is not replicated is lost with its master."""
            master = cluster.master_of(tag)
            assert master.command("WAIT", 1, 10_000)
            master.kill()
            until = time.monotonic() + 60
            while when == "before" and not _served(cluster, tag):
                assert time.monotonic() < until, "nobody took over"
                time.sleep(0.1)

        async def body() -> None:
            await shop.warm()
            assert (await shop.count("k0")).value == "k0"
            tag = shop.once.tag("k1")
            if when == "before":
                killed(tag)
            else:
                at(when, lambda: killed(tag))
            assert (await shop.count("k1")).value == "k1"
            assert (await shop.counted("k1"), shop.ran) == (1, ["k0", "k1"])

        shop.run(body())


def _served(cluster: services.RedisCluster, tag: str) -> bool:
    try:
        return cluster.master_of(tag).running
    except LookupError:
        return False
