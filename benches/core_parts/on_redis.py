"""Redis: the public API against PING, and against the very same scripts through redis-py."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import redis
import redis.asyncio

from benches.core_parts.measure import (
    Contestant,
    Effort,
    Figure,
    Term,
    closed_loop,
    compare_crowds,
    compare_latencies,
    compare_threadless,
    work,
    work_sync,
)
from semel import AsyncSemel, Semel
from semel.keys import make_scope
from semel.model import Ask, Kind, Settle
from semel.results import codec_for
from semel.stores.redis import RedisStore
from semel.stores.redis.courier import pack
from semel.stores.redis.record import CLAIM, SETTLE, pack_ask
from semel.testing import services

__all__ = ["bench", "ping_on"]

CALLERS = 64
_PING = pack((b"PING",))
_numbers = itertools.count()


def fresh_keys(count: int) -> list[str]:
    return [f"first-{next(_numbers)}" for _ in range(count)]


def done_keys(count: int) -> list[str]:
    return [f"done-{number % 1000}" for number in range(count)]


# --------------------------------------------------------------------------------- the same scripts, bare
Bare = tuple[tuple[Any, ...], tuple[Any, ...]]


def bare_calls(store: RedisStore, keys: Sequence[str]) -> list[Bare]:
    """The arguments of EVALSHA for a first execution (claim, settle), packed before the clock starts."""
    result = codec_for(work, None).encode(work_sync(), compress_over=None)
    made = []
    for key in keys:
        scope = make_scope("semel", "default", "default", key, "full")
        ask = Ask(scope, os.urandom(16), 10.0, 86_400.0)
        end = Settle(scope, ask.nonce, Kind.DONE, 86_400.0, result=result)
        settle_keys = store.settle_keys(end)
        claim_keys = (settle_keys[0], settle_keys[1], settle_keys[2], settle_keys[4])
        claim = (CLAIM.sha1, len(claim_keys), *claim_keys, pack_ask(ask, 0.0))
        settle = (SETTLE.sha1, len(settle_keys), *settle_keys, *store.settle_args(end))
        made.append((claim, settle))
    return made


def ping_on(once: AsyncSemel) -> Contestant:
    """PING as the first thing in the queue of the very connection that the calls use: no layer of ours above it."""
    store: Any = once._store
    link = store._link

    async def ping(_: int) -> Any:
        wire = next(iter(link._home.wires[0].values()))
        now = asyncio.get_running_loop().time()
        return await wire.send(_PING, now, 1.0, now + 2.0)

    return Contestant("PING", range, ping)


def ours(once: AsyncSemel) -> tuple[Contestant, Contestant]:
    async def call(key: str) -> None:
        await once.execute(key, work)

    return Contestant("first", fresh_keys, call), Contestant("replay", done_keys, call)


def through_redis_py(store: RedisStore, pool: redis.asyncio.Redis) -> tuple[Contestant, Contestant]:
    async def first(bare: Bare) -> None:
        await pool.evalsha(*bare[0])
        await pool.evalsha(*bare[1])

    async def replay(bare: Bare) -> None:
        await pool.evalsha(*bare[0])

    return (
        Contestant("first", lambda count: bare_calls(store, fresh_keys(count)), first),
        Contestant("replay", lambda count: bare_calls(store, done_keys(count)), replay),
    )


# ------------------------------------------------------------------------------------------------ the figures
def bench(effort: Effort) -> list[Figure]:
    with services.redis() as server:
        return [
            *asyncio.run(_async_figures(server, effort)),
            *_sync_figures(server, effort),
            *_memory(server, effort),
        ]


async def _async_figures(server: services.RedisServer, effort: Effort) -> list[Figure]:
    async with AsyncSemel(server.url) as once:
        await closed_loop(ours(once)[1].call, done_keys(1000), CALLERS)
        return [
            *await _latency(once, effort),
            *await _crowd(once, server, effort),
            *await _trips(once, server),
        ]


async def _latency(once: AsyncSemel, effort: Effort) -> list[Figure]:
    first, replay = ours(once)
    p50 = await compare_latencies([ping_on(once), replay, first], effort.rounds * 4)
    ping = Term("PING", p50["PING"], "µs")
    return [
        Figure("1 caller, replay: p50", Term("replay", p50["replay"], "µs"), ping, "≤", 1.8),
        Figure("1 caller, first execution: p50", Term("first", p50["first"], "µs"), ping, "≤", 4),
    ]


async def _crowd(once: AsyncSemel, server: services.RedisServer, effort: Effort) -> list[Figure]:
    store: Any = once._store
    figures = []
    async with redis.asyncio.Redis.from_url(server.url) as pool:
        pairs = zip(ours(once), through_redis_py(store, pool), (3, 2.5), strict=True)
        for mine, bare, goal in pairs:
            name = mine.name
            contest = [
                Contestant("semel", mine.prepare, mine.call),
                Contestant("pool", bare.prepare, bare.call),
            ]
            rates = await compare_crowds(contest, effort.longer(4), CALLERS)
            mine_rate, bare_rate = rates["semel"], rates["pool"]
            figures += [
                Figure(
                    f"64 callers, {name}: throughput",
                    Term("semel", mine_rate.per_second, "/s"),
                    Term("redis-py pool, same scripts", bare_rate.per_second, "/s"),
                    "≥",
                    goal,
                ),
                Figure(
                    f"64 callers, {name}: client CPU per call",
                    Term("semel", mine_rate.cpu, "µs"),
                    Term("redis-py pool, same scripts", bare_rate.cpu, "µs"),
                    "≤",
                    0.3,
                ),
            ]
    return figures


def _script_calls(server: services.RedisServer) -> int:
    stats = server.info("commandstats")
    counted: int = sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))
    return counted


async def _trips(once: AsyncSemel, server: services.RedisServer) -> list[Figure]:
    count = 500
    figures = []
    for one, goal in zip(ours(once), (2, 1), strict=True):
        server.command("CONFIG", "RESETSTAT")
        await closed_loop(one.call, one.prepare(count), CALLERS)
        calls = Term("script calls per call", _script_calls(server) / count, "")
        figures.append(
            Figure(f"script calls per {one.name}, by the server's statistics", calls, None, "=", goal)
        )
    return figures


def _sync_figures(server: services.RedisServer, effort: Effort) -> list[Figure]:
    with Semel(server.url) as once, redis.Redis.from_url(server.url) as client:
        store: Any = once._store

        def mine(key: str) -> None:
            once.execute(key, work_sync)

        def first(bare: Bare) -> None:
            client.evalsha(*bare[0])
            client.evalsha(*bare[1])

        def replay(bare: Bare) -> None:
            client.evalsha(*bare[0])

        figures = []
        for name, keys, bare in (("first", fresh_keys, first), ("replay", done_keys, replay)):
            contest = [
                Contestant("semel", keys, mine),
                Contestant("bare", lambda count, keys=keys: bare_calls(store, keys(count)), bare),  # type: ignore[misc]
            ]
            rates = compare_threadless(contest, effort)
            figures.append(
                Figure(
                    f"sync API, 1 caller, {name}: throughput",
                    Term("semel", rates["semel"].per_second, "/s"),
                    Term("redis-py sync, same scripts", rates["bare"].per_second, "/s"),
                    "≥",
                    0.8,
                    note=f"CPU {rates['semel'].cpu:.0f} against {rates['bare'].cpu:.0f} µs",
                )
            )
    return figures


# --------------------------------------------------------------------------------------------------- memory
def _used(server: services.RedisServer) -> int:
    memory = server.info("memory")
    used: int = memory["used_memory"] - memory["mem_clients_normal"]
    return used


def _memory(server: services.RedisServer, effort: Effort) -> list[Figure]:
    """The allocator has classes (1,024, 1,280, …): where the result alone just fits into one and the record does not, the
    ratio is at its worst, elsewhere it is nearly 1. So: the worst size, 1,024 bytes, and an average over sizes around it.
    The worst size has no goal: there a value of one byte more is as much larger, and nothing that remembers a key is shorter.
    """
    count = 2_000 if effort.quick else 20_000
    around = [768 + number * 512 // count for number in range(count)]
    return [
        _memory_of(server, "1,000 bytes (the worst size: a byte more is 256)", [1000] * count, goal=False),
        _memory_of(server, "1,024 bytes", [1024] * count),
        _memory_of(server, "768 to 1,280 bytes, evenly", around),
    ]


def _memory_of(server: services.RedisServer, what: str, sizes: Sequence[int], *, goal: bool = True) -> Figure:
    calls = list(zip(fresh_keys(len(sizes)), sizes, strict=True))

    async def blob(size: int) -> bytes:
        return bytes(size)

    async def fill() -> None:
        async with AsyncSemel(server.url) as once:

            async def call(of: tuple[str, int]) -> None:
                await once.execute(of[0], blob, of[1])

            await closed_loop(call, calls, CALLERS)

    return Figure(
        f"memory of a record, result of {what}",
        Term("record", _grown(server, lambda: asyncio.run(fill()), len(calls)), "bytes"),
        Term(
            "SET of the encoded result, same key and expiry",
            _grown(server, lambda: _set_plainly(server, calls), len(calls)),
            "bytes",
        ),
        "≤" if goal else "",
        1.1,
    )


def _grown(server: services.RedisServer, fill: Callable[[], None], count: int) -> float:
    server.flush()
    empty = _used(server)
    fill()
    return (_used(server) - empty) / count


def _set_plainly(server: services.RedisServer, calls: Sequence[tuple[str, int]]) -> None:
    codec = codec_for(None, bytes)
    with Semel(server.url) as once, redis.Redis.from_url(server.url) as client:
        store: Any = once._store
        for at in range(0, len(calls), 1000):
            pipe = client.pipeline(transaction=False)
            for key, size in calls[at : at + 1000]:
                scope = make_scope("semel", "default", "default", key, "full")
                name = store.settle_keys(Settle(scope, bytes(16), Kind.DONE, 0.0))[0]
                pipe.set(name, codec.encode(bytes(size), compress_over=None), ex=86_400)
            pipe.execute()
