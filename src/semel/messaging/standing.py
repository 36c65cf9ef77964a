"""Whether the transaction that admitted a message is still the one, and able to commit, when its handler has ended.

A handler may swallow an error after which the database has undone everything (PostgreSQL answers COMMIT with a silent ROLLBACK
then), or end the transaction by itself. To acknowledge such a message would lose it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from semel.calls import add_note
from semel.errors import ConfigurationError, SemelError, StoreUnavailable
from semel.messaging.message import Message
from semel.within.ports import Savepoint

__all__ = [
    "IN_TRANSACTION",
    "Undone",
    "aabandon",
    "abandon",
    "ended",
    "is_abandonable",
    "is_sound",
    "plain",
    "root_of",
    "to_its_end",
    "undone",
]

IN_TRANSACTION: Final = 2  # libpq's word: begun, and not failed
_PATIENCE: Final = 10.0
_PLAIN: Final = frozenset({Session, Connection})  # nearly always one of these, for every message


class Undone(SemelError):
    """What a handler did was undone by the database before it was committed: its message counts as failed."""

    def __init__(self, message: Message) -> None:
        super().__init__(
            f"the database has undone what the handler of message {message.id} ({message.topic}) did: it met an error and went on. "
            "Let errors through, or put what may fail into a savepoint (session.begin_nested())"
        )


def ended(message: Message) -> ConfigurationError:
    """For a handler that committed or rolled back by itself."""
    return ConfigurationError(
        f"the handler of message {message.id} ({message.topic}) committed or rolled back the transaction by itself: it is its "
        "consumer's, which admits the message in it. Leave that to it; what may fail goes into a savepoint "
        "(session.begin_nested())"
    )


def _registered(session: Any) -> Any:
    """The session that a registry has here; everything else is itself."""
    return session() if isinstance(session, scoped_session | async_scoped_session) else session


def plain(session: Any) -> Any:
    """The sync session or connection below one of SQLAlchemy's, of either colour; everything else is itself."""
    if type(session) in _PLAIN:
        return session
    session = _registered(session)
    if isinstance(session, AsyncSession):
        return session.sync_session
    return session.sync_connection if isinstance(session, AsyncConnection) else session


def is_abandonable(session: Any) -> bool:
    """Whether `abandon` or `aabandon` can roll it back. A driver's own transaction, or Django's, is begun and ended by means that we
    cannot see: there only a savepoint is sure to undo."""
    return type(session) in _PLAIN or isinstance(plain(session), Session | Connection)


def root_of(session: Any) -> Any:
    """The transaction of an SQLAlchemy session or connection; None for a driver's own."""
    found = plain(session)
    return found.get_transaction() if isinstance(found, (Session, Connection)) else None


def is_sound(session: Any) -> bool | None:
    """Whether the transaction is begun and has not failed; None where only a statement can tell."""
    found = plain(session)
    if isinstance(found, Session):
        found = found.connection()  # the one it has: nothing is asked of the database
    if not isinstance(found, Connection) or found.dialect.name != "postgresql":
        return None
    driver: Any = found.connection.driver_connection
    if (raw := getattr(driver, "pgconn", None)) is not None:
        return bool(raw.transaction_status == IN_TRANSACTION)
    told = getattr(driver, "get_transaction_status", None)  # psycopg2
    return None if told is None else bool(told() == IN_TRANSACTION)


def abandon(session: Any, error: BaseException) -> None:
    """Roll back a transaction that was for one message alone: whoever catches the handler's error must not commit half of it.
    Where that fails its connection is given up, which undoes it as well; what is raised is the handler's error."""
    found = plain(session)
    if not isinstance(found, Session | Connection) or not found.in_transaction():
        return
    try:
        found.rollback()
    except Exception as second:  # noqa: BLE001 - the first error is the one that tells
        _note(error, second)
        with suppress(Exception):
            found.invalidate()


async def aabandon(session: Any, error: BaseException) -> None:
    """As `abandon`, of the other colour; to its end, whoever is cancelled meanwhile."""
    found = _registered(session)  # here: another task has another session of a registry
    if not isinstance(found, AsyncSession | AsyncConnection) or not found.in_transaction():
        return

    async def rolled_back() -> None:
        try:
            await found.rollback()
        except Exception as second:  # noqa: BLE001 - as above
            _note(error, second)
            with suppress(Exception):
                await found.invalidate()

    await to_its_end(rolled_back())


async def undone(point: Savepoint, error: BaseException, *, awaits: bool) -> None:
    """Go back to a savepoint after an error, which is the one that tells: a database that ended the whole transaction with it (a
    deadlock on MariaDB) has no savepoint any more."""
    back = point.rollback()
    try:
        await (to_its_end(back) if awaits else back)
    except Exception as second:  # noqa: BLE001 - as above
        _note(error, second)


def _note(error: BaseException, second: Exception) -> None:
    add_note(error, f"it could not be rolled back either ({second})")


async def to_its_end(work: Awaitable[None]) -> None:
    """What undoes is done although its caller is cancelled, once more: half of it would be committed. The cancellation is raised
    afterwards. A database that does not answer is given up after a while: with its connection everything is undone."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    until = time.monotonic() + _PATIENCE
    while not task.done() and time.monotonic() < until:
        try:
            await asyncio.wait([task], timeout=until - time.monotonic())
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1)
    if cancelled is not None:
        if task.done() and not task.cancelled():
            task.exception()  # looked at: what is raised is the cancellation
        raise cancelled
    if not task.done() or task.cancelled():
        raise StoreUnavailable(f"the database did not roll back within {_PATIENCE:g} s")
    task.result()
