"""The admission of a message as the first statement of a transaction, on psycopg: BEGIN and INSERT in one message, the
statement prepared, without SQLAlchemy's and psycopg's bookkeeping for a statement whose only answer is a count.

It is a shorter way to the same rows. Whatever is in its way (another driver, a transaction that has begun, a pooler that keeps
no prepared statements, an error) is left to the ordinary way, with the connection as it was found.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
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

Arguments = tuple[str, str, str, bytes, str, str | None]
_prepared: Final[weakref.WeakKeyDictionary[Any, set[bytes]]] = weakref.WeakKeyDictionary()


def admit_quickly(connection: Any, table: str, arguments: Arguments) -> bool | None:
    """Whether the message is new; None if this is not the way. `arguments`: consumer, id, tenant, hash, topic, business key."""
    name, statement = _statement(table)
    known = _prepared.get(connection)
    if known is None:
        known = _prepared[connection] = set()
    _, execute = _psycopg()
    raw = connection.pgconn
    for _ in range(_TRIES):
        prepare = b"" if name in known else b"PREPARE %b AS %b;" % (name, statement)
        try:
            begin = connection._get_tx_start_command()  # noqa: SLF001 - with the isolation it was given
            # Text, because several statements of one message have no parameters (a pipeline could have them, and costs the client
            # twice as much).
            raw.send_query(b"%b;%bEXECUTE %b (%b)" % (begin, prepare, name, _literals(raw, *arguments)))
            results = connection.wait(
                execute(raw)
            )  # as psycopg waits: interruptible, and cooperative under gevent
        except Exception:  # noqa: BLE001 - the ordinary way meets it too, and tells it in SQLAlchemy's words
            _leave(connection)
            return None
        except BaseException:
            _leave(connection)
            raise
        last = results[-1]
        if last.status == _DONE:
            if prepare:
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
    if not isinstance(target, Connection):
        return None
    dialect = target.dialect
    if dialect.driver != "psycopg" or dialect.is_async:
        return None
    driver: Any = target.connection.dbapi_connection
    raw = driver.pgconn
    if raw.transaction_status != _IDLE or raw.pipeline_status != _IDLE or driver.autocommit:
        return None
    # prepare_threshold=None is how psycopg is told of a pooler behind which no prepared statement lasts.
    if driver.prepare_threshold is None:
        return None
    if not target.in_transaction():
        target.begin()  # BEGIN is sent past SQLAlchemy, whose commit() must know of it
    return driver


def _literals(
    raw: Any, consumer: str, message: str, tenant: str, digest: bytes, topic: str, key: str | None
) -> bytes:
    """The arguments of the statement, in SQL."""
    # Their bytes, not their texts: one may be of a class that shows itself as another one (an enumeration).
    who, what, whose, where = consumer.encode(), message.encode(), tenant.encode(), topic.encode()
    said = who + what + whose + where
    # Nearly always nothing in them has a meaning in SQL, or is another byte in another encoding.
    if key is None and said.isascii() and not (b"'" in said or b"\\" in said or b"\0" in said):
        return b"'%b', '%b', '%b', E'\\\\x%b', '%b', NULL" % (who, what, whose, digest.hex().encode(), where)
    if raw.parameter_status(b"client_encoding") != b"UTF8":
        raise ValueError("the server would read another text")
    escape = _psycopg()[0](raw).escape_literal
    literals = [_literal(each, escape) for each in (consumer, message, tenant, topic, key)]
    literals.insert(3, b"E'\\\\x%b'" % digest.hex().encode())
    return b", ".join(literals)


def _literal(value: str | None, escape: Callable[[bytes], bytes]) -> bytes:
    if value is None:
        return b"NULL"
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
