"""Runs in the peers' environment: every peer against semel on the same store, in turns, 1 and 64 callers.

Each peer is used as its own documentation shows, with a lease where it has one. A peer that breaks is left out, and
the reason is told.
"""

# mypy: disable-error-code="import-not-found,no-any-return"
# The peers are installed in an environment of their own, not where mypy looks.

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from benches.core_parts.measure import (
    ORDER,
    Contestant,
    Effort,
    Figure,
    Term,
    closed_loop,
    compare_crowds,
    say,
    work,
)
from benches.core_parts.page import versions
from benches.core_parts.peers import Result
from semel import AsyncSemel

Call = Callable[[str], Awaitable[Any]]
Opener = Callable[[str], contextlib.AbstractAsyncContextManager[Call]]
PACKAGES = (
    "semel", "redis", "asyncpg", "idemkit", "idempotency-kit", "exactly-once", "mobius-idempotence-library", "dbos",
    "justonce", "agent-once",
)  # fmt: skip
_numbers = itertools.count()


def fresh_keys(count: int) -> list[str]:
    return [f"first-{next(_numbers)}" for _ in range(count)]


def done_keys(count: int) -> list[str]:
    return [f"done-{number % 100}" for number in range(count)]


# ------------------------------------------------------------------------------------------------------- peers
@contextlib.asynccontextmanager
async def semel(url: str) -> AsyncIterator[Call]:
    async with AsyncSemel(url) as once:
        yield lambda key: once.execute(key, work)


@contextlib.asynccontextmanager
async def idemkit_redis(url: str) -> AsyncIterator[Call]:
    from idemkit import MethodConfig, RedisBackend, idempotent

    backend = RedisBackend.from_url(url)

    @idempotent(backend=backend, config=MethodConfig(key_fields=["key"]))
    async def call(key: str) -> Any:
        return ORDER

    yield call
    await backend.aclose()


@contextlib.asynccontextmanager
async def idemkit_postgres(url: str) -> AsyncIterator[Call]:
    from idemkit import MethodConfig, PostgresBackend, idempotent
    from idemkit.backends.postgres import init_pg

    await init_pg(url)
    backend = PostgresBackend.from_url(url)

    @idempotent(backend=backend, config=MethodConfig(key_fields=["key"]))
    async def call(key: str) -> Any:
        return ORDER

    yield call
    await backend.aclose()


@contextlib.asynccontextmanager
async def idempotency_kit(url: str) -> AsyncIterator[Call]:
    from idempotency_kit import AsyncIdempotencyCoordinator, IdempotencyDomainService, JsonResultAdapter
    from idempotency_kit.infra.storage.redis.aio.repository import RedisAsyncIdempotencyRepository
    from redis.asyncio import Redis

    async with Redis.from_url(url) as client:
        repository = RedisAsyncIdempotencyRepository(client)
        coordinator = AsyncIdempotencyCoordinator(repository, IdempotencyDomainService())
        adapter = JsonResultAdapter()
        yield lambda key: coordinator.coordinate("order.create", key, None, adapter, work)


def _exactly_once(store: Any) -> Call:
    from exactly_once import auto_retry, once

    @once(store, key=lambda key: key, policy=auto_retry, lease_ttl=10.0)
    async def call(key: str) -> Any:
        return ORDER

    return call


@contextlib.asynccontextmanager
async def exactly_once_redis(url: str) -> AsyncIterator[Call]:
    from exactly_once import Store

    store = Store.redis(url)
    yield _exactly_once(store)
    await store.aclose()


@contextlib.asynccontextmanager
async def exactly_once_sqlite(url: str) -> AsyncIterator[Call]:
    from exactly_once import Store

    store = Store.sqlite(url.removeprefix("sqlite:///") + ".exactly-once")
    # By itself it does not survive a power loss (synchronous=NORMAL); compared is what is durable when it answers.
    store._conn.execute("pragma synchronous = full")
    yield _exactly_once(store)
    await store.aclose()


@contextlib.asynccontextmanager
async def mobius(url: str) -> AsyncIterator[Call]:
    from mobius_idempotence.backends.redis import RedisBackend
    from mobius_idempotence.manager import IdempotencyManager
    from mobius_idempotence.types import LockState

    manager = IdempotencyManager(RedisBackend(url, max_connections=64))

    async def call(key: str) -> Any:
        found = await manager.check_or_lock(key, "fingerprint")
        if found.state == LockState.REPLAY:
            return found.response.body
        await manager.save_response(key, found.token, 200, ORDER)
        return ORDER

    yield call
    await manager.aclose()


