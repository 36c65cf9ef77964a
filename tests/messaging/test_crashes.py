"""Storms: several relays, writers that go on, and deaths at any moment. 0 lost, 0 doubled, 0 reordered per key.

Deaths at exact places are cells of the crash matrix (`semel chaos --only '*/relay-*'`) for outboxes in SQL databases, and here for
one in Redis.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, text

from semel.messaging import Inbox, Message, Relay
from semel.messaging.sql_ledger import SqlLedger
from semel.testing import services
from tests.messaging.conftest import Home, RedisPlace, awaited, redis_place

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)  # the waits in here are bounded, and add up on a busy machine
PATIENCE = 120.0  # seconds: a process that starts beside thirty busy ones imports for a minute


class Lab:
    """A database, a stream, and the processes that work on them."""

    def __init__(self, home: Home | RedisPlace, server: services.RedisServer) -> None:
        self.home = home
        self.stream = f"s{secrets.token_hex(4)}"
        self.sink = f"{server.url}?stream={self.stream}"
        self.client = redis.Redis.from_url(server.url)
        self.processes: list[subprocess.Popen[str]] = []
        home.outbox(parts=4).close()

    def start(self, what: str, *more: str) -> subprocess.Popen[str]:
        routes = json.dumps({"*": self.sink}) if what == "relay" else self.sink
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.messaging.worker", what, self.home.url, self.home.table,
             "--routes", routes, *more],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def fill(self, count: int) -> list[str]:
        ids = [f"m{number}" for number in range(count)]
        with self.home.outbox(parts=4) as outbox, self.home.transaction() as target:
            for number, name in enumerate(ids):
                outbox.add(target, Message("orders", {"n": number}, key=f"k{number % 5}", id=name))
        return ids

    def drain(self) -> dict[str, int]:
        process = self.start("relay", "--drain")
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        found: dict[str, int] = json.loads(said)
        return found

    def check(self, wanted: list[str]) -> None:
        """Everything once, and in order per key."""
        entries: Any = self.client.xrange(self.stream)
        ids = [fields[b"id"].decode() for _, fields in entries]
        lost, doubled = set(wanted) - set(ids), len(ids) - len(set(ids))
        last: dict[bytes, int] = {}
        inverted = 0
        for _, fields in entries:
            number = json.loads(fields[b"data"])["n"]
            inverted += number <= last.get(fields[b"key"], -1)
            last[fields[b"key"]] = number
        assert (len(lost), doubled, inverted) == (0, 0, 0), (sorted(lost)[:5], doubled, inverted)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.client.close()


@pytest.fixture
def lab(redis_server: services.RedisServer) -> Iterator[Lab]:
    place = redis_place(redis_server)
    made = Lab(place, redis_server)
    yield made
    made.close()
    place.close()


@pytest.mark.parametrize("point", ["relay.chosen", "relay.planned", "relay.published"])
def test_kill_9_at_each_point_over_an_outbox_in_redis(lab: Lab, point: str) -> None:
    """MW3, MW4, MW5."""
    ids = lab.fill(60)
    victim = lab.start("relay", "--fault", f"kill:{point}:2")
    assert victim.wait(PATIENCE) == -signal.SIGKILL
    report = lab.drain()
    lab.check(ids)
    assert lab.home.count() == 0
    assert report["duplicates"] > 0 or point != "relay.published"


def test_sigstop_beyond_the_lease_over_an_outbox_in_redis(lab: Lab) -> None:
    """MW6: the manifest is written and the batch about to be sent when it stops; its heir has sent it when it wakes."""
    ids = lab.fill(60)
    zombie = lab.start("relay", "--fault", "stop:relay.planned:1", "--drain", "--loops", "1")
    assert zombie.stdout is not None
    assert zombie.stdout.readline() == "reached relay.planned\n"
    assert lab.drain()["sent"] == 60
    lab.check(ids)
    zombie.send_signal(signal.SIGCONT)
    said, _ = zombie.communicate(timeout=PATIENCE)
    report = json.loads(said)
    lab.check(ids)
    assert report["sent"] == 0
    assert report["overtaken"] > 0


@pytest.mark.parametrize("broken", ["relays", "redis", "postgres"])
def test_storm(broken: str) -> None:
    """Writers write while relays are killed again and again, or the broker, or the database."""
    with (
        services.redis(appendonly="always") as broker,
        services.postgres(fsync=broken == "postgres") as database,
    ):
        url = database.url.replace("postgresql://", "postgresql+psycopg://")
        home = Home(url, "storm", create_engine(url))
        lab = Lab(home, broker)
        writer = lab.start("write", "--count", "400", "--name", "w")
        relays = [lab.start("relay") for _ in range(2)]
        assert writer.stdout is not None
        told = [writer.stdout.readline().strip() for _ in range(20)]
        for round_ in range(4):
            time.sleep(0.35)
            if broken == "relays":
                relays[round_ % 2].kill()
                relays[round_ % 2].wait()
                relays[round_ % 2] = lab.start("relay")
            elif round_ == 1:
                server = broker if broken == "redis" else database
                server.kill()
                time.sleep(0.2)
                server.start()
        told += writer.stdout.read().split()  # not `communicate`: it would pass by what was read ahead
        writer.wait(PATIENCE)
        for relay in relays:
            relay.terminate()
            relay.wait(PATIENCE)
        home.engine.dispose()
        lab.drain()
        lab.check(told)
        with home.engine.connect() as connection:
            waiting = connection.execute(text("SELECT count(*) FROM storm_outbox")).scalar()
        assert waiting == 0
        assert broken == "postgres" or len(told) == 400
        lab.close()
        home.engine.dispose()


# ---- found by cells of the matrix


class Deaf:
    """A source whose driver swallows a cancellation, as `asyncio.wait_for` did until Python 3.12."""

    extends_every = 60.0

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.swallowed = 0

    async def receive(self, limit: int) -> Sequence[Any]:
        del limit
        self.asked.set()
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.swallowed += 1
            if self.swallowed > 1:
                raise
        return []

    async def aclose(self) -> None:
        """Nothing is open."""


@awaited
async def test_a_consumer_ends_though_its_driver_swallowed_the_cancellation(sqlite_home: Home) -> None:
    with Inbox(sqlite_home.url, consumer="c", table=sqlite_home.table) as inbox:
        inbox.handler("*")(lambda _: None)
        source = Deaf()
        running = asyncio.create_task(inbox.run(source))
        await source.asked.wait()
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=30)
        assert (len(done), source.swallowed) == (1, 1)
        assert running.cancelled()


@awaited
async def test_a_relay_does_not_overtake_itself(sqlite_home: Home) -> None:
    """Its heartbeat and its drain may look for free parts at the same time."""
    with sqlite_home.outbox(parts=4) as outbox:
        async with Relay(outbox, {"*": lambda _: None}) as relay:
            member = relay._membership
            await member.join()
            await asyncio.gather(member.rebalance(), member.rebalance())
            assert relay.parts == [0, 1, 2, 3]
            await member.rebalance()
            assert relay.report.overtaken == 0


@awaited
async def test_relays_that_are_slower_than_their_leases_overtake_each_other_and_get_on(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes a part goes on with what is under way there: no batch is begun for ever."""
    for name in ("run", "read"):
        monkeypatch.setattr(SqlLedger, name, starved(getattr(SqlLedger, name), 0.15))
    told = list[str]()
    with sqlite_home.outbox(parts=2) as outbox:
        with sqlite_home.transaction() as target:
            outbox.add(target, *(Message("orders", {}, key=f"k{n % 3}", id=f"m{n}") for n in range(40)))
        relays = [
            Relay(outbox, {"*": lambda row: told.append(row.id)}, lease=0.05, batch=5) for _ in range(2)
        ]
        running = [asyncio.create_task(relay.run()) for relay in relays]
        async with asyncio.timeout(PATIENCE):
            while sqlite_home.count() or not any(relay.report.overtaken for relay in relays):
                await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert set(told) == {f"m{n}" for n in range(40)}


def starved(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    async def late(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(seconds)
        return await call(*args, **kwargs)

    return late
