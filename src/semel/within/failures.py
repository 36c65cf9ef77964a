"""What a driver's error means, whichever library wrapped it. Codes decide, never texts (but SQLite has one code for all)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from semel.within.ports import Dialect

__all__ = [
    "is_failed_transaction",
    "is_locked",
    "is_missing_savepoint",
    "is_missing_table",
    "is_outside_transaction",
    "is_retryable",
    "let_go",
]

_SQLITE_BUSY: Final = 5
_SQLITE_LOCKED: Final = 6
_SQLITE_BUSY_SNAPSHOT: Final = 517
_SQLITE_ERROR: Final = 1
_RETRYABLE: Final = frozenset({"40001", "40P01", "1213", "1020", str(_SQLITE_BUSY_SNAPSHOT)})
_ALCHEMY: Final = ("sqlalchemy.", "aiosqlite.")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what SQLAlchemy wrapped (`orig`) and what Django and its adapters raised it from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = getattr(current, "orig", None) or current.__cause__


def _code(error: BaseException, dialect: Dialect) -> str:
    """SQLSTATE, MySQL's number or SQLite's extended code, as text; empty when it is not the database's error."""
    for each in _chain(error):
        if dialect == "postgresql":
            state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
            if isinstance(state, str):
                return state
        elif dialect == "sqlite":
            code = getattr(each, "sqlite_errorcode", None)
            if isinstance(code, int):
                return str(code)
        elif each.args and type(each.args[0]) is int and not isinstance(each, OSError):
            return str(each.args[0])
    return ""


def is_retryable(error: BaseException, dialect: Dialect) -> bool:
    """A serialization failure or a deadlock: the database asks for the whole transaction to be repeated."""
    return _code(error, dialect) in _RETRYABLE


def is_locked(error: BaseException, dialect: Dialect) -> bool:
    """Somebody held the row (SQLite: the database) for longer than we would wait."""
    code = _code(error, dialect)
    if dialect == "sqlite":
        # A snapshot that is too old is no lock: waiting does not help, the transaction must be repeated.
        return (
            code.isdigit()
            and int(code) & 0xFF in (_SQLITE_BUSY, _SQLITE_LOCKED)
            and code != str(_SQLITE_BUSY_SNAPSHOT)
        )
    return code in (("55P03",) if dialect == "postgresql" else ("1205", "3572"))


def is_missing_table(error: BaseException, dialect: Dialect) -> bool:
    code = _code(error, dialect)
    if dialect == "sqlite":
        return code == str(_SQLITE_ERROR) and "no such table" in str(error)
    # 42883: the tables are there (an application's own migration), the schema's function is not.
    return code in (("42P01", "42883") if dialect == "postgresql" else ("1146",))


def is_missing_savepoint(error: BaseException, dialect: Dialect) -> bool:
    """The savepoint is gone: somebody committed or rolled back what was around it."""
    code = _code(error, dialect)
    if dialect == "sqlite":
        return code == str(_SQLITE_ERROR) and "no such savepoint" in str(error)
    return code in (("3B001", "25P01") if dialect == "postgresql" else ("1305",))


def is_outside_transaction(error: BaseException, dialect: Dialect) -> bool:
    return dialect == "postgresql" and _code(error, dialect) == "25P01"


def is_failed_transaction(error: BaseException, dialect: Dialect) -> bool:
    """An error before this statement: PostgreSQL takes nothing but a rollback."""
    return dialect == "postgresql" and _code(error, dialect) == "25P02"


def let_go(error: BaseException) -> None:
    """Of what SQLAlchemy and aiosqlite were at when they were cancelled: their frames lead back to the error, and so would keep a
    cursor until the next collection of cycles, and with it SQLite's lock though its connection is closed. Not of the frames
    of others (`traceback.clear_frames`), which whoever reports the error may want to look into."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        at = current.__traceback__
        while at is not None:
            if str(at.tb_frame.f_globals.get("__name__")).startswith(_ALCHEMY):
                with suppress(RuntimeError):  # it runs still
                    at.tb_frame.clear()
            at = at.tb_next
        current = current.__cause__ or current.__context__
