"""Waiters: how soon another process holds the result, over how many connections, for how many claims."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from benches.core_parts.measure import Effort, Figure, Term, work
from benches.core_parts.on_postgres import durable_server
from semel import AsyncSemel, points
from semel.testing import services

__all__ = ["bench"]

CALLERS = 64


def bench(effort: Effort) -> list[Figure]:
    figures = []
    with services.redis() as server:
        figures += [_wake("Redis", server.url, effort, 1.5), _redis_subscribers(server), _claims(server)]
    with durable_server() as database:
        url = database.database(driver="asyncpg")
        figures += [_wake("PostgreSQL", url, effort, 5), _postgres_subscribers(database, url)]
    return figures


# ------------------------------------------------------------------------------------------- the other process
def _waiting_process(url: str, pipe: Connection) -> None:
    """For each list of keys: wait for all of them; tell when all wait, then when each result was in our hands."""
    asyncio.run(_wait_for_keys(url, pipe))


async def _wait_for_keys(url: str, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    parked = 0

    def on_point(name: str) -> None:
        nonlocal parked
        parked += name == "wait.parked"  # subscribed, claimed again, about to sleep

    points.listen(on_point)
    async with AsyncSemel(url, wait=30) as once:

        async def wait_for(key: str) -> float:
            outcome = await once.execute(key, work)
            held = time.monotonic()
            if not outcome.replayed:
                raise RuntimeError(f"{key} ran here: its owner had not claimed it")
            return held

        while keys := await loop.run_in_executor(None, pipe.recv):
            parked = 0
            waits = [asyncio.ensure_future(wait_for(key)) for key in keys]
            while parked < len(keys):
                await asyncio.sleep(0.001)
            pipe.send("parked")
            pipe.send(await asyncio.gather(*waits))


class _Other:
    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_waiting_process, args=(url, theirs), daemon=True)
        self._process.start()

    async def told(self) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, self.pipe.recv)

    def end(self) -> None:
        self.pipe.send(None)
        self._process.join(10)


# -------------------------------------------------------------------------------------------------- wake-ups
def _wake(name: str, url: str, effort: Effort, goal: float) -> Figure:
    times = asyncio.run(_wakes(url, 5 if effort.quick else 150))
    p95 = statistics.quantiles(times, n=20)[18]
    return Figure(
        f"{name}: a waiter in another process holds the result, p50",
        Term("from the settle's start", statistics.median(times), "ms"),
        None,
        "≤",
        goal,
        note=f"p95 {p95:.2f} ms of {len(times)}",
    )


async def _wakes(url: str, count: int) -> list[float]:
    other = _Other(url)
    times = []
    try:
        async with AsyncSemel(url) as once:
            for number in range(count + 3):
                async with once.claim(f"wake-{number}") as claim:
                    other.pipe.send([f"wake-{number}"])
                    await other.told()
                    start = time.monotonic()  # one clock for all processes of a machine
                    await claim.complete("done")
                (held,) = await other.told()
                times.append((held - start) * 1e3)
    finally:
        other.end()
    return times[3:]


# ----------------------------------------------------------------------------------------------- connections
async def _while_waiting(url: str, count: int, look: Any) -> Any:
    """What `look` sees while another process waits for so many keys."""
    other = _Other(url)
    keys = [f"crowd-{number}" for number in range(count)]
    try:
        async with AsyncSemel(url) as once:
            claims = [once.claim(key) for key in keys]
            for claim in claims:
                await claim.__aenter__()
            other.pipe.send(keys)
            await other.told()
            seen = await asyncio.get_running_loop().run_in_executor(None, look)
            for claim in claims:
                await claim.complete("done")
                await claim.__aexit__(None, None, None)
            await other.told()
            return seen
    finally:
        other.end()


def _subscribers(name: str, seen: int) -> Figure:
    what = f"{name}: subscriber connections of a process that waits for 50 keys"
    return Figure(what, Term("connections", float(seen), ""), None, "=", 1)


def _redis_subscribers(server: services.RedisServer) -> Figure:
    def look() -> int:
        clients = [dict(pair.split("=", 1) for pair in line.split()) for line in _client_list(server)]
        return sum(any(one.get(kind, "0") != "0" for kind in ("sub", "psub", "ssub")) for one in clients)

    return _subscribers("Redis", asyncio.run(_while_waiting(server.url, 50, look)))


def _client_list(server: services.RedisServer) -> list[str]:
    text: str = server.command("CLIENT", "LIST")
    return text.splitlines()


def _postgres_subscribers(server: services.PostgresServer, url: str) -> Figure:
    def look() -> int:
        listening = server.execute(
            "select count(*) from pg_stat_activity where query ilike 'listen%' and pid <> pg_backend_pid()"
        )
        return int(listening[0][0])

    return _subscribers("PostgreSQL", asyncio.run(_while_waiting(url, 50, look)))


# ---------------------------------------------------------------------------------------------- single flight
def _claims(server: services.RedisServer) -> Figure:
    server.flush()

    async def slow() -> str:
        await asyncio.sleep(0.2)
        return "done"

    async def crowd() -> None:
        async with AsyncSemel(server.url, wait=10) as once:
            await once.execute("warm-up", work)
            server.command("CONFIG", "RESETSTAT")
            outcomes = await asyncio.gather(*(once.execute("one key", slow) for _ in range(CALLERS)))
            if sum(not outcome.replayed for outcome in outcomes) != 1:
                raise RuntimeError("one key ran more than once")

    asyncio.run(crowd())
    calls = server.info("commandstats")["cmdstat_evalsha"]["calls"] - 1  # the settle
    return Figure(
        "Redis: claims of 64 callers of one key in one process",
        Term("claims", float(calls), ""),
        None,
        "≤",
        2,
    )
