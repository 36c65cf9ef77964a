"""SQLite at synchronous=FULL: the public API against aiosqlite doing the same two transactions."""

from __future__ import annotations

import asyncio
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
    Term,
    closed_loop,
    compare_crowds,
    work,
    work_sync,
)
from semel import AsyncSemel
from semel.results import codec_for

__all__ = ["bench"]

CALLERS = 64
_TABLE = """
create table record (
    scope blob primary key, state text not null, nonce blob not null, lease_until real not null, expires real,
    result blob
)"""
_CLAIM = "insert into record values (?, 'running', ?, ?, null, null) on conflict do nothing"
_SETTLE = "update record set state = 'done', result = ?, expires = ? where scope = ? and nonce = ?"
_LOOK = "select state, result from record where scope = ?"
_numbers = itertools.count()


def fresh_keys(count: int) -> list[str]:
    return [f"first-{next(_numbers)}" for _ in range(count)]


def done_keys(count: int) -> list[str]:
    return [f"done-{number % 1000}" for number in range(count)]


def bench(effort: Effort) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_bench(Path(folder), effort))


async def _bench(folder: Path, effort: Effort) -> list[Figure]:
    async with AsyncSemel(f"sqlite:///{folder}/semel.db") as once, _autocommitting(folder) as peer:
        await peer.execute("pragma journal_mode = wal")
        await peer.execute("pragma synchronous = full")
        await peer.execute(_TABLE)
        figures = []
        for name, prepare, call, goal in _pairs(peer):
            contest = [Contestant("semel", prepare, _ours(once)), Contestant("aiosqlite", prepare, call)]
            for contestant in contest:
                await closed_loop(contestant.call, done_keys(64 if effort.quick else 1000), CALLERS)
            rates = await compare_crowds(contest, effort, CALLERS)
            figures.append(
                Figure(
                    f"64 callers, {name}: throughput",
                    Term("semel", rates["semel"].per_second, "/s"),
                    Term("aiosqlite, the same transactions", rates["aiosqlite"].per_second, "/s"),
                    "≥" if goal else "",
                    goal,
                    note=f"CPU {rates['semel'].cpu:.0f} against {rates['aiosqlite'].cpu:.0f} µs",
                )
            )
        return figures


def _autocommitting(folder: Path) -> aiosqlite.Connection:
    """Every statement is a transaction of its own, so that callers share the connection without a lock."""
    return aiosqlite.connect(folder / "peer.db", isolation_level=None)


def _ours(once: AsyncSemel) -> Any:
    async def call(key: str) -> None:
        await once.execute(key, work)

    return call


def _pairs(peer: aiosqlite.Connection) -> list[tuple[str, Any, Any, float]]:
    codec = codec_for(work, None)

    async def first(key: str) -> None:
        nonce, now = os.urandom(16), time.time()
        await peer.execute(_CLAIM, (key.encode(), nonce, now + 10))
        result = codec.encode(work_sync(), compress_over=None)
        await peer.execute(_SETTLE, (result, now + 86_400, key.encode(), nonce))

    async def replay(key: str) -> None:
        cursor = await peer.execute(_LOOK, (key.encode(),))
        row = await cursor.fetchone()
        if row is None:
            await first(key)
        else:
            codec.decode(row[1])

    return [("first", fresh_keys, first, 5.0), ("replay", done_keys, replay, 0.0)]
