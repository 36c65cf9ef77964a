"""PostgreSQL with fsync and synchronous_commit on: the public API against bare statements of the same driver."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg

from benches.core_parts.measure import (
    Contestant,
    Effort,
    Figure,
    Samples,
    Term,
    closed_loop,
    compare_crowds,
    on_cores,
    time_latencies,
    typical,
    work,
    work_sync,
)
from semel import AsyncSemel
from semel.keys import make_scope
from semel.layers.layer import Layer
from semel.results import codec_for
from semel.store import Capabilities, Settings, open_store
from semel.testing import services

__all__ = ["bench", "durable_server"]

CALLERS = 64
SERVERS = 4
_numbers = itertools.count()


def durable_server() -> services.PostgresServer:
    return services.postgres(fsync=True, config={"synchronous_commit": "on"})


def fresh_keys(count: int) -> list[str]:
    return [f"first-{next(_numbers)}" for _ in range(count)]


def done_keys(count: int) -> list[str]:
    return [f"done-{number % 1000}" for number in range(count)]


def done_scopes(count: int) -> list[bytes]:
    return [make_scope("semel", "default", "default", key, "full").hash for key in done_keys(count)]


def rows(count: int) -> list[tuple[bytes, bytes]]:
    result = codec_for(work, None).encode(work_sync(), compress_over=None)
    return [(os.urandom(16), result) for _ in range(count)]


class Unbatched(Layer):
    """The same store, saying that batches are not worth it: no batch layer is put above it."""

    @property
    def capabilities(self) -> Capabilities:
        import msgspec

        return msgspec.structs.replace(self.inner.capabilities, batches=False)


@contextlib.asynccontextmanager
async def unbatched(url: str) -> AsyncIterator[AsyncSemel]:
    store = Unbatched(open_store(url, Settings(), "async"))
    async with AsyncSemel(store) as once:
        yield once
    await store.aclose()


def ours(once: AsyncSemel, suffix: str = "") -> tuple[Contestant, Contestant]:
    async def call(key: str) -> None:
        await once.execute(key, work)

    return Contestant("first" + suffix, fresh_keys, call), Contestant("replay" + suffix, done_keys, call)


def bench(effort: Effort) -> list[Figure]:
    """Latencies on several servers, one after the other: where the memory of one happens to lie moves them by some percent."""
    apart: Samples = {}
    shared: Samples = {}
    for _ in range(1 if effort.quick else SERVERS):
        with durable_server() as server:
            for on_one_core, taken in ((False, apart), (True, shared)):
                with on_cores(server.pid, shared=on_one_core):
                    asyncio.run(_timed(server, effort, taken))
    with durable_server() as server:
        counts, *crowds = asyncio.run(_counted(server)), *asyncio.run(_batches(server, effort))
    return [*_latencies(typical(apart)), *_on_one_core(typical(shared)), *counts, *crowds]


@contextlib.asynccontextmanager
async def _opened(server: services.PostgresServer) -> AsyncIterator[tuple[AsyncSemel, Any, str]]:
    """A face with a thousand outcomes, a bare connection beside it, and the address of both."""
    url = server.database(driver="asyncpg")
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        await connection.execute("create table bare (id bytea primary key, body bytea not null)")
        await connection.execute(
            "create table by_hand (key text primary key, state text not null, result bytea)"
        )
        async with AsyncSemel(f"{url}?pool=16") as once:
            await closed_loop(ours(once)[1].call, done_keys(1000), CALLERS)
            yield once, connection, url
    finally:
        await connection.close()


async def _timed(server: services.PostgresServer, effort: Effort, taken: Samples) -> None:
    # First executions have a face of their own: it learns that its keys are new, as one does that gets hardly any repetitions.
    async with _opened(server) as (once, connection, url), AsyncSemel(url) as other:
        await _time(once, other, connection, effort, taken)


async def _counted(server: services.PostgresServer) -> list[Figure]:
    async with _opened(server) as (once, connection, _):
        return [await _wal(once, connection), await _commits(connection, _within(once, connection))]


async def _time(once: AsyncSemel, other: AsyncSemel, connection: Any, effort: Effort, taken: Samples) -> None:
    """What single calls take, against the bare statements that they are compared with."""
    first, replay = ours(other)[0], ours(once)[1]
    insert_row = "insert into bare values ($1, $2)"

    async def select(scope: bytes) -> None:
        await connection.fetchrow("select state, result from semel where scope = $1", scope)

    async def insert(row: tuple[bytes, bytes]) -> None:
        await connection.execute(insert_row, *row)

    async def alone(row: tuple[bytes, bytes]) -> None:
        async with connection.transaction():
            await connection.execute(insert_row, *row)

    statements = [
        Contestant("select", done_scopes, select),
        replay,
        Contestant("insert", rows, insert),
        first,
    ]
    transactions = [
        Contestant("alone", rows, alone),
        Contestant("within", rows, _within(once, connection)),
        Contestant("by hand", rows, _by_hand(connection)),
    ]
    for contest in (statements, transactions):
        await time_latencies(contest, max(2, effort.rounds * 10 // SERVERS), 20, taken)


def _within(once: AsyncSemel, connection: Any) -> Callable[[tuple[bytes, bytes]], Awaitable[None]]:
    async def within(row: tuple[bytes, bytes]) -> None:
        async def effect() -> dict[str, Any]:
            await connection.execute("insert into bare values ($1, $2)", *row)
            return work_sync()

        async with connection.transaction():
            await once.within(connection).execute(row[0].hex(), effect)

    return within


def _by_hand(connection: Any) -> Callable[[tuple[bytes, bytes]], Awaitable[None]]:
    """The least that a record in the caller's transaction can be: a row that keeps others out, and the result in it."""

    async def by_hand(row: tuple[bytes, bytes]) -> None:
        key = row[0].hex()
        async with connection.transaction():
            took = await connection.execute(
                "insert into by_hand values ($1, 'running') on conflict do nothing", key
            )
            assert took == "INSERT 0 1"
            await connection.execute("insert into bare values ($1, $2)", *row)
            await connection.execute(
                "update by_hand set state = 'done', result = $2 where key = $1", key, row[1]
            )

    return by_hand


