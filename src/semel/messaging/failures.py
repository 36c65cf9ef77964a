"""Errors of a database that say that it cannot be had now, told from those that are somebody's fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from semel.errors import StoreUnavailable

__all__ = ["is_away", "translating", "unavailable"]

# Codes before words: a server's text may quote the name of a column, or what a trigger has to say ("this account is closed").
_STATES: Final = ("08", "57P", "53300", "40P01")  # lost, shutting down or starting up, full, a deadlock
_MYSQL: Final = frozenset(
    {
        0,  # PyMySQL: there is no connection any more
        1040,  # too many connections, of all, of a user
        1203,
        1226,
        1053,  # shutting down
        1077,
        1079,
        1158,  # packets that did not come through
        1159,
        1160,
        1161,
        1205,  # a lock was waited for in vain, a deadlock
        1213,
        1927,  # the connection was killed
        4031,  # or left alone for too long
        *range(2000, 2100),  # what the client says: it cannot connect, or lost its connection
    }
)
_SQLITE: Final = frozenset({5, 6})  # busy, locked
# What drivers say without a code, in words of their own or of the system's.
_GONE: Final = (
    "database is locked",
    "deadlock",
    "lock wait timeout",
    "closed",
    "terminat",
    "lost",
    "gone away",
    "refused",
    "timed out",
    "timeout expired",
    "shut",
    "starting up",
    "recovery mode",
    "not accepting",
    "too many",
    "connection slots",
    "resolve host",
    "translate host",
    "name resolution",
    "name or service",
    "no route",
    "unreachable",
    "reset by peer",
    "broken pipe",
    "eof",
)


def is_away(error: BaseException) -> bool:
    """Whether it says that the database cannot be had now, which is nobody's fault and passes."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, StoreUnavailable | PoolTimeout)
    if error.connection_invalidated or isinstance(error.orig, OSError):
        return True
    match _code(error.orig):
        case str(state):
            return state.startswith(_STATES)
        case ("mysql", number):
            return number in _MYSQL
        case ("sqlite", number):
            return number & 0xFF in _SQLITE
    text = str(error.orig or error).lower()
    return isinstance(error, OperationalError | InterfaceError) and any(word in text for word in _GONE)


def _code(error: BaseException | None) -> str | tuple[str, int] | None:
    """An SQLSTATE, or the number that MariaDB, MySQL or SQLite has for it."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(state, str):
        return state
    number = getattr(error, "sqlite_errorcode", None)
    if isinstance(number, int):
        return "sqlite", number
    first = error.args[0] if error is not None and error.args else None
    return ("mysql", first) if isinstance(first, int) else None


@contextmanager
def translating() -> Iterator[None]:
    """What asyncpg raises while it connects, as SQLAlchemy's error: that translates only what comes later."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "asyncpg":
            raise OperationalError(None, None, error) from error
        raise


def unavailable(error: Exception, where: str) -> Exception:
    """StoreUnavailable in place of one that says so; any other as it is."""
    if is_away(error):
        said = str(getattr(error, "orig", None) or error).splitlines() or [type(error).__name__]
        return StoreUnavailable(f"the database {where} did not answer: {said[0]}")
    return error
