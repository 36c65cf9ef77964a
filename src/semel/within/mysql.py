"""The statements of `within` on MariaDB and MySQL (InnoDB).

A claim is one upsert that changes nothing of a row that is there. It takes the row's exclusive lock at once (a plain
INSERT takes a shared one first, and two waiters of a rolled-back insert would then deadlock), it sees the latest
row at every isolation level, and it opens no snapshot. InnoDB keeps locks after ROLLBACK TO SAVEPOINT, so a key that
is settled or running is looked at before, on a connection of our own, and not locked at all.

MariaDB answers a locked row at once (`innodb_lock_wait_timeout = 0`) and is asked again; MySQL cannot wait less than
a second. Who only asks is in no cycle that InnoDB could see: after a while of it MariaDB is asked to wait for a second
as well. Times are microseconds here, bytes and texts hexadecimal: they mean the same under every sql_mode, time
zone, character set and driver.

An UPDATE names its index. By `state` the optimizer now and then takes another one, and at REPEATABLE READ that locks the
gaps of it until the caller's end: claims of every other key were refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import inf
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from semel.errors import CodecError
from semel.keys import Scope
from semel.model import Ask, Record, Settle
from semel.shrinking import TOO_LARGE_FOR_STORE, shrunk
from semel.stores import rows
from semel.within.ports import Port, Row
from semel.within.records import Entry, identifier, query, record_of

__all__ = ["MysqlWords", "mysql_words"]

_END: Final = 253_402_300_799_999_999  # the last moment of DATETIME(6), which stands for "never"
_FOREVER: Final = 240_000_000_000.0  # seconds: longer spans from now may not fit into the type
_encode_labels = msgspec.json.Encoder(order="sorted").encode
_BYTES: Final = frozenset({"scope", "nonce", "fingerprint", "result", "steps"})
_NUMBERS: Final = frozenset({"attempts", "token", "fingerprint_version", "resolved"})
_TEXTS: Final = rows.TEXTS - {"state", "policy", "marker"}  # words of our own, which every character set has
_NOW: Final = "UTC_TIMESTAMP(6)"
_EPOCH: Final = "TIMESTAMP'1970-01-01 00:00:00'"
_QUICK: Final = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
_PATIENT: Final = "SET STATEMENT innodb_lock_wait_timeout = 1 FOR "
_LEAST: Final = 1.0  # seconds: InnoDB cannot wait for less, and nobody waits for longer than he would
_STUCK: Final = 0.5  # seconds of asking again, after which a deadlock is thought of
_TEXT: Final = "CONVERT(UNHEX($%d) USING utf8mb4)"
_AROUND: Final = 256  # bytes of a packet beside the statement's text and what is long in it


def _micros(expression: str) -> str:
    return f"TIMESTAMPDIFF(MICROSECOND, {_EPOCH}, {expression})"


def _value(column: str, number: int) -> str:
    if column in rows.TIMES:
        return f"{_EPOCH} + INTERVAL ${number} MICROSECOND"
    if column in _NUMBERS:
        return f"${number}"
    return f"UNHEX(${number})" if column in _BYTES else _TEXT % number


def _column(name: str) -> str:
    if name in rows.TIMES:
        return _micros(f"`{name}`")
    # As bytes: the server would put a question mark for every character that the connection's character set lacks.
    return f"CAST(`{name}` AS BINARY)" if name in _TEXTS else f"`{name}`"


def _columns() -> str:
    return ", ".join(map(_column, rows.COLUMNS))


@cache
def mysql_words(table: str) -> MysqlWords:
    return MysqlWords(table)


class _Known:
    """What is remembered of a port: of one use of a caller's connection."""

    __slots__ = ("limit", "nonce", "since")

    def __init__(self) -> None:
        self.limit = 0
        """Its max_allowed_packet, which no session can change; every claim tells it."""
        self.nonce = b""
        """The latest claim that found its key locked, since when."""
        self.since = 0.0

    def is_stuck(self, nonce: bytes) -> bool:
        return self.nonce == nonce and time.monotonic() - self.since >= _STUCK

    def refused(self, nonce: bytes) -> None:
        if self.nonce != nonce:
            self.nonce, self.since = nonce, time.monotonic()


