"""The statements of `within` on MariaDB and MySQL (InnoDB).

A claim is one upsert that changes nothing of a row that is there. It takes the row's exclusive lock at once (a plain
INSERT takes a shared one first, and two waiters of a rolled-back insert would then deadlock), it sees the latest
row at every isolation level, and it opens no snapshot. InnoDB keeps locks after ROLLBACK TO SAVEPOINT, so a key that
is settled or running is looked at before, on a connection of our own, and not locked at all.

MariaDB answers a locked row at once (`innodb_lock_wait_timeout = 0`) and is asked again; MySQL cannot wait less than
a second. Times are microseconds here, bytes and texts hexadecimal: they mean the same under every sql_mode, time
zone, character set and driver.
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
_TEXT: Final = "CONVERT(UNHEX($%d) USING utf8mb4)"


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


class MysqlWords:
    def __init__(self, table: str) -> None:
        name = identifier(table, "`")
        row = f"{_micros(_NOW)}, {_columns()}"
        self._upsert = (
            f"INSERT INTO {name} (`scope`, `tenant`, `operation`, `key`, `state`, `nonce`, `attempts`, `token`, `policy`, "
            "`fingerprint`, `fingerprint_version`, `created`, `updated`, `lease_until`, `resolved`, `labels`, `secret_id`) "
            f"VALUES (UNHEX($1), {_TEXT % 2}, {_TEXT % 3}, {_TEXT % 4}, 'running', UNHEX($5), 1, {_micros(_NOW)}, 'hold', "
            f"UNHEX($6), $7, {_NOW}, {_NOW}, {_NOW} + INTERVAL $8 MICROSECOND, 0, {_TEXT % 9}, {_TEXT % 10}) "
            "ON DUPLICATE KEY UPDATE `version` = `version`"
        )
        self._returning = f"{_QUICK}{self._upsert} RETURNING {row}"
        self._select = f"SELECT {row} FROM {name} WHERE `scope` = UNHEX($1)"
        changes = ", ".join(
            f"`{column}` = {_value(column, at)}" for at, column in enumerate(rows.COLUMNS, 1) if at > 1
        )
        self._update = (
            f"UPDATE {name} SET {changes}, `version` = `version` + 1, `buried` = 0 WHERE `scope` = UNHEX($1)"
        )
        # @@in_transaction (MariaDB): the function may have committed, and this must not be a transaction of its own. Drivers
        # cannot tell: they learn the server's status from some answers only.
        self._finish = (
            f"UPDATE {name} SET `state` = 'done', `updated` = {_NOW}, `settled` = {_NOW}, `lease_until` = {_NOW}, "
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
        if port.mariadb:
            found = _entry((await query(port, self._returning, args))[0])
        else:
            found = await self._enter_mysql(port, args, patience)
        if found.record is not None and found.record.nonce == ask.nonce:
            return Entry(found.now, inserted=True)
        return found

    async def _enter_mysql(self, port: Port, args: tuple[Any, ...], patience: float) -> Entry:
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
        return _entry((await query(port, f"{self._select} FOR UPDATE", args[:1]))[0])

    async def lock(self, port: Port, scope: Scope, patience: float) -> Entry:
        del patience
        quick = _QUICK if port.mariadb else ""
        found = await query(port, f"{quick}{self._select} FOR UPDATE", (scope.hash.hex(),))
        return _entry(found[0]) if found else Entry(0.0, locked=True)

    async def look(self, port: Port, scope: Scope) -> Entry:
        found = await query(port, self._select, (scope.hash.hex(),))
        return _entry(found[0]) if found else Entry(0.0)

    async def write(self, port: Port, record: Record) -> None:
        await query(port, self._update, _args(record))

    async def finish(self, port: Port, end: Settle) -> int | None:
        forever = end.retention >= _FOREVER
        buried = min(end.retention + end.tombstone, _FOREVER) if end.tombstone and not forever else None
        args = (
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
        await query(port, self._finish, args)
        # The version changes, so that found and changed rows are the same number.
        return 0 if port.count == 1 else None


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


def _entry(row: Row) -> Entry:
    now, *columns = row
    for at, name in enumerate(rows.COLUMNS):
        value = columns[at]
        if value is not None and name in rows.TIMES:
            columns[at] = inf if int(value) >= _END else int(value) / 1e6
        elif isinstance(value, bytes | bytearray) and name not in _BYTES:
            columns[at] = value.decode()
    return Entry(int(now) / 1e6, record=record_of(columns), locked=True)