def _latencies(p50: dict[str, float]) -> list[Figure]:
    def term(name: str, of: str) -> Term:
        return Term(name, p50[of], "µs")

    both = "business insert and record in one transaction"
    return [
        Figure("1 caller, replay: p50", term("replay", "replay"), term("select by key", "select"), "≤", 1.6),
        Figure(
            "1 caller, first execution: p50",
            term("first", "first"),
            term("one bare committed insert", "insert"),
            "≤",
            2.7,
        ),
        Figure("within: p50", term(both, "within"), term("business transaction alone", "alone"), "≤", 2),
        Figure(
            "within: p50, a record of three columns by hand",
            term("two statements more, no savepoint", "by hand"),
            term("business transaction alone", "alone"),
        ),
    ]


def _on_one_core(p50: dict[str, float]) -> list[Figure]:
    """The same where nobody has to be woken on another core: what is left is the work of both sides, and the disk."""

    def figure(what: str, ours: str, theirs: str) -> Figure:
        return Figure(
            f"{what}, client and server on one core: p50",
            Term(ours, p50[ours], "µs"),
            Term(theirs, p50[theirs], "µs"),
        )

    return [
        figure("1 caller, replay", "replay", "select"),
        figure("1 caller, first execution", "first", "insert"),
        figure("within", "within", "alone"),
    ]


async def _wal(once: AsyncSemel, connection: Any) -> Figure:
    """What 200 replays add to the log. The server's own writes (a running-transactions record) may fall into a window."""
    replay = ours(once)[1]
    lowest = None
    for _ in range(5):
        before = await connection.fetchval("select pg_current_wal_insert_lsn()")
        await closed_loop(replay.call, replay.prepare(200), 1)
        grown = int(await connection.fetchval("select pg_current_wal_insert_lsn() - $1::pg_lsn", before))
        lowest = grown if lowest is None else min(lowest, grown)
    return Figure("WAL written by 200 replays", Term("bytes", float(lowest or 0), "bytes"), None, "=", 0)


async def _commits(connection: Any, call: Any) -> Figure:
    """Commit records in the server's own log: what is committed for nothing but reading leaves none."""
    count = 50
    await connection.execute("create extension if not exists pg_walinspect")
    before = await connection.fetchval("select pg_current_wal_flush_lsn()")
    for row in rows(count):
        await call(row)
    counted: int = await connection.fetchval(
        "select count(*) from pg_get_wal_records_info($1::pg_lsn, pg_current_wal_flush_lsn())"
        " where resource_manager = 'Transaction' and record_type like 'COMMIT%'",
        before,
    )
    return Figure("within: commits per call", Term("commits per call", counted / count, ""), None, "=", 1)


async def _batches(server: services.PostgresServer, effort: Effort) -> list[Figure]:
    figures = []
    async with _opened(server) as (once, _, url), unbatched(f"{url}?pool=16") as plain:
        for mine, bare, goal in zip(ours(once), ours(plain), (4.0, 0.0), strict=True):
            contest = [
                Contestant("batched", mine.prepare, mine.call),
                Contestant("unbatched", bare.prepare, bare.call),
            ]
            crowd = await compare_crowds(contest, effort, CALLERS)
            alone = await compare_crowds(contest, effort.smaller(10), 1)
            figures += [
                _rates(f"64 callers, {mine.name}: throughput", crowd, goal, "CPU"),
                _rates(f"1 caller, {mine.name}: throughput", alone, 0.95 if goal else 0.0, "CPU"),
            ]
    return figures


def _rates(what: str, rates: dict[str, Any], goal: float, word: str) -> Figure:
    batched, plain = rates["batched"], rates["unbatched"]
    return Figure(
        what,
        Term("batched", batched.per_second, "/s"),
        Term("unbatched", plain.per_second, "/s"),
        "≥" if goal else "",
        goal,
        note=f"{word} {batched.cpu:.0f} against {plain.cpu:.0f} µs",
    )
