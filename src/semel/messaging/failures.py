"""Errors of a database that say that it cannot be had now, told from those that are somebody's fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from semel.errors import StoreUnavailable

__all__ = ["is_away", "translating", "unavailable"]

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
)


def is_away(error: BaseException) -> bool:
    """Whether it says that the database cannot be had now, which is nobody's fault and passes."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, StoreUnavailable | PoolTimeout)
    if error.connection_invalidated or isinstance(error.orig, OSError) or isinstance(error, InterfaceError):
        return True
    # Only what a driver calls operational: the text of a violated constraint may contain any word.
    text = str(error.orig or error).lower()
    return isinstance(error, OperationalError) and any(word in text for word in _GONE)


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
