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

__all__ = ["Bulk", "parts"]

T = TypeVar("T")

_SIZES: Final = (64, 16, 4) if sqlite3.sqlite_version_info >= (3, 33) else ()  # older ones lack UPDATE … FROM
"""Rows of a statement: a few sizes only, because SQLite takes longer to read such a statement than to run it."""
_NAME: Final = re.compile(r":(\w+)")


def parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items in order, in parts for each of which there is a statement."""
    at = 0
    for size in _SIZES:
        while len(items) - at >= size:
            yield items[at : at + size]
            at += size
    for single in range(at, len(items)):
        yield items[single : single + 1]


class Bulk:
    """The statements. `done` is the text of an UPDATE's end with named parameters, `:now` among them."""

    def __init__(self, table: str, columns: Sequence[str], fresh: Sequence[str], done: str) -> None:
        self._table = table
        self._columns = ", ".join(columns)
        self._fresh = fresh
        self.names = tuple(dict.fromkeys(name for name in _NAME.findall(done) if name != "now"))
        """What `finish` takes for each row, in order."""
        changes, _, condition = done.partition(" WHERE ")
        self._changes, self._condition = self._from_rows(changes), self._from_rows(condition)
        self._texts: dict[tuple[str, int], str] = {}

    def add(self, db: sqlite3.Connection, rows: Sequence[Sequence[Any]]) -> bool:
        """Insert them; False if a key was there already (then the others are in)."""
        text = self._text("add", len(rows), len(self._fresh))
        return db.execute(text, list(chain.from_iterable(rows))).rowcount == len(rows)

    def finish(self, db: sqlite3.Connection, now: float, rows: Sequence[Sequence[Any]], size: int) -> bool:
        """Update them; False if one was not as its owner thinks (then the others are done). At most `size` rows."""
        values = [now, *chain.from_iterable(rows)]
        values += [None] * ((size - len(rows)) * len(self.names))  # a row without a key matches nothing
        return db.execute(self._text("finish", size, len(self.names)), values).rowcount == len(rows)

    def find(self, db: sqlite3.Connection, hashes: Sequence[bytes]) -> list[Any]:
        return db.execute(self._text("find", len(hashes), 1), hashes).fetchall()

    def _text(self, verb: str, rows: int, width: int) -> str:
        text = self._texts.get((verb, rows))
        if text is None:
            row = ", ".join("?" * width)
            binds = ", ".join([row if verb == "find" else f"({row})"] * rows)
            text = self._texts[verb, rows] = self._made(verb, binds)
        return text

    def _made(self, verb: str, binds: str) -> str:
        if verb == "add":
            columns = ", ".join(self._fresh)
            return f'INSERT INTO "{self._table}" ({columns}) VALUES {binds} ON CONFLICT (scope) DO NOTHING'
        if verb == "find":
            return f'SELECT {self._columns} FROM "{self._table}" WHERE scope IN ({binds})'
        return f'UPDATE "{self._table}" SET {self._changes} FROM (VALUES {binds}) AS given WHERE {self._condition}'

    def _from_rows(self, sql: str) -> str:
        """The same with columns of `given` instead of parameters; SQLite calls them column1, column2, …"""
        return _NAME.sub(lambda found: self._place(found[1]), sql)

    def _place(self, name: str) -> str:
        return "?1" if name == "now" else f"given.column{self.names.index(name) + 1}"
