"""Claim, settle and peek inside a caller's transaction: the same decisions (`model`) on every database.

A row written here as `running` is seen by nobody until the caller commits, and by then it is `done`. It says policy
`hold` meanwhile: should the function commit behind our back, the key reads as unknown and is not run again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from typing import Any, Final, Protocol

import msgspec

from semel import model
from semel.errors import ConfigurationError, OutcomeUnknown
from semel.keys import Scope, mask
from semel.model import Answer, Ask, Kind, Policy, Record, Settle, Unknown, Verdict
from semel.stores import rows
from semel.within.ports import Port, Row, bound

__all__ = [
    "Entry",
    "Unreadable",
    "Words",
    "claim",
    "guarded",
    "identifier",
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
    transaction: int | None = None
    """The caller's transaction by the database's own number, where the database tells (PostgreSQL)."""


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

    async def finish(self, port: Port, end: Settle, transaction: int | None) -> bool:
        """The owner's `done`, in one statement; False if the row is not the owner's running one, or if it is known that
        this is another transaction than the claim's."""
        ...

    async def look(self, port: Port, scope: Scope) -> Entry: ...


async def claim(words: Words, port: Port, ask: Ask, patience: float) -> tuple[Verdict, int | None]:
    """Decide by `model.claim`. Anything but `Won` has written nothing. With the verdict: `Entry.transaction`."""
    try:
        while True:
            found = await words.enter(port, ask, patience)
            if found.inserted:
                return model.claim(None, ask, found.now)[0], found.transaction
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
            return verdict, found.transaction
    except Unreadable:
        return _UNREADABLE, None


def guarded(record: Record) -> Record:
    return msgspec.structs.replace(record, policy=Policy.HOLD, expires=inf)


async def settle(
    words: Words, port: Port, end: Settle, patience: float, transaction: int | None = None
) -> Answer:
    """Decide by `model.settle`: the owner's `done` in one statement, a probe's word on a locked row."""
    if end.kind is Kind.DONE and not end.new_nonce:
        return Answer.OK if await words.finish(port, end, transaction) else Answer.LOST
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


async def query(port: Port, sql: str, args: Sequence[Any]) -> Sequence[Row]:
    text, order = bound(sql, port.style)
    return await port.run(text, args if order is None else [args[at] for at in order])


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
