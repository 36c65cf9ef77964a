"""The admission of a message as the first statement of a transaction, on psycopg: BEGIN and INSERT in one message, the
statement prepared, without SQLAlchemy's and psycopg's bookkeeping for a statement whose only answer is a count.

It is a shorter way to the same rows. Whatever is in its way (another driver, a transaction that has begun, a pooler that keeps
no prepared statements, an error) is left to the ordinary way, with the connection as it was found.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from semel.messaging.tables import NOW

__all__ = ["admit_quickly", "connection_of"]

_INSERT: Final = (
    "INSERT INTO {table}_inbox (consumer, message, tenant, hash, topic, at, business_key) "
    f"VALUES ($1, $2, $3, $4, $5, {NOW['postgresql']}, $6) ON CONFLICT DO NOTHING"
)
_IDLE: Final = 0  # of a transaction, and of a pipeline
_ACTIVE: Final = 1  # a statement is under way
_DONE: Final = 1  # a command that gave no rows
_SQLSTATE: Final = ord("C")
# psycopg says DEALLOCATE ALL after a rollback; behind a pooler another server connection may know it, or not.
_GONE: Final = b"26000"  # no such prepared statement
_THERE: Final = b"42P05"  # it is prepared already
_TRIES: Final = 3

_prepared: Final[weakref.WeakKeyDictionary[Any, set[bytes]]] = weakref.WeakKeyDictionary()


def admit_quickly(connection: Any, table: str, arguments: Sequence[str | bytes | None]) -> bool | None:
    """Whether the message is new; None if this is not the way. `arguments`: consumer, id, tenant, hash, topic, business key."""
    name, statement = _statement(table)
    known = _prepared.get(connection)
    if known is None:
        known = _prepared[connection] = set()
    for _ in range(_TRIES):
        try:
            # As psycopg waits: interruptible, and cooperative under gevent.
            results = connection.wait(
                _spoken(connection, name, b"" if name in known else statement, arguments)
            )
        except Exception:  # noqa: BLE001 - the ordinary way meets it too, and tells it in SQLAlchemy's words
            _leave(connection)
            return None
        except BaseException:
            _leave(connection)
            raise
        last = results[-1]
        if last.status == _DONE:
            known.add(name)
            return bool(last.command_tuples)
        state = last.error_field(_SQLSTATE)
        _leave(connection)
        if state == _GONE:
            known.discard(name)
        elif state == _THERE:
            known.add(name)
        else:
            return None
    return None


@cache
def _statement(table: str) -> tuple[bytes, bytes]:
    said = _INSERT.format(table=table).encode()
    return b"semel_" + hashlib.blake2b(said, digest_size=8).hexdigest().encode(), said


def connection_of(target: Any) -> Any:
    """The connection of psycopg below a sync session or connection, if no transaction was begun on it yet."""
    if isinstance(target, Session):
        target.flush()  # what is pending comes first; then this is not the first statement
        target = target.connection()
    if not isinstance(target, Connection) or target.dialect.driver != "psycopg" or target.dialect.is_async:
        return None
    driver: Any = target.connection.driver_connection
    raw = driver.pgconn
    fit = raw.transaction_status == _IDLE and raw.pipeline_status == _IDLE
    if not fit or raw.parameter_status(b"client_encoding") != b"UTF8":
        return None
    # prepare_threshold=None is how psycopg is told of a pooler behind which no prepared statement lasts.
    if driver.autocommit or driver.prepare_threshold is None:
        return None
    if not target.in_transaction():
        target.begin()  # BEGIN is sent past SQLAlchemy, whose commit() must know of it
    return driver


def _spoken(
    connection: Any, name: bytes, statement: bytes, arguments: Sequence[str | bytes | None]
) -> Generator[Any, Any, Any]:
    """One message to the server and what it answers; with a `statement` that is prepared first. Text, because several statements
    of one message have no parameters (a pipeline could have them, and costs the client twice as much)."""
    escaping, execute = _psycopg()
    raw = connection.pgconn
    escape = escaping(raw).escape_literal
    said = b", ".join([_literal(value, escape) for value in arguments])
    begin = connection._get_tx_start_command()  # noqa: SLF001 - with the isolation it was given
    prepare = b"PREPARE %b AS %b;" % (name, statement) if statement else b""
    raw.send_query(b"%b;%bEXECUTE %b (%b)" % (begin, prepare, name, said))
    return (yield from execute(raw))


def _literal(value: str | bytes | None, escape: Callable[[bytes], bytes]) -> bytes:
    if value is None:
        return b"NULL"
    if isinstance(value, bytes):
        return b"E'\\\\x%b'" % value.hex().encode()
    if "\0" in value:
        raise ValueError("libpq would end the text here")
    return escape(value.encode())


@cache
def _psycopg() -> tuple[Any, Any]:
    from psycopg.generators import execute  # there is a connection of it: it is installed
    from psycopg.pq import Escaping

    return Escaping, execute


def _leave(connection: Any) -> None:
    """As it was found: no transaction. One that was broken off in the middle is closed: whoever uses it next is told so."""
    raw = connection.pgconn
    if connection.closed:
        return
    if raw.transaction_status == _ACTIVE:
        connection.close()
    elif raw.transaction_status != _IDLE:
        try:
            connection.rollback()
        except Exception:  # noqa: BLE001 - as above: the ordinary way meets a closed connection
            connection.close()
