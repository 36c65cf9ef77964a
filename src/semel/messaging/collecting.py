"""Messages that wait for the commit of the caller's transaction, and vanish with its rollback, savepoints included.

They are written in one go just before the commit: their numbers are recent then, and the locks that order writers of one
aggregate are held, so the order of numbers is the order of commits. What a hook of the session adds during its commit, after
that, is written when the connection commits.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from semel.errors import ConfigurationError, SemelWarning
from semel.messaging.writing import Prepared

__all__ = ["collect", "is_collectable"]

Write = Callable[[Connection, Sequence[Prepared]], None]
Committed = Callable[[], None]
_HINT: Final = (
    "begin one (`with session.begin():`, `with engine.begin() as connection:`) and add the message inside it"
)

_sessions: Final[weakref.WeakKeyDictionary[Session, _Collected]] = weakref.WeakKeyDictionary()
_connections: Final[weakref.WeakKeyDictionary[Connection, _Collected]] = weakref.WeakKeyDictionary()


class _Collected:
    """What one session or connection has collected, each message with the savepoints it stands in."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, Write, Prepared, Committed]] = []
        self.written: list[Committed] = []

    def flush(self, connection: Connection) -> None:
        while self.entries:
            entries, self.entries = self.entries, []
            by_writer: dict[Write, list[Prepared]] = {}
            for _, write, message, committed in entries:
                by_writer.setdefault(write, []).append(message)
                if committed not in self.written:
                    self.written.append(committed)
            for write, messages in by_writer.items():
                write(connection, messages)

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


def is_collectable(target: object) -> bool:
    """Whether it has a commit that can be waited for."""
    return isinstance(target, Session | AsyncSession | scoped_session | Connection | AsyncConnection)


def collect(target: Any, message: Prepared, write: Write, committed: Committed) -> None:
    """Keep the message until just before the commit of `target`'s transaction; refused without a transaction."""
    if isinstance(target, scoped_session):
        target = target()
    if isinstance(target, AsyncSession):
        target = target.sync_session
    if isinstance(target, AsyncConnection):
        target = target.sync_connection
    if isinstance(target, Session):
        if not target.in_transaction():
            raise ConfigurationError(f"this session has no transaction: {_HINT}")
        _refuse_autocommit(target.get_bind())
        place: Any = target.get_nested_transaction() or target.get_transaction()
        found = _sessions.setdefault(target, _Collected())
    elif isinstance(target, Connection):
        if not target.in_transaction():
            raise ConfigurationError(f"this connection has no transaction: {_HINT}")
        _refuse_autocommit(target)
        place = _savepoints(target)
        found = _connections.setdefault(target, _Collected())
    else:
        raise ConfigurationError(
            f"outbox.add() takes an SQLAlchemy session or connection, or the run inside within(), not "
            f"{type(target).__name__}; for a driver's own connection use outbox.insert()"
        )
    found.entries.append((place, write, message, committed))


def _savepoints(connection: Connection) -> tuple[str, ...]:
    """The names of the savepoints that are open now. SQLAlchemy tells no other way which one a statement is in."""
    names: list[str] = []
    nested: Any = connection.get_nested_transaction()
    while nested is not None:
        names.append(nested._savepoint)  # noqa: SLF001
        nested = nested._previous_nested  # noqa: SLF001
    return tuple(names)


# Listeners for all sessions and connections, once: one that is added while a session commits would come too late for it.
@event.listens_for(Session, "before_commit")
def _session_commits(session: Session) -> None:
    found = _sessions.get(session)
    if found is None or not found.entries or session.in_nested_transaction():
        return  # a savepoint's release commits nothing
    session.flush()  # the rows first: what they violate is told before any message is written
    connection = session.connection()
    _refuse_autocommit(connection)
    found.flush(connection)


@event.listens_for(Session, "after_commit")
def _session_committed(session: Session) -> None:
    found = _sessions.get(session)
    if found is not None and not session.in_nested_transaction():
        found.done()


@event.listens_for(Session, "after_soft_rollback")
def _session_rolled_back(session: Session, ended: SessionTransaction) -> None:
    found = _sessions.get(session)
    if found is None:
        return
    if not ended.nested:
        found.clear()
    else:
        found.entries = [entry for entry in found.entries if not _inside(entry[0], ended)]


def _inside(place: SessionTransaction | None, ended: SessionTransaction) -> bool:
    while place is not None:
        if place is ended:
            return True
        place = place.parent
    return False


@event.listens_for(Engine, "commit")
def _connection_commits(connection: Connection) -> None:
    for session, late in list(_sessions.items()):
        if late.entries and _is_of(session, connection):
            late.flush(connection)
    found = _connections.get(connection)
    if found is not None:
        found.flush(connection)
        found.done()  # a moment early: a relay that finds nothing yet looks again soon


@event.listens_for(Engine, "prepare_twophase")
def _connection_prepares(connection: Connection, xid: object) -> None:
    del xid
    _connection_commits(connection)


def _is_of(session: Session, connection: Connection) -> bool:
    """Whether the connection is in the session's transaction."""
    transaction: Any = session.get_transaction()
    return transaction is not None and connection in transaction._connections  # noqa: SLF001


@event.listens_for(Engine, "rollback")
def _connection_rolled_back(connection: Connection) -> None:
    if (found := _connections.get(connection)) is not None:
        found.clear()


@event.listens_for(Engine, "rollback_savepoint")
def _savepoint_rolled_back(connection: Connection, name: str, context: object) -> None:
    del context
    if (found := _connections.get(connection)) is not None:
        found.entries = [entry for entry in found.entries if name not in entry[0]]


def _refuse_autocommit(bind: Any) -> None:
    """A statement that commits by itself is no transaction."""
    options = bind.get_execution_options()
    level = options.get("isolation_level", getattr(bind.dialect, "_on_connect_isolation_level", None))
    if level == "AUTOCOMMIT":
        raise ConfigurationError(
            "this session or connection is in AUTOCOMMIT: the message would be sent whether or not your rows are kept. "
            'Use an engine without isolation_level="AUTOCOMMIT"'
        )
