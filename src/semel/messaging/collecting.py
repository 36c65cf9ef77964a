"""Messages that wait for the commit of the caller's transaction, and vanish with its rollback, savepoints included.

They are written in one go just before the commit: their numbers are recent then, and the locks that order writers of one
aggregate are held, so the order of numbers is the order of commits. What a hook of the session adds during its commit, after
that, is written when the connection commits.

What cannot be written takes its transaction with it: the connection is rolled back, the session can only be rolled back.
Otherwise a second commit, or whoever gets the connection next, would commit the rows without their messages.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import PendingRollbackError, UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from semel.errors import ConfigurationError, SemelWarning
from semel.messaging.standing import plain
from semel.messaging.writing import Prepared

__all__ = ["collect", "is_collectable"]

Write = Callable[[Connection, Sequence[Prepared]], None]
Committed = Callable[[], None]
_HINT: Final = (
    "begin one (`with session.begin():`, `with engine.begin() as connection:`) and add the message inside it"
)

_UNDOES: Final = {1213, 1020}  # a deadlock; a record that has changed since the snapshot

_sessions: Final[weakref.WeakKeyDictionary[Session, _Collected]] = weakref.WeakKeyDictionary()
_connections: Final[weakref.WeakKeyDictionary[Connection, _Collected]] = weakref.WeakKeyDictionary()
# Sessions that have something to write, by id. Copied before it is gone through: threads add to it.
_waiting: Final[dict[int, weakref.ref[Session]]] = {}


@dataclass(slots=True)
class _Entry:
    """A message, the transaction it was added in, and the savepoint (of a session) or savepoints (of a connection)."""

    root: Any
    place: Any
    write: Write
    message: Prepared
    committed: Committed


class _Collected:
    """What one session or connection has collected, each message with the savepoints it stands in."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.written: list[Committed] = []
        self.failed: tuple[Any, BaseException] | None = (
            None  # the transaction that cannot be committed any more, and why
        )

    def keep(self, root: Any) -> None:
        """Forget what was added in another transaction: a session that is closed or reset tells nobody that it rolled back."""
        if any(entry.root is not root for entry in self.entries):
            self.entries = [entry for entry in self.entries if entry.root is root]

    def flush(self, connection: Connection, root: Any) -> None:
        self.keep(root)
        if self.failed is not None and self.failed[0] is root:
            why = self.failed[1]
            raise PendingRollbackError(
                f"messages of this transaction could not be written ({type(why).__name__}: {why}): roll it back, and do all of it "
                "again"
            ) from why
        try:
            while self.entries:
                self._write(connection)
        except BaseException as error:
            self.failed = root, error
            raise

    def _write(self, connection: Connection) -> None:
        entries, self.entries = self.entries, []
        for entry in entries:
            if entry.committed not in self.written:
                self.written.append(entry.committed)
        # In the order of adding, also where two outboxes are objects for one table.
        for write, run in groupby(entries, lambda entry: entry.write):
            write(connection, [entry.message for entry in run])

    def done(self) -> None:
        """Wake who carries them. Nothing that fails here may be taken for a failure of the commit."""
        written, self.written = self.written, []
        for committed in written:
            try:
                committed()
            except Exception as error:  # noqa: BLE001 - a wake-up is a hint
                warnings.warn(f"a relay could not be woken: {error!r}", SemelWarning, stacklevel=2)

    def clear(self) -> None:
        self.entries.clear()
        self.written.clear()
        self.failed = None


def is_collectable(target: object) -> bool:
    """Whether it has a commit that can be waited for."""
    return isinstance(
        target,
        Session | AsyncSession | scoped_session | async_scoped_session | Connection | AsyncConnection,
    )


def collect(target: Any, message: Prepared, write: Write, committed: Committed) -> None:
    """Keep the message until just before the commit of `target`'s transaction; refused without a transaction."""
    target = plain(target)
    if isinstance(target, Session):
        if not target.in_transaction():
            raise ConfigurationError(f"this session has no transaction: {_HINT}")
        _refuse_autocommit(_bind_of(target))
        root: Any = target.get_transaction()
        place: Any = target.get_nested_transaction() or root
        found = _sessions.setdefault(target, _Collected())
        _waiting[id(target)] = weakref.ref(target)
    elif isinstance(target, Connection):
        if not target.in_transaction():
            raise ConfigurationError(f"this connection has no transaction: {_HINT}")
        _refuse_autocommit(target)
        root, place = target.get_transaction(), _savepoints(target)
        found = _connections.setdefault(target, _Collected())
    else:
        raise ConfigurationError(
            f"outbox.add() takes an SQLAlchemy session or connection, or the run inside within(), not "
            f"{type(target).__name__}; for a driver's own connection use outbox.insert()"
        )
    found.keep(root)
    found.entries.append(_Entry(root, place, write, message, committed))


def _bind_of(session: Session) -> Any:
    """Where the session's messages go: what it does that is no entity's."""
    try:
        return session.get_bind()
    except UnboundExecutionError as error:
        raise ConfigurationError(
            "this session has a bind for each of its entities, and none of its own: which transaction should the message commit with? "
            "Give it the engine of this outbox's database as well, Session(bind=engine, binds={…})"
        ) from error


