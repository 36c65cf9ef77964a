"""From commit to visible under a steady load; and what is lost, doubled or reordered when relays are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benches.core_parts.measure import Figure, Term, say
from semel.messaging import Message, Outbox, Relay
from semel.testing import services

__all__ = ["latency", "storm"]


def latency(*, quick: bool) -> list[Figure]:
    """The rate that the relay can carry is found first; then half of it, and the times of each message."""
    with services.postgres(fsync=True) as database, services.redis() as broker:
        url = database.url.replace("postgresql://", "postgresql+psycopg://")
        capacity = asyncio.run(_capacity(url, broker.url, 1 if quick else 3))
        seconds = 2 if quick else 10
        times = sorted(asyncio.run(_steady(url, broker.url, capacity / 2, seconds)))
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    say(f"capacity {capacity:,.0f} /s, {len(times)} messages")
    return [
        Figure(
            "commit → visible at half of what one writer can add: p99",
            Term("p99", p99 * 1e3, "ms"),
            Term("p50", p50 * 1e3, "ms"),
            "≤",
            5,
            f"{capacity / 2:,.0f} messages/s, {len(times):,} of them",
        )
    ]


async def _capacity(url: str, sink: str, seconds: float) -> float:
    """Messages per second from one writer through the relay, as fast as they go."""
    outbox = Outbox(url, table="latency")
    await outbox.acreate()
    relay = Relay(outbox, {"t": f"{sink}?stream=warm"})
    task = asyncio.create_task(relay.run())
    start = time.perf_counter()
    await asyncio.to_thread(_write, url, outbox, 0.0, seconds, "t")
    while relay.report.sent < _write.count:  # type: ignore[attr-defined]
        await asyncio.sleep(0.005)
    rate = relay.report.sent / (time.perf_counter() - start)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await relay.aclose()
    outbox.close()
    return rate


def _write(url: str, outbox: Outbox, rate: float, seconds: float, topic: str) -> None:
    engine = create_engine(url)
    start, count = time.perf_counter(), 0
    while (now := time.perf_counter() - start) < seconds:
        if rate and count > now * rate:
            time.sleep(min(0.001, count / rate - now))
            continue
        with Session(engine) as session, session.begin():
            body = {"at": 0.0, "text": "x" * 240}
            outbox.add(
                session, Message(topic, body, key=f"k{count % 500}", headers={"at": repr(time.time())})
            )
        count += 1
    _write.count = count  # type: ignore[attr-defined]
    engine.dispose()


async def _steady(url: str, sink: str, rate: float, seconds: float) -> list[float]:
    outbox = Outbox(url, table="latency")
    relay = Relay(outbox, {"t": f"{sink}?stream=steady"})
    task = asyncio.create_task(relay.run())
    client: Any = redis.asyncio.Redis.from_url(sink)
    times: list[float] = []

    async def read() -> None:
        last = "0"
        while True:
            found = await client.execute_command(
                "XREAD", "BLOCK", 1000, "COUNT", 500, "STREAMS", "steady", last
            )
            now = time.time()
            for entries in found.values() if isinstance(found, dict) else [e for _, e in found or ()]:
                flat = entries[0] if entries and isinstance(entries[0], list) else entries
                for entry, fields in flat:
                    last = entry
                    pairs = (
                        fields
                        if isinstance(fields, dict)
                        else dict(zip(fields[::2], fields[1::2], strict=True))
                    )
                    times.append(now - float(json.loads(pairs[b"headers"])["at"]))

    reader = asyncio.create_task(read())
    writer = subprocess.Popen(
        [sys.executable, "-m", "benches.messaging_parts.steady", url, str(rate), str(seconds)],
        cwd=Path(__file__).resolve().parents[2],
    )
    while writer.poll() is None:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    for one in (reader, task):
        one.cancel()
    await asyncio.gather(reader, task, return_exceptions=True)
    await client.aclose()
    await relay.aclose()
    outbox.close()
    return times[len(times) // 10 :]  # the first tenth warms up


def storm(*, quick: bool) -> list[Figure]:
    """A relay process is killed with SIGKILL every two seconds while a writer writes: the stream is compared afterwards."""
    kills, every = (1, 1.0) if quick else (5, 2.0)
    with (
        services.postgres(fsync=True) as database,
        services.redis(appendonly="always") as broker,
        tempfile.TemporaryDirectory() as folder,
    ):
        url = database.url.replace("postgresql://", "postgresql+psycopg://")
        outbox = Outbox(url, table="storm", parts=8)
        outbox.create()
        told = Path(folder) / "told"
        writer = _start("write", url, str(told))
        for number in range(kills):
            relay = _start("relay", url, broker.url)
            time.sleep(every)
            relay.send_signal(signal.SIGKILL)
            relay.wait()
            say(f"kill {number + 1} of {kills}")
        writer.terminate()
        writer.wait()
        asyncio.run(_rest(outbox, broker.url))
        lost, doubled, inverted, count = _compare(broker.url, told)
        outbox.close()
    note = f"{count:,} messages, {kills} kills"
    return [
        Figure(
            f"kill -9 of the relay every {every:g} s: lost", Term("messages", lost, ""), None, "=", 0, note
        ),
        Figure("doubled", Term("messages", doubled, ""), None, "=", 0, note),
        Figure("out of order within their key", Term("messages", inverted, ""), None, "=", 0, note),
    ]


def _start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "benches.messaging_parts.steady", *words],
        cwd=Path(__file__).resolve().parents[2],
    )


async def _rest(outbox: Outbox, sink: str) -> None:
    async with Relay(outbox, {"t": f"{sink}?stream=storm"}, lease=1) as relay:
        await relay.drain()


def _compare(sink: str, told: Path) -> tuple[int, int, int, int]:
    client = redis.Redis.from_url(sink)
    wanted = set(told.read_text().split())
    ids: list[str] = []
    last: dict[bytes, int] = {}
    inverted = 0
    entries: Any = client.xrange("storm")
    for _, fields in entries:
        ids.append(fields[b"id"].decode())
        number = json.loads(fields[b"data"])["n"]
        inverted += number <= last.get(fields[b"key"], -1)
        last[fields[b"key"]] = number
    client.close()
    return len(wanted - set(ids)), len(ids) - len(set(ids)), inverted, len(ids)


def _storm_writer(url: str, told: str) -> None:
    """Until it is ended. What it writes down has been committed."""
    outbox = Outbox(url, table="storm")
    engine = create_engine(url)
    with Path(told).open("a", buffering=1) as file:
        for number in range(10**9):
            with Session(engine) as session, session.begin():
                outbox.add(session, Message("t", {"n": number}, key=f"k{number % 50}", id=f"m{number}"))
            file.write(f"m{number}\n")


async def _storm_relay(url: str, sink: str) -> None:
    await Relay(Outbox(url, table="storm"), {"t": f"{sink}?stream=storm"}, lease=1).run()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    with contextlib.suppress(KeyboardInterrupt):
        if sys.argv[1] == "write":
            _storm_writer(sys.argv[2], sys.argv[3])
        elif sys.argv[1] == "relay":
            asyncio.run(_storm_relay(sys.argv[2], sys.argv[3]))
        else:
            _write(
                sys.argv[1], Outbox(sys.argv[1], table="latency"), float(sys.argv[2]), float(sys.argv[3]), "t"
            )
