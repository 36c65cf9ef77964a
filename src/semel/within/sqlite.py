"""The statements of `within` on SQLite: the whole database is the lock, and whoever writes has it.

Times are Unix seconds of this process's clock, as in the store. `busy_timeout` is the caller's setting: it is set to
what `wait` allows for the statement that takes the lock, a slice at a time, and restored. SQLite sleeps inside of the
statement, where no signal and no cancellation is heard: only between two slices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import inf
from typing import Any, Final

from semel import model
from semel.keys import Scope
from semel.model import Ask, Record, Settle
from semel.stores import rows
from semel.within.failures import is_locked
from semel.within.ports import Port, Row
from semel.within.records import Entry, Unreadable, guarded, identifier, query, record_of

__all__ = ["SqliteWords", "patiently", "sqlite_words"]

_SLICE: Final = 0.1  # seconds, of the first; each is twice as long as the one before, up to
_LONGEST: Final = 0.5
_FIXED: Final = 4  # scope, tenant, operation, key: never change once a row is there
_TEXTS: Final = tuple(
    at
    for at, name in enumerate(rows.COLUMNS)
    if name
    in {
        "tenant", "operation", "key", "state", "policy", "marker", "ref", "error_type", "error_code",
        "error_message", "labels", "secret_id",
    }
)  # fmt: skip


@cache
def sqlite_words(table: str) -> SqliteWords:
    return SqliteWords(table)


class SqliteWords:
    def __init__(self, table: str) -> None:
        name = identifier(table, '"')
        columns = ", ".join(rows.COLUMNS)
        values = ", ".join(f"${at}" for at in range(1, len(rows.COLUMNS) + 1))
        changes = ", ".join(f"{column} = ${at}" for at, column in enumerate(rows.COLUMNS, 1) if at > _FIXED)
        self._insert = (
            f"INSERT INTO {name} ({columns}) VALUES ({values}) ON CONFLICT (scope) DO NOTHING RETURNING 1"
        )
        # An expression has no declared type: converters that the caller has registered (detect_types) leave it alone.
        raw = ", ".join(f"+{column}" for column in rows.COLUMNS)
        self._select = f"SELECT {raw} FROM {name} WHERE scope = $1"
        self._update = f"UPDATE {name} SET {changes} WHERE scope = $1"
        self._finish = (
            f"UPDATE {name} SET state = 'done', updated = $3, settled = $3, lease_until = $3, expires = $4, "
            "tombstone = $5, policy = coalesce($6, policy), marker = $7, result = $8, ref = coalesce($9, ref), "
            "steps = coalesce($10, steps) WHERE scope = $1 AND nonce = $2 AND state = 'running' RETURNING 1"
        )

    async def enter(self, port: Port, ask: Ask, patience: float) -> Entry:
        """Insert first: even when the key is there, this takes the lock, and the read after it sees the latest. Without
        patience: BEGIN IMMEDIATE has the lock already."""
        fresh = model.claim(None, ask, time.time())[1]
        assert fresh is not None  # noqa: S101 - an absent key is always won
        args = rows.to_row(guarded(fresh))
        if patience:
            inserted = await patiently(port, patience, self._insert, args)
        else:
            inserted = await query(port, self._insert, args)
        if inserted:
            return Entry(fresh.created, inserted=True)
        return await self.lock(port, ask.scope, patience)

    async def lock(self, port: Port, scope: Scope, patience: float) -> Entry:
        del patience  # `enter` has the lock
        found = await self.look(port, scope)
        return Entry(found.now, record=found.record, locked=True)

    async def look(self, port: Port, scope: Scope) -> Entry:
        found = await query(port, self._select, (scope.hash,))
        return Entry(time.time(), record=_record(list(found[0])) if found else None)

    async def write(self, port: Port, record: Record) -> None:
        await query(port, self._update, rows.to_row(record))

    async def finish(self, port: Port, end: Settle) -> int | None:
        now = time.time()
        expires = None if end.retention == inf else now + end.retention
        args = (
            end.scope.hash,
            end.nonce,
            now,
            expires,
            expires + end.tombstone if end.tombstone and expires is not None else None,
            end.policy.value if end.policy else None,
            end.marker or None,
            end.result or None,
            end.ref,
            end.steps,
        )
        return 0 if await query(port, self._finish, args) else None


def _record(row: list[Any]) -> Record:
    for at in _TEXTS:
        if isinstance(row[at], bytes):  # the caller's connection has another text_factory
            try:
                row[at] = row[at].decode()
            except UnicodeDecodeError as error:
                raise Unreadable from error
    return record_of(row)


async def patiently(port: Port, patience: float, sql: str, args: Sequence[Any] = ()) -> Sequence[Row]:
    """Run the statement that takes the lock, and wait for whoever has it up to `patience` seconds."""
    until = time.monotonic() + patience
    ((before,),) = await port.run("PRAGMA busy_timeout")
    try:
        found = await _in_slices(port, patience, until, sql, args)
    except BaseException:
        # A cancelled caller hears of that, and not that the connection which he was cancelled on has gone.
        with suppress(Exception):
            await _limit(port, int(before))
        raise
    await _limit(port, int(before))
    return found


async def _in_slices(port: Port, left: float, until: float, sql: str, args: Sequence[Any]) -> Sequence[Row]:
    limit, piece = 0, _SLICE
    while True:
        if limit != (limit := max(1, int(min(left, piece) * 1000))):
            await _limit(port, limit)
        piece = min(2 * piece, _LONGEST)
        began = time.monotonic()
        try:
            return await query(port, sql, args)
        except Exception as error:
            now = time.monotonic()
            left = until - now
            # Refused without a wait: SQLite sees a deadlock, which no waiting cures (or its build sleeps whole seconds).
            at_once = now - began < limit / 2000
            if left <= 0 or at_once or not is_locked(error, "sqlite"):
                raise


async def _limit(port: Port, milliseconds: int) -> None:
    await port.run(f"PRAGMA busy_timeout = {milliseconds}")
