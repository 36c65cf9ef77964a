"""What keeps subscriptions: it rests while a slot of the cluster belongs to nobody, and ends with its loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from semel.errors import StoreUnavailable
from semel.stores.redis.address import Endpoint, Target
from semel.stores.redis.topology import Topology
from semel.stores.redis.watch_loops import LoopWatcher
from semel.stores.redis.watch_threads import ThreadWatcher


def test_a_slot_that_nobody_has_is_asked_for_at_intervals() -> None:
    topology = Topology(Target("cluster", (Endpoint("127.0.0.1", 1),), {}))
    asked: list[float] = []
    enough = threading.Event()

    async def look_up() -> None:
        asked.append(time.monotonic())
        if len(asked) == 4:
            enough.set()

    def connect(node: Endpoint) -> None:
        raise AssertionError(node)  # there is none

    watcher = ThreadWatcher(topology, connect, look_up, timeout=5, ping_every=60)
    try:
        with pytest.raises(StoreUnavailable):
            watcher.watch(b"channel", lambda: None, 2.0)
        assert enough.wait(20)
    finally:
        watcher.close()
    assert len(asked) < 40
    assert asked[3] - asked[0] >= 0.02 + 0.1 + 0.25


def test_what_is_collected_after_its_loop_ends_nothing_there() -> None:
    async def nothing(*_: object) -> None: ...

    async def body() -> LoopWatcher:
        topology = Topology(Target("cluster", (Endpoint("127.0.0.1", 1),), {}))
        watcher = LoopWatcher(topology, nothing, nothing, timeout=5, ping_every=60)
        serving = watcher._serve()
        serving.send(None)
        serving.close()
        assert not watcher.ended
        await watcher.aclose()
        return watcher

    assert asyncio.run(body()).ended
