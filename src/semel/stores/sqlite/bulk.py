"""Many items by one statement, for what they nearly always are: keys that nobody has used, and owners who are done.

A statement of many rows is one call into SQLite: it spares each row the way there and back, and Python runs other
threads meanwhile. What is not as expected changes nothing here that doing it again, one by one, would not repeat
(every write carries its nonce), so a part with a surprise in it is simply left to `records`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, TypeVar

__all__ = ["FRESH", "Bulk", "Finish", "Plain", "is_part", "parts"]

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
SCOPE, NONCE = 32, 16
"""Bytes of each, always."""
_OWN: Final = ("key", "fingerprint")
_SHARED: Final = tuple(name for name in FRESH if name not in {"scope", "nonce", *_OWN})
"""What is nearly always the same for all claims of a batch."""
_NONCE: Final = FRESH.index("nonce")
_own_of: Final = itemgetter(*map(FRESH.index, _OWN))
_shared_of: Final = itemgetter(*map(FRESH.index, _SHARED))
Plain = tuple[float | None, float | None, bytes | None, bytes, bytes]
"""Of a run that is plainly done: expires, tombstone, result, scope, nonce. In the order of `Bulk.plain.names`."""


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
    return len(items) == 1 or len(items) in _SIZES


class Bulk:
    """One table's statements of many rows.

    To hand a value over costs as much as to store it. So scopes and nonces, which have one length each, travel in one
    string each, from which every row cuts its own; and what is the same for all rows is handed over once.
    """

    def __init__(self, table: str, columns: Sequence[str], done: str, plain: str) -> None:
        self._table = table
        self._found = ", ".join(f"t.{name}" for name in columns)
        self.done = Finish(table, done)
        self.plain = Finish(table, plain)
        self._changes, _, self._condition = plain.partition(" WHERE ")
        self._texts: dict[tuple[str, int], str] = {}

    def find(self, db: sqlite3.Connection, hashes: Sequence[bytes]) -> list[Any]:
        return db.execute(self._text("find", len(hashes)), (b"".join(hashes),)).fetchall()

    def add(self, db: sqlite3.Connection, now: float, rows: Sequence[Sequence[Any]]) -> bool:
        """Insert fresh runs, each a row of `FRESH`; False if a key was there already (then the others are in)."""
        if len(rows) == 1:
            return db.execute(self._text("add", 1), (now, *rows[0])).rowcount == 1
        shared = set(map(_shared_of, rows))
        scopes, nonces = [row[0] for row in rows], [row[_NONCE] for row in rows]
        if len(shared) == 1 and _are(scopes, SCOPE) and _are(nonces, NONCE):
            verb, own = "add alike", chain.from_iterable(map(_own_of, rows))
            values = [now, b"".join(scopes), b"".join(nonces), *shared.pop(), *own]
        else:
            verb, values = "add", [now, *chain.from_iterable(rows)]
        return db.execute(self._text(verb, len(rows)), values).rowcount == len(rows)

    def finish(self, db: sqlite3.Connection, now: float, rows: Sequence[Plain], size: int) -> bool:
        """End runs that are plainly done; False if one was not as its owner thinks (then the others are ended)."""
        if size == 1:
            return self.plain.run(db, now, rows, size)
        expires, tombstone = rows[0][:2]
        scopes, nonces = [row[3] for row in rows], [row[4] for row in rows]
        alike = all(row[0] == expires and row[1] == tombstone for row in rows)
        if not (alike and _are(scopes, SCOPE) and _are(nonces, NONCE)):
            return self.plain.run(db, now, rows, size)
        results = [row[2] or b"" for row in rows]
        values = [now, expires, tombstone, b"".join(scopes), b"".join(nonces), b"".join(results)]
        begin = 1
        for result in results:
            values += (begin if result else None, len(result))  # what is cut at no place is NULL
            begin += len(result)
        # A row beyond the last scope has an empty one, which matches nothing.
        values += [None] * (2 * (size - len(rows)))
        return db.execute(self._text("finish", size), values).rowcount == len(rows)

    def _text(self, verb: str, rows: int) -> str:
        text = self._texts.get((verb, rows))
        if text is None:
            make = {
                "find": self._find,
                "add": self._add,
                "add alike": self._add_alike,
                "finish": self._finish,
            }
            text = self._texts[verb, rows] = make[verb](rows)
        return text

    def _find(self, rows: int) -> str:
        # A list of keys would be sorted into a table of its own before the first of them is looked for.
        return (
            f'SELECT {self._found} FROM {_numbered(rows)} CROSS JOIN "{self._table}" AS t '
            f"ON t.scope = {_cut(1, SCOPE)}"
        )

    def _add(self, rows: int) -> str:
        width = len(FRESH)
        own = (", ".join(f"?{2 + row * width + at}" for at in range(width)) for row in range(rows))
        return self._insert(FRESH, own)

    def _add_alike(self, rows: int) -> str:
        shared = ", ".join(f"?{4 + at}" for at in range(len(_SHARED)))
        first, width = 4 + len(_SHARED), len(_OWN)
        own = (
            f"{_cut(2, SCOPE, row)}, {_cut(3, NONCE, row)}, {shared}, "
            + ", ".join(f"?{first + row * width + at}" for at in range(width))
            for row in range(rows)
        )
        return self._insert(("scope", "nonce", *_SHARED, *_OWN), own)

    def _insert(self, columns: Sequence[str], rows: Iterable[str]) -> str:
        values = ", ".join(f"({row}, 'running', 1, ?1, ?1, 0)" for row in rows)
        names = ", ".join((*columns, "state", "attempts", "created", "updated", "resolved"))
        return f'INSERT INTO "{self._table}" ({names}) VALUES {values} ON CONFLICT (scope) DO NOTHING'

    def _finish(self, rows: int) -> str:
        places = {
            "now": "?1",
            "expires": "?2",
            "tombstone": "?3",
            "scope": _cut(4, SCOPE),
            "nonce": _cut(5, NONCE),
            "result": "substr(?6, given.column2, given.column3)",
        }
        changes, condition = (
            _NAME.sub(lambda found: places[found[1]], sql) for sql in (self._changes, self._condition)
        )
        given = _numbered(rows, *(f", ?{7 + 2 * row}, ?{8 + 2 * row}" for row in range(rows)))
        return f'UPDATE "{self._table}" SET {changes} FROM {given} WHERE {condition}'


def _are(pieces: Iterable[bytes], size: int) -> bool:
    """Whether each of them has this size, so that they can be told apart in one string."""
    return set(map(len, pieces)) == {size}


def _numbered(rows: int, *more: str) -> str:
    """A table `given` of so many rows, each with its number in column1, and more."""
    texts = more or ("",) * rows
    return f"(VALUES {', '.join(f'({row}{text})' for row, text in enumerate(texts))}) AS given"


def _cut(parameter: int, size: int, row: int | None = None) -> str:
    """A row's own piece of a string of pieces; without a row, that of each row of `given`."""
    begin = f"{size} * given.column1 + 1" if row is None else str(size * row + 1)
    return f"substr(?{parameter}, {begin}, {size})"


class Finish:
    """An UPDATE of many rows, or of one. `done` is the end of its text, with named parameters, `:now` among them."""

    def __init__(self, table: str, done: str) -> None:
        self._table = table
        self.names = tuple(dict.fromkeys(name for name in _NAME.findall(done) if name != "now"))
        """What `run` takes for each row, in order."""
        changes, _, condition = done.partition(" WHERE ")
        self._changes, self._condition = self._from_rows(changes), self._from_rows(condition)
        # One row needs no table to be taken from, which SQLite would fill and read for it.
        single = _NAME.sub(lambda found: f"?{('now', *self.names).index(found[1]) + 1}", done)
        self._texts: dict[int, str] = {1: f'UPDATE "{table}" SET {single}'}

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
