"""The admission of a message as the first statement of a transaction, on psycopg: BEGIN and INSERT in one round trip, the
statement prepared, without SQLAlchemy's and psycopg's bookkeeping for a statement whose only answer is a count.

It is a shorter way to the same rows. Whatever is in its way (another driver, a transaction that has begun, a pooler that keeps
no prepared statements, an error) is left to the ordinary way, with the connection as it was found.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Generator, Sequence
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
_FORMATS: Final = (0, 0, 0, 1, 0, 0)  # the hash travels as bytes
_IDLE: Final = 0  # of a transaction, and of a pipeline
_DONE: Final = 1  # a command that gave no rows
_SQLSTATE: Final = ord("C")
_GONE: Final = (
    b"26000"  # no such prepared statement: somebody said DEALLOCATE ALL, psycopg itself after a rollback
)

_prepared: Final[weakref.WeakKeyDictionary[Any, set[bytes]]] = weakref.WeakKeyDictionary()


def admit_quickly(connection: Any, table: str, arguments: Sequence[str | bytes | None]) -> bool | None:
    """Whether the message is new; None if this is not the way. `arguments`: consumer, id, tenant, hash, topic, business key."""
    values = [value.encode() if isinstance(value, str) else value for value in arguments]
    name, statement = _statement(table)
    for _ in range(2):
        try:
            result = connection.wait(_spoken(connection, name, statement, values))
        except Exception:  # noqa: BLE001 - the ordinary way meets it too, and tells it in SQLAlchemy's words
            _leave(connection)
            return None
        except BaseException:
            _leave(connection)
            raise
        if result.status == _DONE:
            return bool(result.command_tuples)
        state = result.error_field(_SQLSTATE)
        _leave(connection)
        if state != _GONE:
            return None
        _prepared.pop(connection, None)
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
    connection: Any, name: bytes, statement: bytes, values: list[bytes | None]
) -> Generator[Any, Any, Any]:
    """One message to the server and back, waited for as psycopg waits: interruptible, and cooperative under gevent."""
    fetch, fetch_many, send = _generators()
    raw = connection.pgconn
    known = _prepared.setdefault(connection, set())
    raw.enter_pipeline_mode()
    raw.send_query_params(connection._get_tx_start_command(), None)  # noqa: SLF001 - with the isolation it was given
    steps = 2
    if name not in known:
        raw.send_prepare(name, statement)
        steps = 3
    raw.send_query_prepared(name, values, _FORMATS)
    raw.pipeline_sync()
    yield from send(raw)
    results: list[Any] = []
    for _ in range(steps):
        results += yield from fetch_many(raw)
    yield from fetch(raw)
    raw.exit_pipeline_mode()
    failed = [result for result in results if result.status != _DONE]
    if not failed or (steps == 3 and len(results) > 1 and results[1].status == _DONE):
        known.add(name)  # prepared, whatever came of the rest
    return failed[0] if failed else results[-1]


@cache
def _generators() -> tuple[Any, Any, Any]:
    from psycopg.generators import fetch, fetch_many, send  # there is a connection of it: it is installed

    return fetch, fetch_many, send


def _leave(connection: Any) -> None:
    """As it was found: no transaction. One that was broken off in the middle is closed: whoever uses it next is told so."""
    raw = connection.pgconn
    if connection.closed:
        return
    if raw.pipeline_status != _IDLE:
        connection.close()
    elif raw.transaction_status != _IDLE:
        connection.rollback()
