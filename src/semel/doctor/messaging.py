"""Messaging's tables, where there are any: all of them, of a version that is known, and of a kind that keeps what is written. Pure.

They are known here by name: messaging itself needs SQLAlchemy, the doctor does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from semel.messaging_names import SUFFIXES, VERSION

__all__ = ["Messaging", "messaging_names", "messaging_of"]

_LOGGED: Final = "p"
_UNLOGGED: Final = "u"


class Messaging(msgspec.Struct, frozen=True):
    """The tables of outbox and inbox. `state` is none (there are not any), present, incomplete, newer or older."""

    state: str = "none"
    version: int | None = None
    text: str = ""
    problems: tuple[str, ...] = ()
    """Why messages would be lost or doubled there, or not be taken at all."""


def messaging_names(table: str) -> list[str]:
    """The tables that begin with this name; a schema in front of it stays there."""
    return [f"{table}{suffix}" for suffix in SUFFIXES]


def messaging_of(table: str, kinds: Mapping[str, str], version: str | None) -> Messaging:
    """`kinds` has those that are there: PostgreSQL's persistence, MariaDB's engine, nothing for SQLite."""
    if not kinds:
        return Messaging()
    number = int(version) if version is not None and version.isdigit() else None
    state, text = _state(table, kinds, number)
    problems = [*_unlogged(kinds), *_engines(kinds)]
    if state in ("newer", "older"):
        problems.append(text)
    return Messaging(state, number, text, tuple(problems))


def _state(table: str, kinds: Mapping[str, str], version: int | None) -> tuple[str, str]:
    tables = f"the messaging tables {table}_outbox…"
    if version is not None and version > VERSION:
        return "newer", f"{tables} are of version {version}, this semel knows {VERSION}: upgrade semel"
    if version is not None and version < VERSION:
        return "older", f"{tables} are of version {version}, this semel needs {VERSION}: migrate them"
    if missing := [name for name in messaging_names(table) if name not in kinds]:
        text = (
            f"{tables} are there without {', '.join(missing)}: semel makes what is missing at its first use, or run what `semel "
            "schema sql` prints"
        )
        return "incomplete", text
    if version is None:
        return "present", f"{tables} are there; their version is not written, or may not be read"
    return "present", f"{tables} are of version {version}"


def _unlogged(kinds: Mapping[str, str]) -> Sequence[str]:
    names = [name for name, kind in kinds.items() if kind == _UNLOGGED]
    if not names:
        return ()
    mend = "; ".join(f"ALTER TABLE {name} SET LOGGED" for name in names)
    text = (
        f"messaging's tables {', '.join(names)} are UNLOGGED, a crash of the server empties them: messages that wait are lost, and "
        f"those that were handled are handled again; {mend}"
    )
    return (text,)


def _engines(kinds: Mapping[str, str]) -> Sequence[str]:
    other = {name: kind for name, kind in kinds.items() if kind not in ("", _LOGGED, _UNLOGGED, "InnoDB")}
    if not other:
        return ()
    found = ", ".join(f"{name}={kind}" for name, kind in other.items())
    mend = "; ".join(f"ALTER TABLE `{name}` ENGINE=InnoDB" for name in other)
    text = (
        f"messaging's tables are not InnoDB ({found}): what is written there stays although its transaction is rolled back, and a "
        f"crash loses it; {mend}"
    )
    return (text,)
