"""What went wrong between us and PostgreSQL, in words of ours: both drivers' errors end here.

Four kinds are for the store itself, because it can do something about them: `Lost` (the connection is gone, the
statement may have run: send it again, it is idempotent), `Locked` (a row stayed locked for 50 ms), `Clash` (the
transaction lost a race: again) and `Unfit` (a value that PostgreSQL cannot hold: the item is at fault, not the
batch). Everything else is told to the caller: `ConfigurationError` when somebody must change something,
`StoreUnavailable` when time may help. A statement of ours that PostgreSQL does not understand is a RuntimeError.
"""

from __future__ import annotations

import re
import socket
import ssl
from typing import Any, Final

from semel.errors import CodecError, ConfigurationError, StoreUnavailable
from semel.losses import NotConnected

__all__ = [
    "Clash",
    "Late",
    "Locked",
    "Lost",
    "NotReplicated",
    "ReadOnly",
    "Trouble",
    "Unfit",
    "refused",
    "unreachable",
]


class Trouble(Exception):
    """A statement without a result. The driver's error is the cause."""

    def told(self, where: str) -> Exception:
        """What the caller hears when nothing could be done about it."""
        return _chain(StoreUnavailable(f"PostgreSQL at {where} did not answer: {self}"), self.__cause__)


class Lost(Trouble):
    """The connection broke, or was found broken."""


class Late(Trouble):
    """The statement's time is over; it may still run."""


class NotReplicated(Trouble):
    """Committed here, but the wait for the synchronous standby was cancelled: a failover may lose it."""

    def told(self, where: str) -> Exception:
        text = (
            f"PostgreSQL at {where} committed without its synchronous standby (the wait was cancelled): whether this "
            "survives a failover is unknown; ask again with the same key"
        )
        return StoreUnavailable(text)


class Locked(Trouble):
    """Another transaction held the row for longer than we wait."""

    def told(self, where: str) -> Exception:
        text = f"a record in PostgreSQL at {where} stayed locked by another transaction: find it in pg_stat_activity"
        return _chain(StoreUnavailable(text), self.__cause__)


class Clash(Trouble):
    """A serialization failure or a deadlock: PostgreSQL chose this transaction to be repeated."""


class ReadOnly(StoreUnavailable):
    """Nothing can be written for now; what is there can be read."""


class Unfit(Trouble):
    """A value that PostgreSQL cannot hold."""

    def told(self, where: str) -> Exception:
        return _chain(
            CodecError(f"PostgreSQL at {where} cannot hold a value of this record: {self}"), self.__cause__
        )


