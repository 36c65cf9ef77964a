"""Redis → Redis: how fast the backlog of an outbox in Redis is carried, beside loops written by hand."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import redis

from benches.core_parts.measure import Figure, Term, say
from benches.messaging_parts.drain import BATCH, BODY
from semel.messaging import Message, Outbox, Relay
from semel.testing import services

__all__ = ["bench"]


def _fill(outbox: Outbox, client: redis.Redis, count: int) -> None:
    for start in range(0, count, 1000):
        with client.pipeline() as pipe:
            outbox.add(
                pipe,
                *(
                    Message("orders", BODY, key=f"k{n % 1000}")
                    for n in range(start, min(start + 1000, count))
                ),
            )
            pipe.execute()


def _fill_by_hand(client: redis.Redis, count: int) -> None:
    text = Message("orders", BODY).data
    for start in range(0, count, 1000):
        with client.pipeline() as pipe:
            for n in range(start, min(start + 1000, count)):
                fields = {
                    "id": str(n),
                    "topic": "orders",
                    "key": f"k{n % 1000}",
                    "headers": "{}",
                    "data": text,
                }
                pipe.xadd("waiting", fields)  # type: ignore[arg-type]
            pipe.execute()


def _naive(source: redis.Redis, sink: redis.Redis, page: int) -> int:
    """As it is written by hand: read, publish, delete; one at a time, or a page. At least once, one process only."""
    count = 0
    while True:
        found: Any = source.xrange("waiting", count=page)
        if not found:
            return count
        with sink.pipeline(transaction=False) as pipe:
            for _, fields in found:
                pipe.xadd("naive", fields)
            pipe.execute()
        source.xdel("waiting", *(number for number, _ in found))
        count += len(found)


def _ours(outbox: Outbox, sink: str) -> int:
    async def drain() -> int:
        async with Relay(outbox, {"orders": f"{sink}?stream=ours"}, batch=BATCH) as relay:
            return (await relay.drain()).sent

    return asyncio.run(drain())


def bench(*, quick: bool) -> list[Figure]:
    """Medians of rounds in turns."""
    count, rounds = (2_000, 1) if quick else (20_000, 5)
    rates: dict[str, list[float]] = {"semel": [], "page": [], "row": []}
    with services.redis() as home, services.redis() as broker:
        source, sink = redis.Redis.from_url(home.url), redis.Redis.from_url(broker.url)
        outbox = Outbox(home.url, table="bench")
        ways: dict[str, Callable[[], int]] = {
            "semel": lambda: _ours(outbox, broker.url),
            "page": lambda: _naive(source, sink, BATCH),
            "row": lambda: _naive(source, sink, 1),
        }
        for number in range(rounds + 1):
            for name, way in ways.items():
                if name == "semel":
                    _fill(outbox, source, count)
                else:
                    _fill_by_hand(source, count if name == "page" else count // 10)
                start = time.perf_counter()
                done = way()
                rate = done / (time.perf_counter() - start)
                if number or quick:
                    rates[name].append(rate)
                sink.delete("ours", "naive")  # not the frontiers: a sink that forgets them has lost its tail
                say(f"{name}: {rate:,.0f} /s")
        outbox.close()
        for client in (source, sink):
            client.close()
    found = {name: statistics.median(seen) for name, seen in rates.items()}
    semel = Term("semel", found["semel"], "/s")
    return [
        Figure(
            "outbox in Redis, batch 1,000: messages/s",
            semel,
            Term("a page at a time, by hand", found["page"], "/s"),
        ),
        Figure("outbox in Redis: messages/s", semel, Term("row by row, by hand", found["row"], "/s")),
    ]
