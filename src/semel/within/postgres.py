"""The statements of `within` on PostgreSQL. Parameters are $1 … as the server's; `bound` rewrites them for a driver.

The claim of a key that is not there is the function {enter} of the schema. Where the connection can be sent several
statements in one message, SAVEPOINT and claim travel together, as text: a round trip costs as much as the claim itself.

`lock_timeout` is set and restored inside each statement that may wait: the first part of it reads the old value and
sets ours, the last one, which runs after the wait, sets the old one again. An error undoes both with the savepoint.
"""

from __future__ import annotations

import re
import time
from functools import cache, lru_cache
from math import inf
from typing import Any, Final

import msgspec

from semel.errors import ConfigurationError
from semel.keys import Scope
from semel.model import Ask, Policy, Record, Settle
from semel.stores import rows
from semel.within.ports import Port, Row
from semel.within.records import Entry, identifier, query, record_of

__all__ = ["PostgresWords", "postgres_words"]

_LONGEST: Final = 2**31 - 1  # milliseconds; 0 would be "for ever"
_FAR: Final = (
    1.2e11  # seconds that PostgreSQL can still add to a time; what is kept for longer is kept for ever
)
_PLAIN: Final = re.compile(r"[A-Za-z0-9 _.:@/-]*").fullmatch
_encode_labels = msgspec.json.Encoder(order="sorted").encode

_CLOCK: Final = """
with clock as materialized (
    select clock_timestamp() as now, current_setting('lock_timeout') as before,
           set_config('lock_timeout', $1::text, true) as limited
)"""

# A key that is there is not written (no version, no WAL, no transaction id) and is read by the next statement; reading
# first would cost every new key 35 us of wide result. A key committed after the snapshot of a REPEATABLE READ caller
# raises 40001 here.
_ENTER: Final = (
    "select {enter}($1::bytea, $2::text, $3::text, $4::text, $5::bytea, $6::bigint, $7::bytea, $8::integer, $9::float8,"
    " $10::text, $11::text, $12::text)"
)
# How many rows come back is all that a driver tells of the last of several statements: one if the key is ours.
_OPEN: Final = "SELECT WHERE {enter}("

_LOCK: Final = (
    _CLOCK
    + """, held as materialized (
    select {row:r} from clock, {table} r where r.scope = $2::bytea for update of r
)
select date_part('epoch', clock.now), set_config('lock_timeout', clock.before, true), held.*
from clock left join held on true
"""
)

_LOOK: Final = """
select date_part('epoch', clock.now), null, held.*
from (select clock_timestamp() as now) clock
left join (select {row} from {table} where scope = $1::bytea) held on true
"""

# $3 and $4: seconds from now, NULL for never and none. `age` of a row that this transaction wrote is not above 0 (its
# number was given after the transaction's own): a function that ended the claim's transaction and began another has torn
# the record from its rows. Waiters that marked the row are told when the caller commits. Why the state is compared in this
# way, and why time is the statement's: see `running` and `moment` in stores/sql/postgres.sql. Back comes the transaction.
_FINISH: Final = """
update {table} r
set state = 'done', updated = statement_timestamp(), settled = statement_timestamp(),
    lease_until = statement_timestamp(), expires = statement_timestamp() + make_interval(secs => $3::float8),
    tombstone = statement_timestamp() + make_interval(secs => $4::float8),
    policy = coalesce($5::text, r.policy), marker = $6::text, result = $7::bytea,
    ref = coalesce($8::text, r.ref), steps = coalesce($9::bytea, r.steps)
where r.scope = $1::bytea and r.nonce = $2::bytea and r.state || '' = 'running' and age(r.xmin) <= 0
returning txid_current(), case when r.waited then pg_notify('{name}', encode(r.scope, 'hex')) is not null end
"""