def _savepoints(connection: Connection) -> tuple[str, ...]:
    """The names of the savepoints that are open now. SQLAlchemy tells no other way which one a statement is in."""
    names: list[str] = []
    nested: Any = connection.get_nested_transaction()
    while nested is not None:
        names.append(nested._savepoint)  # noqa: SLF001 - SQLAlchemy tells it nowhere else
        nested = nested._previous_nested  # noqa: SLF001 - SQLAlchemy tells it nowhere else
    return tuple(names)


# Listeners for all sessions and connections, once: one that is added while a session commits would come too late for it.
@event.listens_for(Session, "before_commit")
def _session_commits(session: Session) -> None:
    found = _sessions.get(session)
    if found is None or session.in_nested_transaction():
        return  # a savepoint's release commits nothing
    root = session.get_transaction()
    found.keep(root)
    if not found.entries and (found.failed is None or found.failed[0] is not root):
        return
    session.flush()  # the rows first: what they violate is told before any message is written
    connection = session.connection()
    _refuse_autocommit(connection)
    found.flush(connection, root)


@event.listens_for(Session, "after_commit")
def _session_committed(session: Session) -> None:
    found = _sessions.get(session)
    if found is not None and not session.in_nested_transaction():
        _waiting.pop(id(session), None)
        found.done()


@event.listens_for(Session, "after_soft_rollback")
def _session_rolled_back(session: Session, ended: SessionTransaction) -> None:
    found = _sessions.get(session)
    if found is None:
        return
    if not ended.nested:
        found.clear()
        _waiting.pop(id(session), None)
    else:
        found.entries = [entry for entry in found.entries if not _inside(entry.place, ended)]


def _inside(place: SessionTransaction | None, ended: SessionTransaction) -> bool:
    while place is not None:
        if place is ended:
            return True
        place = place.parent
    return False


@event.listens_for(Engine, "commit")
def _connection_commits(connection: Connection) -> None:
    found = _connections.get(connection)
    if found is None and not _waiting:
        return
    try:
        for name, reference in _waiting.copy().items():
            _add_late(name, reference(), connection)
        if found is not None:
            found.flush(connection, connection.get_transaction())
    except BaseException:
        _undo(connection)
        raise
    if found is not None:
        found.done()  # a moment early: a relay that finds nothing yet looks again soon


def _add_late(name: int, session: Session | None, connection: Connection) -> None:
    """What a hook of the session added after our own had run."""
    if session is None:  # gone, with what it had not committed
        _waiting.pop(name, None)
        return
    late = _sessions.get(session)
    if late is not None and late.entries and _is_of(session, connection):
        late.flush(connection, session.get_transaction())


def _undo(connection: Connection) -> None:
    """SQLAlchemy takes a commit that a listener stopped for done with: the connection would go back to its pool with the
    transaction open, for its next user to commit."""
    if (found := _connections.get(connection)) is not None:
        found.clear()
    try:
        connection.dialect.do_rollback(connection.connection)
    except Exception:  # noqa: BLE001 - then nobody may use it any more, and the reason is on its way to the caller
        connection.invalidate()


@event.listens_for(Engine, "prepare_twophase")
def _connection_prepares(connection: Connection, xid: object) -> None:
    del xid
    _connection_commits(connection)


def _is_of(session: Session, connection: Connection) -> bool:
    """Whether the connection is in the session's transaction."""
    transaction: Any = session.get_transaction()
    return transaction is not None and connection in transaction._connections  # noqa: SLF001 - SQLAlchemy tells it nowhere else


@event.listens_for(Engine, "rollback")
def _connection_rolled_back(connection: Connection) -> None:
    if (found := _connections.get(connection)) is not None:
        found.clear()


@event.listens_for(Engine, "rollback_savepoint")
def _savepoint_rolled_back(connection: Connection, name: str, context: object) -> None:
    del context
    if (found := _connections.get(connection)) is not None:
        found.entries = [entry for entry in found.entries if name not in entry.place]


@event.listens_for(Engine, "handle_error")
def _server_undid(context: Any) -> None:
    """MariaDB and MySQL roll the whole transaction back for a deadlock: whoever swallows it must not commit the messages of what
    is gone."""
    connection, error = context.connection, context.original_exception
    if connection is None or context.dialect.name not in {"mysql", "mariadb"}:
        return
    if not error.args or error.args[0] not in _UNDOES:
        return
    if (found := _connections.get(connection)) is not None:
        found.failed = connection.get_transaction(), error
    for reference in list(_waiting.values()):
        session = reference()
        if (
            session is not None
            and _is_of(session, connection)
            and (late := _sessions.get(session)) is not None
        ):
            late.failed = session.get_transaction(), error


def _refuse_autocommit(bind: Any) -> None:
    """A statement that commits by itself is no transaction."""
    options = bind.get_execution_options()
    level = options.get("isolation_level", getattr(bind.dialect, "_on_connect_isolation_level", None))
    if level == "AUTOCOMMIT":
        raise ConfigurationError(
            "this session or connection is in AUTOCOMMIT: the message would be sent whether or not your rows are kept. "
            'Use an engine without isolation_level="AUTOCOMMIT"'
        )
