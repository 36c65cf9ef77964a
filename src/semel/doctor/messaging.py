"""Messaging's tables, where there are any: all of them, of a version that is known, and of a kind that keeps what is written. Pure.

They are known here by name: messaging itself needs SQLAlchemy, the doctor does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from semel.messaging_names import SUFFIXES, VERSION
from semel.stores import unfit

__all__ = ["Messaging", "messaging_names", "messaging_of"]

_UNLOGGED: Final = "u"


class Messaging(msgspec.Struct, frozen=True):
    """The tables of outbox and inbox. `state` is none (there are not any), present, incomplete, newer or older."""

    state: str = "none"
    version: int | None = None
    text: str = ""
    problems: tuple[str, ...] = ()
    """Why messages would be lost or doubled there, or not be taken at all."""
    doubts: tuple[str, ...] = ()
    """Why nobody can promise that a power loss leaves them there."""


def messaging_names(table: str) -> list[str]:
    """The tables that begin with this name; a schema in front of it stays there."""
    return [f"{table}{suffix}" for suffix in SUFFIXES]


def messaging_of(
    table: str, kinds: Mapping[str, str], version: str | None, engines: Sequence[Sequence[object]] = ()
) -> Messaging:
    """`kinds` has those that are there, with PostgreSQL's persistence; `engines` are MariaDB's rows for `unfit.other_engines`."""
    if not kinds:
        return Messaging()
    number = int(version) if version is not None and version.isdigit() else None
    state, text = _state(table, kinds, number)
    problems = [*_unlogged(kinds), *_without_transactions(unfit.other_engines(engines))]
    if state in ("newer", "older"):
        problems.append(text)
    unknown = unfit.other_engines(engines, transactional=True)
    doubts = (f"messaging's tables {unfit.unknown_engines(unknown)}",) if unknown else ()
    return Messaging(state, number, text, tuple(problems), doubts)


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


def _without_transactions(found: str) -> Sequence[str]:
    if not found:
        return ()
    text = (
        f"messaging's tables have an engine without transactions ({found}): what is written there stays although its transaction "
        f"is rolled back, and a crash may lose it; {unfit.to_innodb(found)}"
    )
    return (text,)