@contextlib.asynccontextmanager
async def dbos(url: str) -> AsyncIterator[Call]:
    from dbos import DBOS, SetWorkflowID

    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})

    @DBOS.step()
    async def step() -> Any:
        return ORDER

    @DBOS.workflow()
    async def workflow() -> Any:
        return await step()

    async def call(key: str) -> Any:
        with SetWorkflowID(key):
            return await workflow()

    DBOS.launch()
    yield call
    DBOS.destroy()


@contextlib.asynccontextmanager
async def justonce(url: str) -> AsyncIterator[Call]:
    from justonce.asyncio import AsyncIdempotent
    from justonce.stores import SqliteStore

    store = SqliteStore(url.removeprefix("sqlite:///") + ".justonce")
    engine = AsyncIdempotent(store)
    yield lambda key: engine.run(key, work)
    store.close()


@contextlib.asynccontextmanager
async def agent_once(url: str) -> AsyncIterator[Call]:
    from once import Once

    once = Once(url.removeprefix("sqlite:///") + ".agent-once")
    yield lambda key: once.aexecute(work, key=key)
    once.close()


# ---------------------------------------------------------------------------------------------------- the runs
async def contest(name: str, mine: Call, theirs: Call, effort: Effort) -> list[Figure]:
    figures = []
    for callers, verb in itertools.product((1, 64), ("first", "replay")):
        prepare = fresh_keys if verb == "first" else done_keys
        pair = [Contestant("semel", prepare, mine), Contestant(name, prepare, theirs)]
        for one in pair:
            await closed_loop(one.call, done_keys(100), 1)
        rates = await compare_crowds(pair, effort, callers)
        figures.append(
            Figure(
                f"{name}: {callers} caller{'s' * (callers > 1)}, {verb}",
                Term("semel", rates["semel"].per_second, "/s"),
                Term(name, rates[name].per_second, "/s"),
                "≥",
                1,
                note=f"CPU {rates['semel'].cpu:.0f} against {rates[name].cpu:.0f} µs",
            )
        )
    return figures


async def one_peer(name: str, opener: Opener, url: str, ours: str, effort: Effort) -> list[Figure]:
    async with semel(ours) as mine, opener(url) as theirs:
        return await contest(name, mine, theirs, effort)


def main() -> None:
    redis, first_db, second_db, third_db, folder, length = sys.argv[1:]
    effort = (
        Effort(rounds=2, calls=64, quick=True)
        if length == "quick"
        else Effort(rounds=7, calls=400, quick=False)
    )
    slow, slowest = effort.smaller(3), effort.smaller(10)
    ours_pg = second_db.replace("postgresql:", "postgresql+asyncpg:")
    file = f"sqlite:///{Path(folder) / 'semel.db'}"
    runs: list[tuple[str, Opener, str, str, Effort]] = [
        ("Redis, idemkit", idemkit_redis, redis, redis, effort),
        ("Redis, idempotency-kit", idempotency_kit, redis, redis, effort),
        ("Redis, exactly-once with a lease", exactly_once_redis, redis, redis, effort),
        ("Redis, mobius (manager)", mobius, redis, redis, effort),
        ("PostgreSQL, idemkit", idemkit_postgres, first_db, ours_pg, slow),
        ("PostgreSQL, dbos (workflow and step)", dbos, third_db, ours_pg, slowest),
        ("SQLite, exactly-once with a lease, at FULL", exactly_once_sqlite, file, file, slow),
        ("SQLite, justonce", justonce, file, file, slow),
        ("SQLite, agent-once", agent_once, file, file, slow),
    ]
    logging.disable(logging.WARNING)
    result = Result(versions=versions(*PACKAGES))
    for name, opener, url, ours, length_ in runs:
        say(f"against {name}")
        try:
            result.figures += asyncio.run(one_peer(name, opener, url, ours, length_))
        except Exception as error:  # noqa: BLE001 - whatever breaks in a peer is its entry in the page
            said = str(error).splitlines() or [""]
            result.left_out[name] = (
                f"{type(error).__name__}: {said[0].partition(' (/')[0]}"  # no path of this machine
            )
    sys.stdout.write("\n" + msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