class MysqlWords:
    def __init__(self, table: str) -> None:
        self._known: WeakKeyDictionary[Port, _Known] = WeakKeyDictionary()
        name = identifier(table, "`")
        row = f"{_micros(_NOW)}, @@max_allowed_packet, {_columns()}"
        self._upsert = (
            f"INSERT INTO {name} (`scope`, `tenant`, `operation`, `key`, `state`, `nonce`, `attempts`, `token`, `policy`, "
            "`fingerprint`, `fingerprint_version`, `created`, `updated`, `lease_until`, `resolved`, `labels`, `secret_id`) "
            f"VALUES (UNHEX($1), {_TEXT % 2}, {_TEXT % 3}, {_TEXT % 4}, 'running', UNHEX($5), 1, {_micros(_NOW)}, 'hold', "
            f"UNHEX($6), $7, {_NOW}, {_NOW}, {_NOW} + INTERVAL $8 MICROSECOND, 0, {_TEXT % 9}, {_TEXT % 10}) "
            "ON DUPLICATE KEY UPDATE `version` = `version`"
        )
        self._returning = f"{_QUICK}{self._upsert} RETURNING {row}"
        self._waiting = f"{_PATIENT}{self._upsert} RETURNING {row}"
        self._select = f"SELECT {row} FROM {name} WHERE `scope` = UNHEX($1)"
        changes = ", ".join(
            f"`{column}` = {_value(column, at)}" for at, column in enumerate(rows.COLUMNS, 1) if at > 1
        )
        update = f"UPDATE {name} FORCE INDEX (PRIMARY) SET"
        self._update = (
            f"{update} {changes}, `version` = `version` + 1, `buried` = 0 WHERE `scope` = UNHEX($1)"
        )
        # @@in_transaction (MariaDB): the function may have committed, and this must not be a transaction of its own. Drivers
        # cannot tell: they learn the server's status from some answers only.
        self._finish = (
            f"{update} `state` = 'done', `updated` = {_NOW}, `settled` = {_NOW}, `lease_until` = {_NOW}, "
            f"`expires` = {_NOW} + INTERVAL $3 MICROSECOND, `tombstone` = {_NOW} + INTERVAL $4 MICROSECOND, "
            f"`policy` = COALESCE($5, `policy`), `marker` = $6, `result` = UNHEX($7), `ref` = COALESCE({_TEXT % 8}, `ref`), "
            "`steps` = COALESCE(UNHEX($9), `steps`), `version` = `version` + 1 "
            "WHERE `scope` = UNHEX($1) AND `nonce` = UNHEX($2) AND `state` = 'running' /*M! AND @@in_transaction = 1 */"
        )

    async def enter(self, port: Port, ask: Ask, patience: float) -> Entry:
        scope = ask.scope
        args = (
            scope.hash.hex(),
            _hex(scope.tenant),
            _hex(scope.operation),
            _hex(scope.key),
            ask.nonce.hex(),
            ask.fingerprint.hex() if ask.fingerprint else None,
            ask.fingerprint_version,
            round(ask.lease * 1e6),
            _hex(_encode_labels(ask.labels).decode() if ask.labels else None),
            _hex(ask.secret_id or None),
        )
        known = self._of(port)
        if port.mariadb:
            row = await self._enter_mariadb(port, known, ask.nonce, args, patience)
        else:
            row = await self._enter_mysql(port, args, patience)
        found = _entry(row, known)
        if found.record is not None and found.record.nonce == ask.nonce:
            return Entry(found.now, inserted=True)
        return found

    def _of(self, port: Port) -> _Known:
        return self._known.setdefault(port, _Known())

    async def _enter_mariadb(
        self, port: Port, known: _Known, nonce: bytes, args: tuple[Any, ...], patience: float
    ) -> Row:
        if patience >= _LEAST and known.is_stuck(nonce) and (gate := await _gate(port, args[0])):
            return await self._wait(port, args, gate)
        try:
            return (await query(port, self._returning, args))[0]
        except Exception:
            known.refused(nonce)  # locked; after anything else nobody asks again
            raise

    async def _wait(self, port: Port, args: tuple[Any, ...], gate: str) -> Row:
        """In InnoDB itself: it sees a cycle of those who wait, and ends one of them (1213)."""
        try:
            rows = await query(port, self._waiting, args)
        except Exception:
            with suppress(Exception):  # what was raised before is what tells
                await port.run(f"DO RELEASE_LOCK({gate})")
            raise
        await port.run(f"DO RELEASE_LOCK({gate})")
        return rows[0]

    async def _enter_mysql(self, port: Port, args: tuple[Any, ...], patience: float) -> Row:
        ((before,),) = await port.run("SELECT @@SESSION.innodb_lock_wait_timeout")
        await port.run(
            f"SET SESSION innodb_lock_wait_timeout = {max(1, min(1_000_000, int(min(patience, 1e6))))}"
        )
        back = f"SET SESSION innodb_lock_wait_timeout = {int(before)}"
        try:
            await query(port, self._upsert, args)
        except Exception:
            await port.run(back)
            raise
        # Not after a cancellation: a driver that was cancelled while it waited cannot be asked for anything more.
        await port.run(back)
        return (await query(port, f"{self._select} FOR UPDATE", args[:1]))[0]

    async def lock(self, port: Port, scope: Scope, patience: float) -> Entry:
        del patience
        quick = _QUICK if port.mariadb else ""
        found = await query(port, f"{quick}{self._select} FOR UPDATE", (scope.hash.hex(),))
        return _entry(found[0], self._of(port)) if found else Entry(0.0, locked=True)

    async def look(self, port: Port, scope: Scope) -> Entry:
        found = await query(port, self._select, (scope.hash.hex(),))
        return _entry(found[0], self._of(port)) if found else Entry(0.0)

    async def write(self, port: Port, record: Record) -> None:
        limit, args = self._of(port).limit, _args(record)
        if not _fits(self._update, args, limit) and record.result:  # a probe's word
            args = _args(msgspec.structs.replace(record, result=b"", marker=TOO_LARGE_FOR_STORE))
        if not _fits(self._update, args, limit):  # with the steps of earlier attempts
            raise CodecError(
                f"the record of an earlier attempt, with its steps, is too large for this connection ({_size(self._update, args)} "
                f"bytes, it takes {limit}): raise max_allowed_packet on the server"
            )
        await query(port, self._update, args)

    async def finish(self, port: Port, end: Settle) -> int | None:
        limit, args = self._of(port).limit, _end_args(end)
        # A packet that is too large would end the connection, and the caller's rows with it.
        while not _fits(self._finish, args, limit) and (end.result or end.steps):
            end = shrunk(end)
            args = _end_args(end)
        await query(port, self._finish, args)
        # The version changes, so that found and changed rows are the same number.
        return 0 if port.count == 1 else None


