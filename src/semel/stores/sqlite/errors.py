"""What SQLite's errors mean to a user of semel, and what helps."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

from semel.errors import ConfigurationError, SemelError, StoreUnavailable
from semel.stores.unfit import no_tables

__all__ = ["explain", "explained", "is_busy", "overdue"]

_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})

# What happened, by primary result code, and what helps.
_REMEDIES: Final = {
    sqlite3.SQLITE_READONLY: "is read-only for this process: give it write permission on the file, on its -wal and -shm "
    "beside it and on the directory, and mount the file system read-write",
    sqlite3.SQLITE_FULL: "cannot grow: the disk, a quota or max_page_count is full; free some space (semel purge drops "
    "expired records) or move the file",
    sqlite3.SQLITE_IOERR: "could not be read or written by the operating system: look at the disk, its quota and the "
    "kernel's log",
    sqlite3.SQLITE_CORRUPT: "is damaged: stop its users, keep a copy, then restore a backup or save what is left with "
    "`sqlite3 FILE .recover`",
    sqlite3.SQLITE_NOTADB: "is not an SQLite database (or is encrypted): point the URL at another file",
    sqlite3.SQLITE_NOMEM: "could not be used for want of memory",
    sqlite3.SQLITE_TOOBIG: "cannot hold a value of this size: lower max_result, or keep the body elsewhere and store a "
    "ref",
}


def is_busy(error: BaseException) -> bool:
    """Somebody else holds a lock at this moment; trying again may help."""
    return _primary(error) in _BUSY


def overdue(path: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"the SQLite file {path!r} stayed locked, or its disk too slow, for the whole timeout: end the transaction that "
        "another process or connection holds open on it, or raise `timeout`"
    )


def explain(error: sqlite3.Error, path: str) -> SemelError:
    """The error to raise instead of the driver's, which becomes its cause; a mistake of ours is raised as it is."""
    code = _primary(error)
    if code in _BUSY:
        answer: SemelError = overdue(path)
    elif code == sqlite3.SQLITE_CANTOPEN or Path(path).is_dir():
        answer = _not_opened(path)
    elif code in _REMEDIES:
        kind = ConfigurationError if code == sqlite3.SQLITE_NOTADB else StoreUnavailable
        answer = kind(f"the SQLite file {path!r} {_REMEDIES[code]} ({error})")
    elif code == sqlite3.SQLITE_ERROR and str(error).startswith(("no such table", "no such column")):
        answer = ConfigurationError(
            f"the SQLite file {path!r} lacks a part of semel's tables ({error}): they were dropped or changed; "
            "create them with the statements that `semel schema sql` prints, or use another `table`"
        )
    else:
        raise error
    answer.__cause__ = error
    return answer


def explained(error: BaseException, path: str) -> BaseException:
    """The same, for an error that is handed on instead of raised; what is not SQLite's stays as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    try:
        return explain(error, path)
    except sqlite3.Error as ours:
        return ours


def _primary(error: BaseException) -> int:
    # The extended code holds the primary one in its low byte; errors of the sqlite3 module itself have none.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _not_opened(path: str) -> ConfigurationError:
    folder = Path(path).parent
    name = f"the SQLite file {path!r} cannot be opened"
    if not folder.is_dir():
        return ConfigurationError(
            f"{name}: the directory {str(folder)!r} does not exist; create it, or correct the URL"
        )
    if Path(path).is_dir():
        return ConfigurationError(f"{name}: it is a directory; name a file in it")
    # As the user that opens files, who in a program that changes users is another one than the user that started it.
    effective = os.access in os.supports_effective_ids
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=effective):
        return ConfigurationError(
            f"{name}: this process may not write in {str(folder)!r}, where SQLite keeps the log beside the file"
        )
    if not Path(path).exists():
        return no_tables(
            f"{name}: it does not exist", "create it with `semel schema sql`, or allow semel to (create=True)"
        )
    return ConfigurationError(
        f"{name}: this process may not read and write it; change its owner or permissions, or correct the URL"
    )
