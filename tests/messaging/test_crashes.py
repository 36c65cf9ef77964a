"""Relays, consumers, brokers and databases that die: 0 lost, 0 doubled, 0 reordered per key at an exact sink."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from semel.messaging import Message, Outbox, Relay
from semel.testing import services
from tests.messaging.conftest import Home

ROOT = Path(__file__).resolve().parents[2]


class Lab:
    """A database, a stream, and the processes that work on them."""

    def __init__(self, home: Home, server: services.RedisServer) -> None:
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

    def fill(self, count: int, name: str = "m", first: int = 0) -> list[str]:
        outbox = Outbox(self.home.url, table=self.home.table, parts=4)
        ids = []
        with Session(self.home.engine) as session, session.begin():
            for number in range(first, first + count):
                ids.append(f"{name}{number}")
                outbox.add(session, Message("orders", {"n": number}, key=f"k{number % 5}", id=ids[-1]))
        outbox.close()
        return ids

    def drain(self) -> dict[str, int]:
        process = self.start("relay", "--drain")
        said, _ = process.communicate(timeout=60)
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
def lab(home: Home, redis_server: services.RedisServer) -> Iterator[Lab]:
    made = Lab(home, redis_server)
    yield made
    made.close()


@pytest.mark.parametrize("point", ["relay.chosen", "relay.planned", "relay.published"])
def test_kill_9_at_each_point(lab: Lab, point: str) -> None:
    """MW3, MW4, MW5."""
    ids = lab.fill(60)
    victim = lab.start("relay", "--fault", f"kill:{point}:2")
    assert victim.wait(30) == -signal.SIGKILL
    report = lab.drain()
    lab.check(ids)
    assert lab.home.count() == 0
    assert report["duplicates"] > 0 or point != "relay.published"


def test_sigstop_beyond_the_lease(lab: Lab) -> None:
    """MW6: the manifest is written and the batch about to be sent when it stops; its heir has sent it when it wakes."""
    ids = lab.fill(60)
    # One loop: a second one could be stopped in the middle of its transaction, and SQLite has one write lock for all.
    zombie = lab.start("relay", "--fault", "stop:relay.planned:1", "--drain", "--loops", "1")
    assert zombie.stdout is not None
    assert zombie.stdout.readline() == "reached relay.planned\n"
    assert lab.drain()["sent"] == 60
    lab.check(ids)
    zombie.send_signal(signal.SIGCONT)
    said, _ = zombie.communicate(timeout=30)
    report = json.loads(said)
    lab.check(ids)
    assert report["sent"] == 0
    assert report["overtaken"] > 0


@pytest.mark.parametrize("point", ["consumer.handled", "consumer.committed"])
def test_a_consumer_killed_around_its_commit(
    sqlite_home: Home, redis_server: services.RedisServer, point: str
) -> None:
    """MW9, MW11: before the commit nothing is left, after it the message is known."""
    lab = Lab(sqlite_home, redis_server)
    with sqlite_home.engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id varchar(60))"))
    ids = lab.fill(10)
    lab.drain()
    lab.sink += "&idle=0.3"
    victim = lab.start("consume", "--fault", f"kill:{point}:4")
    assert victim.wait(30) == -signal.SIGKILL
    heir = lab.start("consume")
    until, found = time.monotonic() + 20, list[str]()
    while time.monotonic() < until:
        with sqlite_home.engine.connect() as connection:
            found = sorted(connection.execute(text("SELECT id FROM effects")).scalars())
        pending = lab.client.xpending(lab.stream, "shipping")
        if len(found) >= 10 and pending["pending"] == 0:
            break
        time.sleep(0.05)
    heir.terminate()
    assert found == sorted(ids)
    lab.close()


@pytest.mark.parametrize("broken", ["relays", "redis", "postgres"])
def test_storm(broken: str) -> None:
    """Writers write while relays are killed again and again, or the broker, or the database."""
    with (
        services.redis(appendonly="always") as broker,
        services.postgres(fsync=broken == "postgres") as database,
    ):
        url = database.url.replace("postgresql://", "postgresql+psycopg://")
        lab = Lab(Home(url, "storm", create_engine(url)), broker)
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
        said, _ = writer.communicate(timeout=60)
        told += said.split()
        for relay in relays:
            relay.terminate()
            relay.wait(20)
        lab.home.engine.dispose()
        lab.drain()
        lab.check(told)
        with lab.home.engine.connect() as connection:
            waiting = connection.execute(text("SELECT count(*) FROM storm_outbox")).scalar()
        assert waiting == 0
        assert broken == "postgres" or len(told) == 400
        lab.close()
        lab.home.engine.dispose()


def test_torn_log(sqlite_home: Home) -> None:
    """Redis dies in the middle of writing its log: of a batch everything is there, or nothing, the number included."""
    database = Path(sqlite_home.url.removeprefix("sqlite:///"))
    with services.redis(appendonly="always") as broker:
        lab = Lab(sqlite_home, broker)
        before = lab.fill(10, "a")
        lab.drain()
        (log,) = broker.folder.glob("**/*.incr.aof")
        kept = len(log.read_bytes())
        after = lab.fill(40, "b", 10)
        victim = lab.start("relay", "--fault", "kill:relay.published:1", "--batch", "50")
        assert victim.wait(30) == -signal.SIGKILL
        whole = log.read_bytes()
        files = {path: path.read_bytes() for path in database.parent.glob(f"{database.name}*")}
        counts = set()
        for cut in (3, 400, (len(whole) - kept) // 2, len(whole) - kept - 20):
            broker.kill()
            log.write_bytes(whole[:-cut])
            sqlite_home.engine.dispose()
            for path, content in files.items():
                path.write_bytes(content)
            broker.start()
            counts.add(lab.client.xlen(lab.stream))
            asyncio.run(_drain(lab))
            lab.check(before + after)
        assert counts - {50}, "no cut took anything away"
        lab.close()


async def _drain(lab: Lab) -> None:
    outbox = Outbox(lab.home.url, table=lab.home.table, parts=4)
    async with Relay(outbox, {"*": lab.sink}, lease=0.5, batch=50) as relay:
        await relay.drain()
    outbox.close()
