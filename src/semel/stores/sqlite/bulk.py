"""Many items by one statement, for what they nearly always are: keys that nobody has used, and owners who are done.

A statement of many rows is one call into SQLite: it spares each row the way there and back, and Python runs other
threads meanwhile. What is not as expected changes nothing here that doing it again, one by one, would not repeat
(every write carries its nonce), so a part with a surprise in it is simply left to `records`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, TypeVar

__all__ = ["FRESH", "Bulk", "Finish", "is_part", "parts"]

T = TypeVar("T")

_SIZES: Final = (
    (64, 32, 16, 4) if sqlite3.sqlite_version_info >= (3, 33) else ()
)  # older ones lack UPDATE … FROM
"""Rows of a statement: a few sizes only, because SQLite takes longer to read such a statement than to run it."""
_NAME: Final = re.compile(r":(\w+)")
FRESH: Final = (
    "scope", "tenant", "operation", "key", "nonce", "token", "policy", "fingerprint", "fingerprint_version",
    "lease_until", "expires", "labels", "secret_id",
)  # fmt: skip
"""What the rows of first claims differ in; the rest is the same for all of them, or NULL."""


def parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items in order, in parts for each of which there is a statement."""
    at = 0
    for size in _SIZES:
        while len(items) - at >= size:
            yield items[at : at + size]
            at += size
    for single in range(at, len(items)):
        yield items[single : single + 1]


def is_part(items: Sequence[object]) -> bool:
    """Whether one statement takes them all."""
    return bool(_SIZES) and (len(items) == 1 or len(items) in _SIZES)


class Bulk:
    """One table's statements of many rows."""

    def __init__(self, table: str, columns: Sequence[str], done: str, plain: str) -> None:
        self._table = table
        self._found = ", ".join(f"t.{name}" for name in columns)
        self.done = Finish(table, done)
        self.plain = Finish(table, plain)
        self._texts: dict[tuple[str, int], str] = {}

    def add(self, db: sqlite3.Connection, now: float, rows: Sequence[Sequence[Any]]) -> bool:
        """Insert fresh runs, each a row of `FRESH`; False if a key was there already (then the others are in)."""
        return db.execute(self._text("add", len(rows)), [now, *chain.from_iterable(rows)]).rowcount == len(
            rows
        )

    def find(self, db: sqlite3.Connection, hashes: Sequence[bytes]) -> list[Any]:
        return db.execute(self._text("find", len(hashes)), hashes).fetchall()

    def _text(self, verb: str, rows: int) -> str:
        text = self._texts.get((verb, rows))
        if text is None:
            text = self._texts[verb, rows] = self._add(rows) if verb == "add" else self._find(rows)
        return text

    def _add(self, rows: int) -> str:
        width = len(FRESH)
        binds = (", ".join(f"?{2 + row * width + at}" for at in range(width)) for row in range(rows))
        values = ", ".join(f"({row}, 'running', 1, ?1, ?1, 0)" for row in binds)
        columns = ", ".join((*FRESH, "state", "attempts", "created", "updated", "resolved"))
        return f'INSERT INTO "{self._table}" ({columns}) VALUES {values} ON CONFLICT (scope) DO NOTHING'

    def _find(self, rows: int) -> str:
        # A list of keys would be sorted into a table of its own before the first of them is looked for.
        given = ", ".join(["(?)"] * rows)
        return (
            f'SELECT {self._found} FROM (VALUES {given}) AS given CROSS JOIN "{self._table}" AS t '
            "ON t.scope = given.column1"
        )


class Finish:
    """An UPDATE of many rows. `done` is the end of its text, with named parameters, `:now` among them."""

    def __init__(self, table: str, done: str) -> None:
        self._table = table
        self.names = tuple(dict.fromkeys(name for name in _NAME.findall(done) if name != "now"))
        """What `run` takes for each row, in order."""
        changes, _, condition = done.partition(" WHERE ")
        self._changes, self._condition = self._from_rows(changes), self._from_rows(condition)
        self._texts: dict[int, str] = {}

    def run(self, db: sqlite3.Connection, now: float, rows: Sequence[Sequence[Any]], size: int) -> bool:
        """Update them; False if one was not as its owner thinks (then the others are done). At most `size` rows."""
        values = [now, *chain.from_iterable(rows)]
        values += [None] * ((size - len(rows)) * len(self.names))  # a row without a key matches nothing
        return db.execute(self._text(size), values).rowcount == len(rows)

    def _text(self, rows: int) -> str:
        text = self._texts.get(rows)
        if text is None:
            row = ", ".join("?" * len(self.names))
            given = ", ".join([f"({row})"] * rows)
            text = self._texts[rows] = (
                f'UPDATE "{self._table}" SET {self._changes} FROM (VALUES {given}) AS given WHERE {self._condition}'
            )
        return text

    def _from_rows(self, sql: str) -> str:
        """The same with columns of `given` instead of parameters; SQLite calls them column1, column2, …"""
        return _NAME.sub(lambda found: self._place(found[1]), sql)

    def _place(self, name: str) -> str:
        return "?1" if name == "now" else f"given.column{self.names.index(name) + 1}"