# The same for an outcome under `retry` without tombstone, marker, ref and steps, as most are: parameters that are NULL cost
# as much as others, and five of them a tenth of the statement.
_FINISH_PLAIN: Final = """
update {table} r
set state = 'done', updated = statement_timestamp(), settled = statement_timestamp(),
    lease_until = statement_timestamp(), expires = statement_timestamp() + make_interval(secs => $3::float8),
    tombstone = null, policy = 'retry', marker = null, result = $4::bytea
where r.scope = $1::bytea and r.nonce = $2::bytea and r.state || '' = 'running' and age(r.xmin) <= 0
returning txid_current(), case when r.waited then pg_notify('{name}', encode(r.scope, 'hex')) is not null end
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


_TIMES_AT: Final = frozenset(at for at, column in enumerate(rows.COLUMNS) if column in rows.TIMES)


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
            "{enter}": identifier(f"{table}_enter", '"'),
            "{name}": table.rpartition(".")[2],
            "{row}": _row(""),
            "{row:r}": _row("r."),
        }
        changes = ", ".join(_assignment(name, at) for at, name in enumerate(rows.COLUMNS, 1) if at > 1)
        # `waited` of an earlier run would make the settle notify, which a transaction that is prepared (two-phase) must not.
        write = f"update {{table}} set {changes}, waited = false where scope = $1::bytea"

        def made(text: str) -> str:
            for word, value in words.items():
                text = text.replace(word, value)
            return text

        self._open, self._enter = made(_OPEN), made(_ENTER)
        self._lock, self._look = made(_LOCK), made(_LOOK)
        self._finish, self._finish_plain, self._write = made(_FINISH), made(_FINISH_PLAIN), made(write)

    def opening(self, name: str, ask: Ask, now: float, patience: float) -> str:
        """A savepoint, and `enter` in it, in one message: one row if the key is ours now. What is there is not read."""
        return f"SAVEPOINT {name};{self._open}{_literals(ask, now, patience)})"

    async def enter(self, port: Port, ask: Ask, patience: float) -> Entry:
        now = time.time()
        ((inserted,),) = await query(port, self._enter, _values(ask, now, patience))
        return Entry(now, inserted=True) if inserted else await self.look(port, ask.scope)

    async def lock(self, port: Port, scope: Scope, patience: float) -> Entry:
        return _entry((await query(port, self._lock, (_limit(patience), scope.hash)))[0], locked=True)

    async def look(self, port: Port, scope: Scope) -> Entry:
        return _entry((await query(port, self._look, (scope.hash,)))[0], locked=False)

    async def write(self, port: Port, record: Record) -> None:
        await query(port, self._write, rows.to_row(_within_reach(record)))

    async def finish(self, port: Port, end: Settle) -> int | None:
        sql: str
        args: tuple[Any, ...]
        keep = None if end.retention >= _FAR else end.retention
        if (
            end.policy is Policy.RETRY
            and end.ref is None
            and end.steps is None
            and not (end.tombstone or end.marker)
        ):
            sql, args = self._finish_plain, (end.scope.hash, end.nonce, keep, end.result or None)
        else:
            sql = self._finish
            args = (
                end.scope.hash,
                end.nonce,
                keep,
                min(keep + end.tombstone, _FAR) if end.tombstone and keep is not None else None,
                end.policy._value_ if end.policy else None,  # `value` is a call
                end.marker or None,
                end.result or None,
                end.ref,
                end.steps,
            )
        found = await (port.run(sql, args) if port.style == "dollar" else query(port, sql, args))
        return found[0][0] if found else None


def _within_reach(record: Record) -> Record:
    """With times that PostgreSQL can hold. Only a probe's word has others: claims have leases of days."""
    too_far = _FAR < record.expires < inf
    if not too_far and record.tombstone <= _FAR:
        return record
    expires = inf if too_far else record.expires
    return msgspec.structs.replace(record, expires=expires, tombstone=min(record.tombstone, 2 * _FAR))


def _values(ask: Ask, now: float, patience: float) -> tuple[Any, ...]:
    """The arguments of {enter}. Times are the server's; `now` is in the token only, which is a number for people."""
    scope = ask.scope
    return (
        scope.hash,
        scope.tenant,
        scope.operation,
        scope.key,
        ask.nonce,
        int(now * 1_000_000),
        ask.fingerprint or None,
        ask.fingerprint_version,
        min(ask.lease, _FAR),
        _encode_labels(ask.labels).decode() if ask.labels else None,
        ask.secret_id or None,
        _limit(patience),
    )


def _literals(ask: Ask, now: float, patience: float) -> str:
    """`_values` as text, read alike under every setting and encoding: what is not plain travels as digits."""
    scope = ask.scope
    printed = f"E'\\\\x{ask.fingerprint.hex()}'" if ask.fingerprint else "null"
    labels = _text(_encode_labels(ask.labels).decode()) if ask.labels else "null"
    return (
        f"E'\\\\x{scope.hash.hex()}',{_word(scope.tenant)},{_word(scope.operation)},{_text(scope.key)},"
        f"E'\\\\x{ask.nonce.hex()}',{int(now * 1_000_000)},{printed},"
        f"{_lasting(ask.fingerprint_version, ask.lease)},{labels},{_ending(ask.secret_id, patience)}"
    )


@lru_cache(maxsize=256)
def _lasting(version: int, lease: float) -> str:
    return f"{version},{min(lease, _FAR)!r}"


@lru_cache(maxsize=256)
def _ending(secret_id: str, patience: float) -> str:
    return f"{_text(secret_id) if secret_id else 'null'},'{_limit(patience)}'"


def _text(value: str) -> str:
    return f"'{value}'" if _PLAIN(value) else f"convert_from({_bytes(value.encode())},'UTF8')"


_word = lru_cache(maxsize=256)(_text)  # of which there are few


def _bytes(value: bytes) -> str:
    return f"E'\\\\x{value.hex()}'" if value else "null"


def _entry(row: Row, *, locked: bool) -> Entry:
    now, _, *held = row
    if type(now) is not float:
        now = _seconds(now)
        held = [
            _seconds(each) if each is not None and at in _TIMES_AT else each for at, each in enumerate(held)
        ]
    return Entry(now, record=None if held[0] is None else record_of(held), locked=locked)


def _seconds(value: Any) -> float:
    """Of a connection that reads float8 in its own way (asyncpg's set_type_codec, psycopg's adapters)."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"this connection reads float8 as {type(value).__name__}, by a codec of its own, and times of records are float8: bind one "
            "without that codec, or let it give what float() takes"
        ) from error


def _limit(patience: float) -> str:
    if patience <= 0.001:  # wait=0, as most calls have it
        return "1ms"
    return f"{max(1, min(_LONGEST, int(min(patience, 1e7) * 1000)))}ms"
