"""What `notifies` and `shared` promise, between real processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import pytest

from semel.model import Replay
from semel.store import Settings, Store, open_store
from semel.testing import services
from semel.testing.contract import Bench, StoreContract
from semel.testing.contract.bench import in_colour

Colour = Literal["sync", "async"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> Colour:
    return "sync" if request.param == "sync" else "async"


def wakes_across_processes(url: str, colour: Colour, *, notifies: bool = True) -> None:
    class Suite(StoreContract):
        def open(self) -> Store:
            return open_store(url, Settings(timeout=15.0), colour)

    async def body() -> None:
        bench = Bench(Suite(), colour)
        try:
            assert bench.store.capabilities.shared
            assert bench.store.capabilities.notifies is notifies
            ask = await bench.win()
            event = threading.Event()
            unwatch = await bench.store.watch(ask.scope, event.set)
            await bench.claim(bench.ask())  # a waiter looks once after it has subscribed, as the flow does
            event.clear()
            child = [sys.executable, "-m", "tests.contract.other_process", url, colour, bench.tenant]
            with subprocess.Popen([*child, ask.nonce.hex()], cwd=ROOT) as process:
                assert process.wait(50) == 0  # its start takes long on a busy machine; the wake-up may not
                woken = await bench.woken(event) if notifies else True
            assert woken, "the settle of another process woke nobody"
            await unwatch()
            verdict = await bench.claim(bench.ask())
            assert isinstance(verdict, Replay)
            assert verdict.record.result == b"from afar"
        finally:
            await bench.aclose()

    in_colour(colour, body)


def test_sqlite_is_shared_between_processes(sqlite_url: str, colour: Colour) -> None:
    wakes_across_processes(sqlite_url, colour, notifies=False)


def test_postgres_wakes_a_waiter_in_another_process_by_asyncpg(asyncpg_url: str) -> None:
    wakes_across_processes(asyncpg_url, "async")


def test_postgres_wakes_a_waiter_in_another_process_by_psycopg(psycopg_url: str) -> None:
    wakes_across_processes(psycopg_url, "sync")


def test_mariadb_is_shared_between_processes_by_asyncmy(asyncmy_url: str) -> None:
    wakes_across_processes(asyncmy_url, "async", notifies=False)


def test_mariadb_is_shared_between_processes_by_pymysql(pymysql_url: str) -> None:
    wakes_across_processes(pymysql_url, "sync", notifies=False)


def test_redis_wakes_a_waiter_in_another_process(redis_server: services.RedisServer, colour: Colour) -> None:
    wakes_across_processes(redis_server.url, colour)


def test_redis_cluster_wakes_a_waiter_in_another_process(
    redis_cluster: services.RedisCluster, colour: Colour
) -> None:
    wakes_across_processes(redis_cluster.url, colour)


def test_redis_sentinel_wakes_a_waiter_in_another_process(
    redis_sentinel: services.RedisSentinel, colour: Colour
) -> None:
    wakes_across_processes(redis_sentinel.url, colour)