def _chain(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error


_SCHEMA: Final = "run the output of `semel schema sql URL` as a role that may create tables"

_POOLED: Final = (
    "a pooler sits in between; add ?pgbouncer=1 to the URL, or keep a pool or engine of your own from preparing (asyncpg: "
    "statement_cache_size=0, psycopg: prepare_threshold=None)"
)

# SQLSTATEs after which somebody must change something. {} is PostgreSQL's own text.
_CONFIGURATION: Final = {
    "28P01": "the password is wrong ({}): correct the URL",
    "28000": "the login was refused ({}): correct user and password in the URL, or pg_hba.conf",
    "3D000": "the database does not exist ({}): create it (createdb), or correct the URL",
    "3F000": f"the schema of the table does not exist ({{}}): create it, then {_SCHEMA}",
    "42501": f"this role lacks a right ({{}}): {_SCHEMA}, and grant it SELECT, INSERT, UPDATE, DELETE on the tables, and "
    "EXECUTE on the functions",
    "42P01": f"a table of semel is missing ({{}}): {_SCHEMA}",
    "42703": "a table of ours lacks a column ({}): something else made it, or altered it; name another with table=, or compare it with "
    "the output of `semel schema sql URL`",
    "no TLS": "it does not speak TLS ({}), which the URL asks for: set TLS up on the server (ssl = on), or leave sslmode= out of the "
    "URL where nobody can listen",
    "26000": f"a prepared statement vanished ({{}}): {_POOLED}",
    "42P05": f"a prepared statement was there already ({{}}): {_POOLED}",
}
# SQLSTATEs (or classes of them) that time or an operator may cure.
_UNAVAILABLE: Final = {
    "25006": "it is read-only ({}): a standby? point the URL to the primary, or add target_session_attrs=read-write",
    "57014": "it cancelled the statement ({}): look at statement_timeout, or at who cancelled it",
    "53300": "it has no connection left ({}): raise max_connections, or use fewer processes or a smaller ?pool=",
    "53": "it is out of a resource ({})",
    "54": "it reached a limit ({})",
    "55": "it cannot do this now ({})",
    "57": "an operator intervened ({})",
    "58": "its system failed ({})",
    "F0": "its configuration is broken ({})",
    "XX": "it failed inside ({}): look at its log",
}
_LOST: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04"})


def refused(error: Any, where: str) -> Exception:
    """The server answered with an error; `error` is the driver's, with its SQLSTATE and text."""
    state, text = str(error.sqlstate or ""), _first_line(error)
    if state in _LOST or state[:2] == "08" or (state == "0A000" and "cached plan" in text):
        return _chain(
            Lost(text), error
        )  # a plan that outlived a change of the table: another connection has none
    if state == "55P03":
        return _chain(Locked(text), error)
    if state in {"40001", "40P01"}:
        return _chain(Clash(text), error)
    if state[:2] == "22":
        return _chain(Unfit(text), error)
    return _final(error, state, text, where)


def _final(error: BaseException, state: str, text: str, where: str) -> Exception:
    if state in _CONFIGURATION:
        return _chain(ConfigurationError(_unusable(state, text, where)), error)
    if remedy := _UNAVAILABLE.get(state) or _UNAVAILABLE.get(state[:2]):
        kind = ReadOnly if state == "25006" else StoreUnavailable
        return _chain(kind(f"PostgreSQL at {where} is not available: {remedy.format(text)}"), error)
    return _chain(RuntimeError(f"PostgreSQL at {where} refused a statement of semel ({state} {text})"), error)


def _unusable(state: str, text: str, where: str) -> str:
    return f"PostgreSQL at {where} cannot be used: {_CONFIGURATION[state].format(text)}"


# libpq gives no SQLSTATE for a failed login, only the server's text; PgBouncer gives one of its own for everything.
_LOGIN: Final = (
    (re.compile(r"password authentication failed|no password supplied"), "28P01"),
    (
        re.compile(
            r"no pg_hba.conf entry|authentication failed|role .* does not exist|not permitted to log in"
        ),
        "28000",
    ),
    (re.compile(r"server does not support SSL|rejected SSL upgrade"), "no TLS"),
    (re.compile(r"database .* does not exist|no such database"), "3D000"),
    (re.compile(r"too many (clients|connections)|connection slots|no more connections"), "53300"),
    (re.compile(r"starting up|shutting down|recovery mode"), "57P03"),
)


def unreachable(error: BaseException, where: str, *, proven: bool) -> tuple[Exception, bool]:
    """A connection could not be made: what the caller hears, and whether trying again is pointless.

    Before the first success (`proven` false) a refused connection is most likely a wrong address, so the caller
    hears of it at once; afterwards it is a restart or a failover, which is worth waiting for.
    """
    text = _first_line(error)
    state = next(
        (known for words, known in _LOGIN if words.search(text)), str(getattr(error, "sqlstate", None) or "")
    )
    if state in _CONFIGURATION:
        told = _chain(NotConnected(_unusable(state, text, where)), error)
        return (_chain(StoreUnavailable(str(told)), told) if proven else told), True
    if state == "53300":
        return _final(error, state, text, where), False
    if isinstance(error, ssl.SSLError):
        reason = (
            f"the TLS handshake with PostgreSQL at {where} failed ({text}): check sslmode and certificates"
        )
    elif isinstance(error, socket.gaierror):
        reason = f"the host of PostgreSQL at {where} cannot be resolved: check the URL and DNS"
    elif isinstance(error, TimeoutError):
        reason = f"PostgreSQL at {where} does not answer: is it running, stopped or behind a firewall?"
    else:
        reason = f"cannot reach PostgreSQL at {where} ({text}): is the server running, and is the URL right?"
    # Nobody answered in all the time there was: another try would have none.
    pointless = not (proven or state == "57P03") or isinstance(error, TimeoutError)
    return _chain(StoreUnavailable(reason), error), pointless


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
