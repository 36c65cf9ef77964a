"""Growth on Redis: the same calls on a server with ten thousand records and on one with a million, in turns."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import redis

from benches.core_parts.measure import Contestant, Effort, Figure, Term, closed_loop, compare_latencies, say
from benches.core_parts.on_redis import CALLERS, fresh_keys, ours
from semel import AsyncSemel
from semel.testing import services

__all__ = ["bench"]

SMALL = 10_000


def bench(effort: Effort) -> list[Figure]:
    large = 20_000 if effort.quick else 1_000_000
    with services.redis() as few, services.redis() as many:
        return asyncio.run(_bench(few, many, large, effort))


async def _bench(
    few: services.RedisServer, many: services.RedisServer, large: int, effort: Effort
) -> list[Figure]:
    own = [f"own-{number}" for number in range(SMALL)]
    async with AsyncSemel(few.url) as small, AsyncSemel(many.url) as big:
        for once in (small, big):
            await closed_loop(ours(once)[0].call, own, CALLERS)
        say(f"filling a server with {large:,} records")
        copies(many, large - SMALL)
        held = int(many.command("DBSIZE"))
        if held < large:
            raise RuntimeError(f"the server holds {held} keys, not {large}")

        def random_own(count: int) -> list[str]:
            return [own[int.from_bytes(os.urandom(4), "big") % SMALL] for _ in range(count)]

        contest = [
            Contestant(f"{verb} {size}", prepare, ours(once)[0].call)
            for verb, prepare in (("replay", random_own), ("first", fresh_keys))
            for size, once in ((f"{SMALL:,}", small), (f"{large:,}", big))
        ]
        p50 = await compare_latencies(contest, effort.rounds * 4)
    return [
        Figure(
            f"{verb}: p50 with {large:,} records",
            Term(f"{large:,} records", p50[f"{verb} {large:,}"], "µs"),
            Term(f"{SMALL:,} records", p50[f"{verb} {SMALL:,}"], "µs"),
            "" if effort.quick else "≤",
            1.4,
        )
        for verb in ("replay", "first")
    ]


def copies(server: services.RedisServer, count: int) -> None:
    """Copies of one packed record under names that look like those of other scopes."""
    with redis.Redis.from_url(server.url) as client:
        name: Any = next(key for key in client.scan_iter(count=1000) if client.type(key) == b"string")
        packed: Any = client.get(name)
        left, ends = count, len(name) - 32
        while left > 0:
            pipe = client.pipeline(transaction=False)
            for _ in range(min(left, 5_000)):
                pipe.set(name[:ends] + os.urandom(32), packed, ex=86_400)
            left -= len(pipe)
            pipe.execute()
