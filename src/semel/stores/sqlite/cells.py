"""A record as the cells of an SQLite row, and back: what would not come back equal is refused, what is damaged is told."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from math import inf
from operator import itemgetter
from types import NoneType
from typing import Any, Final

import msgspec

from semel.errors import CodecError
from semel.model import Failure, Record
from semel.stores.rows import COLUMNS, from_row, to_row
from semel.stores.sqlite.bulk import FRESH

__all__ = [
    "Unreadable",
    "exact",
    "is_bad_text",
    "lenient_text",
    "shown",
    "to_cells",
    "to_fresh_cells",
    "to_record",
    "told",
    "try_record",
]

_PARTS: Final = slice(1, 4)  # tenant, operation, key
_COUNTS: Final = slice(COLUMNS.index("attempts"), COLUMNS.index("token") + 1)
_TIMES: Final = slice(COLUMNS.index("created"), COLUMNS.index("noted") + 1)
_fresh_of_row: Final = itemgetter(*map(COLUMNS.index, FRESH))
_NOT_TEXT: Final = object()


class Unreadable(Exception):
    """A stored row that is not a record: damaged, or of a format that this version does not know."""


def to_cells(record: Record) -> tuple[Any, ...]:
    """`to_row`, but refusing text that could not come back equal."""
    exact(record.ref)
    for name, text in (record.labels or {}).items():
        exact(name)
        exact(text)
    return to_row(record)


def to_fresh_cells(record: Record) -> Sequence[Any]:
    """The columns `FRESH` of a first claim's row."""
    if record.labels:
        row: Sequence[Any] = _fresh_of_row(to_cells(record))
        return row
    scope, expires = record.scope, record.expires
    assert scope is not None  # noqa: S101 - a claim has one
    return (
        scope.hash,
        scope.tenant,
        scope.operation,
        scope.key,
        record.nonce,
        record.token,
        record.policy._value_,  # `value` is a call
        record.fingerprint or None,
        record.fingerprint_version,
        record.lease_until,
        None if expires == inf else expires,
        None,
        record.secret_id or None,
    )


def to_record(row: Sequence[Any]) -> Record:
    """`from_row`, but a column may hold anything here: SQLite checks no types, and files get damaged."""
    if (
        set(map(type, row[_PARTS])) != {str}
        or set(map(type, row[_COUNTS])) != {int}
        or not set(map(type, row[_TIMES])) <= {float, NoneType}
    ):
        raise Unreadable
    try:
        return from_row(row)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise Unreadable from error


def try_record(row: Sequence[Any]) -> Record | None:
    try:
        return None if _NOT_TEXT in row else to_record(row)
    except Unreadable:
        return None


def exact(text: str | None) -> str | None:
    if text is not None and not text.isascii() and text != shown(text):
        raise CodecError(
            "a ref or label with a lone surrogate cannot be stored: use text that can be encoded"
        )
    return text


def shown(text: str) -> str:
    """A text for people: what cannot be encoded is escaped rather than losing the outcome that carries it."""
    return text.encode("utf-8", "backslashreplace").decode()


def told(error: Failure) -> Failure:
    return Failure(shown(error.type), None if error.code is None else shown(error.code), shown(error.message))


def is_bad_text(error: sqlite3.OperationalError) -> bool:
    """Text that is not UTF-8 is the sqlite3 module's own complaint; SQLite's have an error code."""
    return not hasattr(error, "sqlite_errorcode") and "decode to UTF-8" in str(error)


def lenient_text(raw: bytes) -> object:
    """For reading many rows: one that is damaged must not end the walk."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _NOT_TEXT
