"""Whether the transaction that admitted a message is still the one, and able to commit, when its handler has ended.

A handler may swallow an error after which the database has undone everything (PostgreSQL answers COMMIT with a silent ROLLBACK
then), or end the transaction by itself. To acknowledge such a message would lose it.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session

from semel.errors import ConfigurationError, SemelError
from semel.messaging.message import Message

__all__ = ["IN_TRANSACTION", "Undone", "aabandon", "abandon", "ended", "is_sound", "root_of"]

IN_TRANSACTION: Final = 2  # libpq's word: begun, and not failed


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


def _plain(session: Any) -> Any:
    if isinstance(session, scoped_session):
        return session()
    if isinstance(session, AsyncSession):
        return session.sync_session
    return session.sync_connection if isinstance(session, AsyncConnection) else session


def root_of(session: Any) -> Any:
    """The transaction of an SQLAlchemy session or connection; None for a driver's own."""
    plain = _plain(session)
    return plain.get_transaction() if isinstance(plain, Session | Connection) else None


def is_sound(session: Any) -> bool | None:
    """Whether the transaction is begun and has not failed; None where only a statement can tell."""
    plain = _plain(session)
    if isinstance(plain, Session):
        plain = plain.connection()  # the one it has: nothing is asked of the database
    if not isinstance(plain, Connection) or plain.dialect.name != "postgresql":
        return None
    driver: Any = plain.connection.driver_connection
    if (raw := getattr(driver, "pgconn", None)) is not None:
        return bool(raw.transaction_status == IN_TRANSACTION)
    told = getattr(driver, "get_transaction_status", None)  # psycopg2
    return None if told is None else bool(told() == IN_TRANSACTION)


def abandon(session: Any) -> None:
    """Roll back a transaction that was for one message alone: whoever catches the handler's error must not commit half of it."""
    plain = session() if isinstance(session, scoped_session) else session
    if isinstance(plain, Session | Connection) and plain.in_transaction():
        plain.rollback()


async def aabandon(session: Any) -> None:
    """As `abandon`, of the other colour."""
    if isinstance(session, AsyncSession | AsyncConnection) and session.in_transaction():
        await session.rollback()
