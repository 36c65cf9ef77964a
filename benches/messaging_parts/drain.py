"""PostgreSQL → Redis: how fast a backlog is carried, beside the limit of the database and a loop written by hand."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psycopg
import redis
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benches.core_parts.measure import Figure, Term, say
from semel.messaging import Message, Outbox, Relay
from semel.testing import services

__all__ = ["bench", "fill"]

BODY = {"text": "x" * 240}
BATCH = 1000


def fill(url: str, outbox: Outbox, count: int, keys: int = 1000) -> None:
    """So many messages, a thousand in a transaction."""
    engine = create_engine(url)
    for start in range(0, count, 1000):
        with Session(engine) as session, session.begin():
            for n in range(start, min(start + 1000, count)):
                outbox.add(session, Message("orders", BODY, key=f"k{n % keys}"))
    engine.dispose()


def _limit(url: str, table: str) -> int:
    """Claim and delete, a thousand rows a transaction, nothing published: what the database allows one client."""
    count = 0
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        while True:
            rows = connection.execute(
                f"DELETE FROM {table}_outbox o USING (SELECT part, seq FROM {table}_outbox ORDER BY part, seq LIMIT {BATCH}"
                " FOR UPDATE SKIP LOCKED) g WHERE o.part = g.part AND o.seq = g.seq"
                " RETURNING o.seq, o.id, o.topic, o.key, o.headers, o.body"
            ).fetchall()
            connection.commit()
            count += len(rows)
            if not rows:
                return count


def _naive(url: str, table: str, sink: redis.Redis, most: int) -> int:
    """As it is written at first: row by row, published, then deleted. At least once, and no order among several."""
    count = 0
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        while count < most:
            row = connection.execute(
                f"SELECT part, seq, id, topic, key, headers, body FROM {table}_outbox ORDER BY seq LIMIT 1"
                " FOR UPDATE SKIP LOCKED"
            ).fetchone()
            if row is None:
                return count
            fields = {"id": row[2], "topic": row[3], "key": row[4], "headers": row[5], "data": bytes(row[6])}
            sink.xadd("naive", fields)  # type: ignore[arg-type]
            connection.execute(f"DELETE FROM {table}_outbox WHERE part = %s AND seq = %s", row[:2])
            connection.commit()
            count += 1
    return count


async def _ours(outbox: Outbox, sink: str) -> int:
    async with Relay(outbox, {"orders": f"{sink}?stream=ours"}, batch=BATCH) as relay:
        return (await relay.drain()).sent


def bench(*, quick: bool) -> list[Figure]:
    """Medians of rounds in turns."""
    count, rounds = (2_000, 1) if quick else (20_000, 5)
    with services.postgres(fsync=True) as database, services.redis() as broker:
        url = database.url.replace("postgresql://", "postgresql+psycopg://")
        client = redis.Redis.from_url(broker.url)
        outbox = Outbox(url, table="bench")
        outbox.create()
        rates: dict[str, list[float]] = {"limit": [], "naive": [], "semel": []}

        async def limit() -> int:
            return await asyncio.to_thread(_limit, url, "bench")

        async def naive() -> int:
            return await asyncio.to_thread(_naive, url, "bench", client, count // 10)

        async def ours() -> int:
            return await _ours(outbox, broker.url)

        ways: dict[str, Callable[[], Coroutine[Any, Any, int]]] = {
            "limit": limit,
            "naive": naive,
            "semel": ours,
        }
        for number in range(rounds + 1):
            for name, way in ways.items():
                fill(url, outbox, count if name != "naive" else count // 10)
                database.execute("CHECKPOINT")
                start = time.perf_counter()
                done = asyncio.run(way())
                seconds = time.perf_counter() - start
                if number or quick:
                    rates[name].append(done / seconds)
                client.delete(
                    "ours", "naive"
                )  # not the frontiers: a sink that forgets them has lost its tail
                say(f"{name}: {done / seconds:,.0f} /s")
        client.close()
        outbox.close()
    found = {name: statistics.median(seen) for name, seen in rates.items()}
    semel = Term("semel", found["semel"], "/s")
    return [
        Figure(
            "drain, batch 1,000: messages/s",
            semel,
            Term("claim and delete alone", found["limit"], "/s"),
            "≥",
            0.35,
        ),
        Figure("drain: messages/s", semel, Term("row by row, by hand", found["naive"], "/s")),
    ]
