"""The statements of `within` on PostgreSQL. Parameters are $1 … as the server's; `bound` rewrites them for a driver.

`lock_timeout` is set and restored inside each statement that may wait: the first part of it reads the old value and
sets ours, the last one, which runs after the wait, sets the old one again. An error undoes both with the savepoint.
"""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any, Final

import msgspec

from semel.keys import Scope
from semel.model import Ask, Record, Settle
from semel.stores import rows
from semel.within.ports import Port, Row
from semel.within.records import Entry, identifier, query, record_of

__all__ = ["PostgresWords", "postgres_words"]

_LONGEST: Final = 2**31 - 1  # milliseconds; 0 would be "for ever"
_encode_labels = msgspec.json.Encoder(order="sorted").encode

_CLOCK: Final = """
with clock as materialized (
    select clock_timestamp() as now, current_setting('lock_timeout') as before,
           set_config('lock_timeout', $1::text, true) as limited
)"""

# One narrow row comes back: now, and whether we inserted. A key that is there is not written (no version, no WAL, no
# transaction id) and is read by the next statement; reading first would cost every new key 35 us of wide result. A key
# committed after the snapshot of a REPEATABLE READ caller raises 40001 here.
_ENTER: Final = (
    _CLOCK
    + """, fresh as (
    insert into {table} (scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint,
                         fingerprint_version, created, updated, lease_until, labels, secret_id)
    select $2::bytea, $3::text, $4::text, $5::text, 'running', $6::bytea, 1,
           floor(date_part('epoch', now) * 1000000)::bigint, 'hold', $7::bytea, $8::integer, now, now,
           to_timestamp(date_part('epoch', now) + $9::float8), $10::text, $11::text
    from clock
    on conflict (scope) do nothing
    returning true as inserted
)
select date_part('epoch', clock.now), txid_current_if_assigned(), fresh.inserted,
       set_config('lock_timeout', clock.before, true)
from clock left join fresh on true
"""
)

_LOCK: Final = (
    _CLOCK
    + """, held as materialized (
    select {row:r} from clock, {table} r where r.scope = $2::bytea for update of r
)
select date_part('epoch', clock.now), txid_current_if_assigned(), set_config('lock_timeout', clock.before, true), held.*
from clock left join held on true
"""
)

_LOOK: Final = """
select date_part('epoch', clock.now), null, null, held.*
from (select clock_timestamp() as now) clock
left join (select {row} from {table} where scope = $1::bytea) held on true
"""

# $3 and $4: seconds from now, NULL for never and none. $10: the claim's transaction; a function that ended it and began
# another has torn the record from its rows. Waiters that marked the row are told when the caller commits. Why the state
# is compared in this way, and why time is the statement's: see `running` and `moment` in stores/sql/postgres.sql.
_FINISH: Final = """
update {table} r
set state = 'done', updated = statement_timestamp(), settled = statement_timestamp(),
    lease_until = statement_timestamp(), expires = statement_timestamp() + make_interval(secs => $3::float8),
    tombstone = statement_timestamp() + make_interval(secs => $4::float8),
    policy = coalesce($5::text, r.policy), marker = $6::text, result = $7::bytea,
    ref = coalesce($8::text, r.ref), steps = coalesce($9::bytea, r.steps)
where r.scope = $1::bytea and r.nonce = $2::bytea and r.state || '' = 'running'
  and txid_current_if_assigned() = $10::bigint
returning case when r.waited then pg_notify('{name}', encode(r.scope, 'hex')) is not null end
"""

_TYPES: Final = {
    "attempts": "integer",
    "token": "bigint",
    "fingerprint_version": "integer",
    "resolved": "boolean",
    "nonce": "bytea",
    "fingerprint": "bytea",
    "result": "bytea",
    "steps": "bytea",
}


def _assignment(column: str, number: int) -> str:
    if column in rows.TIMES:
        return f"{column} = to_timestamp(${number}::float8)"
    return f"{column} = ${number}::{_TYPES.get(column, 'text')}"


def _row(alias: str) -> str:
    return ", ".join(
        f"date_part('epoch', {alias}{column}) as {column}" if column in rows.TIMES else f"{alias}{column}"
        for column in rows.COLUMNS
    )


@cache
def postgres_words(table: str) -> PostgresWords:
    return PostgresWords(table)


class PostgresWords:
    def __init__(self, table: str) -> None:
        words = {
            "{table}": identifier(table, '"'),
            "{name}": table.rpartition(".")[2],
            "{row}": _row(""),
            "{row:r}": _row("r."),
        }
        changes = ", ".join(_assignment(name, at) for at, name in enumerate(rows.COLUMNS, 1) if at > 1)
        write = f"update {{table}} set {changes} where scope = $1::bytea"

        def made(text: str) -> str:
            for word, value in words.items():
                text = text.replace(word, value)
            return text

        self._enter, self._lock, self._look = made(_ENTER), made(_LOCK), made(_LOOK)
        self._finish, self._write = made(_FINISH), made(write)

    async def enter(self, port: Port, ask: Ask, patience: float) -> Entry:
        scope = ask.scope
        args = (
            _limit(patience),
            scope.hash,
            scope.tenant,
            scope.operation,
            scope.key,
            ask.nonce,
            ask.fingerprint or None,
            ask.fingerprint_version,
            ask.lease,
            _encode_labels(ask.labels).decode() if ask.labels else None,
            ask.secret_id or None,
        )
        ((now, transaction, inserted, _),) = await query(port, self._enter, args)
        if inserted:
            return Entry(float(now), inserted=True, transaction=transaction)
        return await self.look(port, scope)

    async def lock(self, port: Port, scope: Scope, patience: float) -> Entry:
        return _entry((await query(port, self._lock, (_limit(patience), scope.hash)))[0], locked=True)

    async def look(self, port: Port, scope: Scope) -> Entry:
        return _entry((await query(port, self._look, (scope.hash,)))[0], locked=False)

    async def write(self, port: Port, record: Record) -> None:
        await query(port, self._write, rows.to_row(record))

    async def finish(self, port: Port, end: Settle, transaction: int | None) -> bool:
        forever = end.retention == inf
        args: tuple[Any, ...] = (
            end.scope.hash,
            end.nonce,
            None if forever else end.retention,
            end.retention + end.tombstone if end.tombstone and not forever else None,
            end.policy.value if end.policy else None,
            end.marker or None,
            end.result or None,
            end.ref,
            end.steps,
            transaction,
        )
        return len(await query(port, self._finish, args)) == 1


def _entry(row: Row, *, locked: bool) -> Entry:
    now, transaction, _, *held = row
    record = None if held[0] is None else record_of(held)
    return Entry(float(now), record=record, locked=locked, transaction=transaction)


def _limit(patience: float) -> str:
    return f"{max(1, min(_LONGEST, int(min(patience, 1e7) * 1000)))}ms"
