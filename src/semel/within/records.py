"""Claim, settle and peek inside a caller's transaction: the same decisions (`model`) on every database.

A row written here as `running` is seen by nobody until the caller commits, and by then it is `done`. It says policy
`hold` meanwhile: should the function commit behind our back, the key reads as unknown and is not run again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Sequence
from math import inf
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from semel import model
from semel.errors import ConfigurationError, OutcomeUnknown
from semel.keys import Scope, mask
from semel.model import Answer, Ask, Policy, Record, Settle, Unknown, Verdict
from semel.stores import rows
from semel.within.ports import Port, Row, bound

__all__ = [
    "Entry",
    "Unreadable",
    "Words",
    "claim",
    "guarded",
    "identifier",
    "other_file",
    "peek",
    "query",
    "record_of",
    "settle",
]

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_UNREADABLE: Final = Unknown(None, Policy.HOLD, unreadable=True)


class Unreadable(Exception):
    """A stored row that is not a record: damaged, or of a format that this version does not know."""


class Entry(msgspec.Struct, frozen=True):
    """What an attempt to insert found: our own row now (`inserted`), somebody's row, or neither (then ask again)."""

    now: float
    inserted: bool = False
    record: Record | None = None
    locked: bool = False
    """The row found is locked for us: what was decided on it may be written."""


class Words(Protocol):
    """One database's statements for one table."""

    async def enter(self, port: Port, ask: Ask, patience: float) -> Entry:
        """Insert the claim, waiting up to `patience` seconds for whoever has the key uncommitted; or the row there."""
        ...

    async def lock(self, port: Port, scope: Scope, patience: float) -> Entry:
        """The latest row, locked."""
        ...

    async def write(self, port: Port, record: Record) -> None:
        """Replace a row that is locked."""
        ...

    async def finish(self, port: Port, end: Settle) -> int | None:
        """The owner's `done`, in one statement: the transaction by the database's own number (PostgreSQL), otherwise 0.
        None if the row is not the owner's running one, or if it is known that this is not the claim's transaction."""
        ...

    async def look(self, port: Port, scope: Scope) -> Entry: ...


async def claim(words: Words, port: Port, ask: Ask, patience: float, *, look: bool = False) -> Verdict:
    """Decide by `model.claim`. Anything but `Won` has written nothing. `look`: the insertion was tried just now."""
    try:
        while True:
            found = await (words.look(port, ask.scope) if look else words.enter(port, ask, patience))
            look = False
            if found.inserted:
                return model.claim(None, ask, found.now)[0]
            if found.record is None:
                continue  # committed between our snapshot and our insert: the next look sees it
            verdict, changed = model.claim(found.record, ask, found.now)
            if changed is not None and not found.locked:
                found = await words.lock(port, ask.scope, patience)
                if found.record is None:
                    continue  # purged or forgotten meanwhile
                verdict, changed = model.claim(found.record, ask, found.now)
            if changed is not None:
                await words.write(port, guarded(changed))
            return verdict
    except Unreadable:
        return _UNREADABLE


def guarded(record: Record) -> Record:
    return msgspec.structs.replace(record, policy=Policy.HOLD, expires=inf)


async def settle(words: Words, port: Port, end: Settle, patience: float) -> Answer:
    """Decide by `model.settle`, on a locked row: a probe's word. The owner's is `words.finish`."""
    found = await words.lock(port, end.scope, patience)
    answer, changed = model.settle(found.record, end, found.now)
    if changed is not None:
        await words.write(port, changed)
    return answer


async def peek(words: Words, port: Port, scope: Scope) -> tuple[Record | None, float]:
    try:
        found = await words.look(port, scope)
    except Unreadable as error:
        raise OutcomeUnknown(
            f"the record of key {mask(scope.key)} cannot be read: it is damaged, or a newer version wrote it; find out what "
            "happened, then call resolve(key, …) or forget(key)",
            unreadable=True,
        ) from error
    return found.record, found.now


def query(port: Port, sql: str, args: Sequence[Any]) -> Awaitable[Sequence[Row]]:
    if port.style == "dollar":
        return port.run(sql, args)
    text, order = bound(sql, port.style)
    return port.run(text, args if order is None else [args[at] for at in order])


def record_of(row: Sequence[Any]) -> Record:
    try:
        return rows.from_row(row)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise Unreadable from error


def identifier(table: str, quote: str) -> str:
    """The table's name, quoted; `schema.table` where the store accepts it."""
    parts = table.split(".")
    if len(parts) > 2 or not all(_IDENTIFIER.fullmatch(part) for part in parts):
        raise ConfigurationError(
            f"table={table!r} cannot be a table name here: use letters, digits and underscores"
        )
    return ".".join(f"{quote}{part}{quote}" for part in parts)


async def other_file(port: Port, table: str, file: str) -> str | None:
    """SQLite: None if the table's name means the one in `file` on this connection; otherwise the file that it does mean."""
    # In the order in which a table without a schema is looked for: in `temp` (number 1), in `main`, then as they were attached.
    databases = sorted(await port.run("PRAGMA database_list"), key=lambda row: -1 if row[0] == 1 else row[0])
    main = ""
    for number, schema, path in databases:
        place = os.fsdecode(path) if path else ":memory:"  # bytes, if its text_factory says so
        if place == file or _is_same(place, file):
            return None
        if number == 0:
            main = place
        if await _has_table(port, os.fsdecode(schema), table):
            return place
    return main


async def _has_table(port: Port, schema: str, table: str) -> bool:
    quoted = schema.replace('"', '""')
    sql = f'SELECT 1 FROM "{quoted}".sqlite_master WHERE name = $1 COLLATE NOCASE'
    return bool(await query(port, sql, (table,)))


def _is_same(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:  # one of them is not there
        return False
