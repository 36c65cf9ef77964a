"""SQLite at synchronous=FULL: the public API against aiosqlite doing the same two transactions.

The same means the same rows in the same table, with the indexes by which abandoned runs and what has expired are found.
Beside it stands the least that a program of one's own could do with: six columns, and no index but the key's.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import aiosqlite

from benches.core_parts.measure import (
    Contestant,
    Effort,
    Figure,
    Rate,
    Term,
    closed_loop,
    compare_crowds,
    work,
    work_sync,
)
from semel import AsyncSemel
from semel.results import codec_for
from semel.stores.rows import COLUMNS
from semel.stores.sqlite import schema_sql

__all__ = ["bench"]

CALLERS = 64
_CLAIM = """
insert into semel (
    scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint_version, created, updated, lease_until,
    expires, resolved
) values (?, 'default', 'default', ?, 'running', ?, 1, ?, 'retry', 1, ?, ?, ?, ?, 0) on conflict (scope) do nothing"""
_SETTLE = """
update semel set state = 'done', updated = ?, settled = ?, lease_until = ?, expires = ?, tombstone = null, result = ?
where scope = ? and nonce = ? and state = 'running'"""
_LOOK = "select * from semel where scope = ?"
_LEAN_TABLE = """
create table record (
    scope blob primary key, state text not null, nonce blob not null, lease_until real not null, expires real,
    result blob
)"""
_LEAN_CLAIM = "insert into record values (?, 'running', ?, ?, null, null) on conflict do nothing"
_LEAN_SETTLE = "update record set state = 'done', result = ?, expires = ? where scope = ? and nonce = ?"
_LEAN_LOOK = "select state, result from record where scope = ?"
_RESULT = 1 + COLUMNS.index("result")  # after the row's number
_GOALS = {"the same transactions"}
_numbers = itertools.count()


def fresh_keys(count: int) -> list[str]:
    return [f"first-{next(_numbers)}" for _ in range(count)]


def done_keys(count: int) -> list[str]:
    return [f"done-{number % 1000}" for number in range(count)]


def bench(effort: Effort) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_bench(Path(folder), effort))


async def _bench(folder: Path, effort: Effort) -> list[Figure]:
    async with (
        AsyncSemel(f"sqlite:///{folder}/semel.db") as once,
        _autocommitting(folder / "same.db") as same,
        _autocommitting(folder / "lean.db") as lean,
    ):
        for peer, script in ((same, schema_sql()), (lean, _LEAN_TABLE)):
            await peer.execute("pragma journal_mode = wal")
            await peer.execute("pragma synchronous = full")
            await peer.executescript(script)
        figures = []
        peers = {"the same transactions": _same(same), "six columns, no other index": _lean(lean)}
        for at, (name, prepare, goal) in enumerate((("first", fresh_keys, 5.0), ("replay", done_keys, 0.0))):
            contest = [Contestant("semel", prepare, _ours(once))]
            contest += [Contestant(peer, prepare, calls[at]) for peer, calls in peers.items()]
            for contestant in contest:
                await closed_loop(contestant.call, done_keys(64 if effort.quick else 1000), CALLERS)
            rates = await compare_crowds(contest, effort, CALLERS)
            figures += [_figure(name, rates, peer, goal if peer in _GOALS else 0.0) for peer in peers]
        return figures


def _figure(name: str, rates: dict[str, Rate], peer: str, goal: float) -> Figure:
    ours, theirs = rates["semel"], rates[peer]
    return Figure(
        f"64 callers, {name}: throughput" + ("" if peer in _GOALS else f", {peer}"),
        Term("semel", ours.per_second, "/s"),
        Term(f"aiosqlite, {peer}", theirs.per_second, "/s"),
        "≥" if goal else "",
        goal,
        note=f"CPU {ours.cpu:.0f} against {theirs.cpu:.0f} µs",
    )


def _autocommitting(path: Path) -> aiosqlite.Connection:
    """Every statement is a transaction of its own, so that callers share the connection without a lock."""
    return aiosqlite.connect(path, isolation_level=None)


def _ours(once: AsyncSemel) -> Any:
    async def call(key: str) -> None:
        await once.execute(key, work)

    return call


def _same(peer: aiosqlite.Connection) -> tuple[Any, Any]:
    codec = codec_for(work, None)

    async def first(key: str) -> None:
        scope, nonce, now = hashlib.sha256(key.encode()).digest(), os.urandom(16), time.time()
        row = (scope, key, nonce, int(now * 1_000_000), now, now, now + 10, now + 86_410)
        await peer.execute(_CLAIM, row)
        result = codec.encode(work_sync(), compress_over=None)
        now = time.time()
        await peer.execute(_SETTLE, (now, now, now, now + 86_400, result, scope, nonce))

    async def replay(key: str) -> None:
        cursor = await peer.execute(_LOOK, (hashlib.sha256(key.encode()).digest(),))
        row = await cursor.fetchone()
        if row is None:
            await first(key)
        else:
            codec.decode(row[_RESULT])

    return first, replay


def _lean(peer: aiosqlite.Connection) -> tuple[Any, Any]:
    codec = codec_for(work, None)

    async def first(key: str) -> None:
        nonce, now = os.urandom(16), time.time()
        await peer.execute(_LEAN_CLAIM, (key.encode(), nonce, now + 10))
        result = codec.encode(work_sync(), compress_over=None)
        await peer.execute(_LEAN_SETTLE, (result, now + 86_400, key.encode(), nonce))

    async def replay(key: str) -> None:
        cursor = await peer.execute(_LEAN_LOOK, (key.encode(),))
        row = await cursor.fetchone()
        if row is None:
            await first(key)
        else:
            codec.decode(row[1])

    return first, replay
