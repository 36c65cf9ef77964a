"""One SQLite file as this process uses it: connections for reading, one for writing, all stores on the path together.

Reads borrow a connection and never take the write lock; writes go through `Writer`. Connections open when they are
first needed and close with the last store that uses them; SQLite then moves its log into the file and deletes it.

No connection may cross a fork. SQLite keeps its POSIX locks in process memory: a child that opens the same file
beside an inherited connection believes it holds locks that only its parent holds, and can lose committed rows.
So everything is closed before a fork and opened again, by parent and child, when needed.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from semel.errors import ConfigurationError, StoreUnavailable
from semel.model import Settle
from semel.stores.sqlite.errors import explain, is_busy, overdue
from semel.stores.sqlite.writer import Writer, patiently, taken

__all__ = ["DatabaseFile"]

T = TypeVar("T")

CHECKPOINT: Final = 8 << 20
"""Bytes of log file from which it counts as full when it grows: then its pages are moved into the database file."""
LOG_LIMIT: Final = 64 << 20
"""Bytes of log file after which it is cut down to nothing; below that it is overwritten, which is faster."""
_LAST_WORDS: Final = 10.0
_PRAGMAS: Final = (
    "PRAGMA synchronous = FULL",  # what was answered survives a power loss
    "PRAGMA fullfsync = ON",  # macOS: the disk's own cache too; elsewhere it says nothing
    "PRAGMA wal_autocheckpoint = 0",  # `tidy` does it, under the write lock
    "PRAGMA temp_store = MEMORY",  # or a statement of many rows keeps what it may have to undo in a file
    "PRAGMA cache_size = -8192",  # KiB: a busy table's inner pages and the leaves that a crowd touches
)
_GONE: Final = (
    "the SQLite file {path!r} was deleted while in use: put it back; to begin again with an empty one, close every "
    "store on it first (all that semel remembered is in the deleted file)"
)
# Opened again, the log of the old file would be applied to the new one.
_REPLACED: Final = (
    "the SQLite file {path!r} was replaced by another one while in use, and nothing was written to it: stop all its "
    "users, put the right file in place, with no other file's -wal or -shm beside it, and start them again"
)


class _Loan:
    """A connection for reading is out; until this is forgotten, no process forks."""

    __slots__ = ("__weakref__",)


class DatabaseFile:
    """See the module. Made by `at`, one per path and process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        """As new: nothing open, nobody waiting. Also what a forked child begins with."""
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.epoch = object()
        """Another one whenever connections were dropped: what was checked under an older one is to be checked again."""
        self._writer: Writer | None = None
        self._lending: tuple[threading.RLock, threading.Condition] | None = None
        self._writing: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._idle: list[sqlite3.Connection] = []
        self._lent: set[weakref.ref[_Loan]] = set()
        self._log_size = 0
        self._log_limit = LOG_LIMIT
        self._log_full = CHECKPOINT
        self._log_grew = False
        self._watchers: dict[bytes, list[Callable[[], None]]] = defaultdict(list)
        self._held_for_fork: tuple[list[bool], list[bool]] = ([], [])

    @classmethod
    def at(cls, path: str) -> DatabaseFile:
        with _registry_lock:
            file = _registry.get(path)
            if file is None:
                file = _registry[path] = cls(path)
            return file

    # Locks are made when they are first needed: gevent replaces the kinds that `threading` has when a worker starts,
    # which is after the import and after the fork, and greenlets that wait for a lock of the old kind wait for ever.
    @property
    def writer(self) -> Writer:
        return self._writer or self._made()[0]

    @property
    def _mutex(self) -> threading.RLock:
        # Taken by its own `with`: a signal's handler that raises inside of a condition's would leave it locked for good.
        return (self._lending or self._made()[1])[0]

    @property
    def _returned(self) -> threading.Condition:
        """That no connection is lent any more; under the mutex."""
        return (self._lending or self._made()[1])[1]

    def _made(self) -> tuple[Writer, tuple[threading.RLock, threading.Condition]]:
        with _registry_lock:
            self._writer = self._writer or Writer(self)
            mutex = threading.RLock()
            self._lending = self._lending or (mutex, threading.Condition(mutex))
            return self._writer, self._lending

    # ---------------------------------------------------------------------------------- opening
    def open(
        self, user: object, check: Callable[[sqlite3.Connection, float], None], create: bool, deadline: float
    ) -> object:
        """Connect, let `check` look at the schema, and count `user` in. Returns the epoch for which this holds."""
        lock = self.writer.lock
        held: list[bool] = []
        try:
            if not taken(lock.acquire, held, deadline - time.monotonic()):
                raise overdue(self.path)
            check(self.connected(deadline, create=create), deadline)
            self.users.add(user)
            return self.epoch
        except sqlite3.Error as error:
            raise explain(error, self.path) from error
        finally:
            if True in held:
                lock.release()

    def connected(self, deadline: float, *, create: bool = False) -> sqlite3.Connection:
        there = _identity(self.path)
        if self._writing is not None and there == self._identity:
            return self._writing
        if self._identity is not None and there != self._identity:
            raise StoreUnavailable(
                _GONE.format(path=self.path) if there is None else _REPLACED.format(path=self.path)
            )
        self._writing = self._connect(deadline, create=create and self._identity is None)
        self._identity = _identity(self.path)
        self._log_size, self._log_full, self._log_grew = self._size_of_log() or 0, CHECKPOINT, False
        return self._writing

    def _connect(self, deadline: float, *, create: bool = False, reader: bool = False) -> sqlite3.Connection:
        # Several threads use a connection in turn, never two at once.
        uri = f"{Path(self.path).as_uri()}?mode={'rwc' if create else 'rw'}"
        db = sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            journal = patiently(db, "PRAGMA journal_mode", deadline)[0][0]
            if journal != "wal" and not reader:
                journal = patiently(db, "PRAGMA journal_mode = WAL", deadline)[0][0]
            if journal != "wal":
                raise ConfigurationError(
                    f"the SQLite file {self.path!r} cannot use a write-ahead log (its journal_mode is {journal!r}): "
                    "put it on a local disk; network file systems have no shared memory"
                )
            for pragma in _PRAGMAS:
                db.execute(pragma)
            if reader:
                db.execute("PRAGMA query_only = ON")
        except BaseException:
            db.close()
            raise
        return db

    # ---------------------------------------------------------------------------------- reading
    def read(self, work: Callable[[sqlite3.Connection], T], deadline: float) -> T:
        """Run a read, and again while the file is busy (rare: readers need no lock but while a log begins or ends)."""
        while True:
            try:
                return self.read_now(work)
            except sqlite3.Error as error:
                if not is_busy(error) or time.monotonic() >= deadline:
                    raise explain(error, self.path) from error
                time.sleep(0.001)

    def read_now(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a read that may raise SQLite's own errors. Microseconds: cheaper than handing it to a thread."""
        db: sqlite3.Connection | None = None
        epoch: object = None
        loan = _Loan()
        lent = weakref.ref(loan, self._lent.discard)  # a handler may raise between any two lines, also below
        try:
            with self._mutex:
                self._lent.add(lent)
                db = self._idle.pop() if self._idle else None
                epoch = self.epoch
            if db is None:
                db = self._connect(0.0, reader=True)
            return work(db)
        except sqlite3.Error:
            epoch = None  # it met trouble: it is closed, not kept
            raise
        finally:
            self._give_back(db, epoch, lent)

    def glance(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same for an event loop: on the writing connection, if nobody writes at this moment.

        It knows the pages that it wrote, which a reader has to read again after every commit.
        """
        lock = self.writer.lock
        held: list[bool] = []
        try:
            if taken(lock.acquire, held, 0.0) and self._writing is not None:
                return work(self._writing)
        except sqlite3.Error:
            pass  # a connection for reading will meet the same trouble, if it lasts, and is easily replaced
        finally:
            if True in held:
                lock.release()
        return self.read_now(work)

    def _give_back(self, db: sqlite3.Connection | None, epoch: object, lent: weakref.ref[_Loan]) -> None:
        with self._mutex:
            if db is not None and epoch is self.epoch:
                self._idle.append(db)
            elif db is not None:
                db.close()
            self._lent.discard(lent)
            if not self._lent:
                self._returned.notify_all()

    # --------------------------------------------------------------------------- for the writer
    def stored(self) -> None:
        size = self._size_of_log()
        if size is None:
            raise StoreUnavailable(
                f"the log of the SQLite file {self.path!r} (-wal beside it) was deleted while in use, and with it the "
                "last writes: never touch SQLite's files while a program uses them"
            )
        self._log_grew = size > self._log_size
        self._log_size = size

    def _size_of_log(self) -> int | None:
        try:
            return os.stat(f"{self.path}-wal").st_size  # noqa: PTH116 - once per commit
        except OSError:
            return None

    @property
    def untidy(self) -> bool:
        return self._log_size >= self._log_limit or (self._log_grew and self._log_size >= self._log_full)

    def tidy(self) -> None:
        """Move the log into the file when it is full, keeping all writers out meanwhile.

        It is full when it grows though it is large: the disk takes several times as long for a file that grows as for
        one that is overwritten. How much of it is in use SQLite does not tell.

        SQLite's automatic checkpoint runs beside other writers, and before 3.51.3 this can corrupt the file (the
        "WAL-reset bug"). These take the write lock, and wait for readers as long as busy_timeout says.
        """
        db, cut = self._writing, self._log_size >= self._log_limit
        if db is None or not self.untidy:
            return
        try:
            db.execute("PRAGMA busy_timeout = 250")
            busy = db.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if cut else 'RESTART'})").fetchall()[0][0]
            db.execute("PRAGMA busy_timeout = 0")
        except sqlite3.Error:
            # The commit stands; if the trouble lasts, the next write meets it and reports it.
            self.drop()
        else:
            # A reader that stood in the way is not waited for again with the very next commit.
            self._log_full = self._log_size + CHECKPOINT if busy else CHECKPOINT
            self._log_limit = 2 * self._log_size if busy and cut else LOG_LIMIT
            self._log_size, self._log_grew = self._size_of_log() or 0, False

    def drop(self) -> None:
        """Close every connection that nobody uses; the others close when they come back. Under the writer's lock."""
        with self._mutex:
            self.epoch = object()
            idle, self._idle = self._idle, []
            writing, self._writing = self._writing, None  # whatever happens below, nobody uses a closed one
        for db in idle:
            db.close()
        if writing is not None:
            writing.close()  # last: whoever closes last moves the log into the file and deletes it

    # --------------------------------------------------------------------------------- watching
    def watch(self, scope: bytes, wake: Callable[[], None]) -> Callable[[], None]:
        with self._mutex:
            self._watchers[scope].append(wake)

        def unwatch() -> None:
            with self._mutex:
                waiting = self._watchers.get(scope, [])
                if wake in waiting:
                    waiting.remove(wake)
                if not waiting:
                    self._watchers.pop(scope, None)

        return unwatch

    def wake(self, ends: Iterable[Settle]) -> None:
        if not self._watchers:
            return
        with self._mutex:
            waiting = [wake for end in ends for wake in self._watchers.get(end.scope.hash, ())]
        for wake in waiting:
            wake()

    # ---------------------------------------------------------------------------------- closing
    def leave(self, user: object) -> None:
        self.users.discard(user)
        if not self.users:
            self.shut()

    def shut(self) -> None:
        """Finish what is queued, end the writer thread, close everything. The next use opens again."""
        if self._writer is None:
            return  # never opened
        self.writer.stop(_LAST_WORDS)
        lock = self.writer.lock
        held: list[bool] = []
        try:
            if taken(lock.acquire, held, _LAST_WORDS):
                self.drop()
                self._identity = None
        finally:
            if True in held:
                lock.release()

    def __del__(self) -> None:
        # Nobody can reach it any more, so no lock is needed (nor allowed: this may run anywhere).
        for db in self._idle:
            db.close()
        if self._writing is not None:
            self._writing.close()
        if self._writer is not None:
            self._writer.abandon()

    # -------------------------------------------------------------------------------------- forks
    def before_fork(self) -> None:
        if self._writer is None:
            return  # never opened
        writing, lending = self._held_for_fork = ([], [])
        if taken(self.writer.lock.acquire, writing, _LAST_WORDS):
            self.drop()
        if taken(self._mutex.acquire, lending, _LAST_WORDS):
            self._returned.wait_for(lambda: not self._lent, _LAST_WORDS)

    def after_fork_in_parent(self) -> None:
        if self._writer is None:
            return
        mutex, lock = self._mutex, self._writer.lock
        (writing, lending), self._held_for_fork = self._held_for_fork, ([], [])
        try:
            if True in lending:
                mutex.release()
        finally:
            if True in writing:
                lock.release()

    def after_fork_in_child(self) -> None:
        # What could not be closed in time is the parent's: closing it here would take the log away from under it.
        _inherited.append((self._writing, self._idle))
        self._reset()


_registry: weakref.WeakValueDictionary[str, DatabaseFile] = weakref.WeakValueDictionary()
_registry_lock = threading.RLock()  # greenlets of one thread never wait for each other here
_inherited: list[object] = []
_forking: list[DatabaseFile] = []


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - once per commit
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _before_fork() -> None:
    _registry_lock.acquire()
    _forking[:] = _registry.values()
    for file in _forking:
        file.before_fork()


def _after_fork_in_parent() -> None:
    try:
        for file in _forking:
            file.after_fork_in_parent()
        _forking.clear()
    finally:
        _registry_lock.release()


def _after_fork_in_child() -> None:
    global _registry_lock  # noqa: PLW0603 - the parent's may be held by a thread that does not exist here
    _registry_lock = threading.RLock()
    for file in list(_registry.values()):
        file.after_fork_in_child()
    _forking.clear()


@atexit.register
def _at_exit() -> None:
    for file in list(_registry.values()):
        file.shut()


if hasattr(os, "register_at_fork"):  # pragma: no branch - not on Windows, which cannot fork
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
