"""How long a database that we open by its URL is waited for: to let us in, to answer, and after it was left alone for a while.

A server that was stopped, or a host that vanished, takes calls and never answers: without a bound whoever asks hangs with it.
"""

from __future__ import annotations

import math
import time
import weakref
from typing import Any, Final

from sqlalchemy import Engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import InvalidatePoolError

__all__ = ["bound", "connect_arguments"]

_CONNECT: Final = 10  # seconds; drivers take whole ones
_RESTED: Final = 1.0  # a connection that was used since is believed to be alive
_SINCE: Final = "semel_since"
_LIBPQ: Final[dict[str, int]] = {
    "connect_timeout": _CONNECT,
    # A host that vanished is noticed in about a minute, not in the two hours of most systems.
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}
# PyMySQL's connect_timeout ends before the server has said a word: that is read with the read timeout.
_PYMYSQL: Final[dict[str, int]] = {"connect_timeout": _CONNECT, "read_timeout": _CONNECT}
_ARGUMENTS: Final = {"psycopg": _LIBPQ, "psycopg2": _LIBPQ, "pymysql": _PYMYSQL}


def connect_arguments(url: URL, driver: str) -> dict[str, int]:
    """What the driver is told when it connects; what the URL says goes first."""
    return {name: value for name, value in _ARGUMENTS.get(driver, {}).items() if name not in url.query}


def bound(engine: Engine, url: URL, seconds: float | None) -> None:
    """Each statement is answered within so many seconds, or its connection is given up; None: whenever it is, since a statement of
    a user's handler may take long.

    A connection that was not used for a while is asked whether it lives, and replaced with all the others if not: the server may
    have been started anew. One that was in use just now is not: that would cost a round trip each time.
    """
    seconds = None if seconds == math.inf else seconds
    driver = "" if "read_timeout" in url.query else engine.dialect.driver  # then PyMySQL has its bound

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: object) -> None:
        _tell(driver, connection, seconds)

    @event.listens_for(engine, "checkin")
    def _rests(_connection: object, record: Any) -> None:
        record.info[_SINCE] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _taken(connection: Any, record: Any, _fairy: object) -> None:
        since = record.info.pop(_SINCE, None)
        if since is None or time.monotonic() - since < _RESTED:
            return
        try:
            _tell(driver, connection, min(_CONNECT, seconds or _CONNECT))
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError(str(error)) from error
        _tell(driver, connection, seconds)


def _tell(driver: str, connection: Any, seconds: float | None) -> None:
    """How long the connection is to wait for an answer."""
    if driver == "pymysql":
        connection._read_timeout = seconds  # noqa: SLF001 - it can be told only when it connects
    elif driver == "psycopg" and seconds is not None:
        connection.wait = _bounded(weakref.ref(connection), seconds)
    elif driver == "psycopg":
        vars(connection).pop("wait", None)


def _bounded(of: weakref.ref[Any], seconds: float) -> Any:
    """The way psycopg waits for whatever the server says, with an end."""

    def wait(gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        connection: Any = of()
        start = time.monotonic()
        try:
            return type(connection).wait(connection, gen, interval, seconds if timeout is None else timeout)
        except Exception:
            if timeout is None and time.monotonic() - start >= seconds:
                connection.pgconn.finish()  # what it still says would be taken for the next answer
            raise

    return wait