async def _gate(port: Port, scope: str) -> str:
    """The name of a lock that nobody had; otherwise nothing. Of those who wait for a key one at a time does so in InnoDB: if an
    insertion is rolled back, all who wait for it there get the gap that it leaves, and are in each other's way (1213)."""
    gate = f"'semel {scope[:40]}'"
    with suppress(Exception):  # a cluster (Galera) has none
        ((got,),) = await port.run(f"SELECT COALESCE(GET_LOCK({gate}, 0), 0)")
        return gate if int(got) else ""
    return ""


def _size(sql: str, args: Sequence[Any]) -> int:
    return _AROUND + len(sql) + sum(len(arg) + 2 for arg in args if isinstance(arg, str))


def _fits(sql: str, args: Sequence[Any], limit: int) -> bool:
    return not limit or _size(sql, args) < limit


def _end_args(end: Settle) -> tuple[Any, ...]:
    forever = end.retention >= _FOREVER
    buried = min(end.retention + end.tombstone, _FOREVER) if end.tombstone and not forever else None
    return (
        end.scope.hash.hex(),
        end.nonce.hex(),
        None if forever else round(end.retention * 1e6),
        None if buried is None else round(buried * 1e6),
        end.policy.value if end.policy else None,
        end.marker or None,
        end.result.hex() if end.result else None,
        _hex(end.ref),
        None if end.steps is None else end.steps.hex(),
    )


def _hex(text: str | None) -> str | None:
    return None if text is None else text.encode().hex()


def _args(record: Record) -> list[Any]:
    given: list[Any] = []
    for name, value in zip(rows.COLUMNS, rows.to_row(record), strict=True):
        if value is None:
            given.append(None)
        elif name in rows.TIMES:
            given.append(_END if value * 1e6 >= _END else round(value * 1e6))
        elif name in _BYTES:
            given.append(value.hex())
        else:
            given.append(int(value) if name in _NUMBERS else _hex(value))
    return given


def _entry(row: Row, known: _Known) -> Entry:
    now, limit, *columns = row
    known.limit = int(limit)
    for at, name in enumerate(rows.COLUMNS):
        value = columns[at]
        if value is not None and name in rows.TIMES:
            columns[at] = inf if int(value) >= _END else int(value) / 1e6
        elif isinstance(value, bytes | bytearray) and name not in _BYTES:
            columns[at] = value.decode()
    return Entry(int(now) / 1e6, record=record_of(columns), locked=True)
