"""Messages that wait for the commit of the caller's transaction, and vanish with its rollback, savepoints included.

They are written in one go just before the commit: their numbers are recent then, and the locks that order writers of one
aggregate are held, so the order of numbers is the order of commits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from semel.errors import ConfigurationError
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
    """What one session or connection has collected, by outbox, each message with the savepoints it stands in."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, Write, Prepared, Committed]] = []
        self.written: list[Committed] = []

    def flush(self, connection: Connection) -> None:
        by_writer: dict[Write, list[Prepared]] = {}
        for _, write, message, committed in self.entries:
            by_writer.setdefault(write, []).append(message)
            if committed not in self.written:
                self.written.append(committed)
        for write, messages in by_writer.items():
            write(connection, messages)
        self.entries.clear()

    def done(self) -> None:
        written, self.written = self.written, []
        for committed in written:
            committed()

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
        _collect_in_session(target, message, write, committed)
    elif isinstance(target, Connection):
        _collect_in_connection(target, message, write, committed)
    else:
        raise ConfigurationError(
            f"outbox.add() takes an SQLAlchemy session or connection, or the run inside within(), not "
            f"{type(target).__name__}; for a driver's own connection use outbox.insert()"
        )


# --------------------------------------------------------------------------------------------- sessions
def _collect_in_session(session: Session, message: Prepared, write: Write, committed: Committed) -> None:
    if not session.in_transaction():
        raise ConfigurationError(f"this session has no transaction: {_HINT}")
    _refuse_autocommit(session.get_bind())
    found = _sessions.get(session)
    if found is None:
        found = _sessions[session] = _Collected()
        event.listen(session, "before_commit", _session_commits)
        event.listen(session, "after_commit", _session_committed)
        event.listen(session, "after_soft_rollback", _session_rolled_back)
    place = session.get_nested_transaction() or session.get_transaction()
    found.entries.append((place, write, message, committed))


def _session_commits(session: Session) -> None:
    found = _sessions.get(session)
    if found is None or not found.entries or session.in_nested_transaction():
        return  # a savepoint's release commits nothing
    session.flush()  # the rows first: what they violate is told before any message is written
    connection = session.connection()
    _refuse_autocommit(connection)
    found.flush(connection)


def _session_committed(session: Session) -> None:
    found = _sessions.get(session)
    if found is not None and not session.in_nested_transaction():
        found.done()


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


# ------------------------------------------------------------------------------------------ connections
def _collect_in_connection(
    connection: Connection, message: Prepared, write: Write, committed: Committed
) -> None:
    if not connection.in_transaction():
        raise ConfigurationError(f"this connection has no transaction: {_HINT}")
    _refuse_autocommit(connection)
    found = _connections.get(connection)
    if found is None:
        found = _connections[connection] = _Collected()
        event.listen(connection, "commit", _connection_commits)
        event.listen(connection, "rollback", _connection_rolled_back)
        event.listen(connection, "rollback_savepoint", _savepoint_rolled_back)
    found.entries.append((_savepoints(connection), write, message, committed))


def _savepoints(connection: Connection) -> tuple[str, ...]:
    """The names of the savepoints that are open now. SQLAlchemy tells no other way which one a statement is in."""
    names: list[str] = []
    nested: Any = connection.get_nested_transaction()
    while nested is not None:
        names.append(nested._savepoint)  # noqa: SLF001
        nested = nested._previous_nested  # noqa: SLF001
    return tuple(names)


def _connection_commits(connection: Connection) -> None:
    found = _connections.get(connection)
    if found is not None and found.entries:
        found.flush(connection)
        found.done()  # a moment early: a relay that finds nothing yet looks again soon


def _connection_rolled_back(connection: Connection) -> None:
    if (found := _connections.get(connection)) is not None:
        found.clear()


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
