"""What went wrong between us and a Redis server, and what may be done about it.

The link tells three kinds of trouble apart, because they allow different answers:
`NotSent` (no byte of the call left us: send it again freely), `Lost` (it may have run: send it again only if it
is idempotent), and a `ServerError` (the server answered, so the code decides).
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from redis import exceptions as driver

from semel.errors import CodecError, ConfigurationError, SemelError, StoreUnavailable
from semel.losses import NotConnected

__all__ = [
    "MOVING",
    "TRANSIENT",
    "Full",
    "Lost",
    "NotSent",
    "Overdue",
    "ServerError",
    "hung_up",
    "in_our_words",
    "refusal",
    "unreachable",
]

# Answers that mean "not now": the command did not run, ask again until the caller's time is over.
TRANSIENT: Final = frozenset(
    {"LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "BUSY", "FAILOVER"}
)
# Of these, the ones that say that the master is somewhere else by now.
MOVING: Final = frozenset({"CLUSTERDOWN", "MASTERDOWN", "READONLY"})

_REMEDY: Final = {
    "OOM": "Redis is at its maxmemory: raise it, or delete data",
    "MISCONF": "Redis cannot persist: look at its log and its disk",
    "NOREPLICAS": "fewer replicas are connected than min-replicas-to-write asks for",
    "NOAUTH": "the server wants a password: put it into the URL",
    "WRONGPASS": "user or password is wrong: correct the URL",
    "NOPERM": "this user may not run the command: extend its ACL rules",
}
# NOAUTH: nothing runs on a connection that is not logged in.
_KIND: Final[dict[str, type[SemelError]]] = {
    "NOAUTH": NotConnected,
    "WRONGPASS": NotConnected,
    "NOPERM": ConfigurationError,
}


class ServerError(driver.ResponseError):
    """An error reply. `code` is its first word (`ERR`, `WRONGTYPE`, `MOVED`, …)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code: str = text.split(" ", 1)[0] if text else ""


class NotSent(Exception):
    """No byte of this call was written."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


_PLAIN = " (if it speaks TLS on this port, write rediss:// instead of redis://)"
_TLS = " Does it speak TLS on this port? If it does not, begin the URL with redis, not rediss"


class Lost(NotSent):
    """The call was written and its answer will not come: it may have run.

    `stillborn` says that the connection never answered anything: a dying server's kernel still accepts for a while.
    """

    def __init__(self, cause: BaseException, *, stillborn: bool = False) -> None:
        super().__init__(cause)
        self.stillborn = stillborn


class Full(NotSent):
    """The connection has as many unanswered calls as it may have."""


class Overdue(Exception):
    """The caller's time is over; the reply, if it comes, is thrown away."""


def _chain(error: BaseException) -> list[BaseException]:
    seen: list[BaseException] = []
    while error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__ or error
    return seen


def _is_a(error: BaseException, *kinds: type[BaseException]) -> bool:
    return any(isinstance(link, kinds) for link in _chain(error))


def unreachable(
    where: str, cause: BaseException, *, proven: bool, tls: bool = False
) -> tuple[SemelError, bool]:
    """The error for a connection that could not be made, and whether trying again is pointless.

    Before the first success (`proven` false) a refusal is most likely a wrong address, so the caller hears of
    it at once; afterwards it is a restart or a failover, which is worth waiting for.
    """
    if _is_a(cause, driver.AuthenticationError, driver.NoPermissionError):
        text = f"Redis at {where} refused the login: check user and password in the URL, and the server's ACL"
        return _shut_out(text, cause, proven=proven), True
    if _is_a(cause, ssl.SSLError):
        text = f"the TLS handshake with Redis at {where} failed: check rediss:// and ssl_ca_certs ({_last(cause)})"
        return StoreUnavailable(text), not proven
    if _is_a(cause, socket.gaierror):
        return StoreUnavailable(
            f"the host name of Redis at {where} cannot be resolved: check the URL and DNS"
        ), not proven
    if _is_a(cause, driver.ResponseError):
        if "unknown command" in _last(cause) and "SENTINEL" in _last(cause):
            return ConfigurationError(
                f"Redis at {where} is no Sentinel: name the Sentinels in redis+sentinel:// (their port is 26379 as a rule), or "
                "write redis:// for a server without them"
            ), True
        text = (
            f"Redis at {where} refused the connection's settings ({_last(cause)}): check the URL's database"
        )
        return _shut_out(text, cause, proven=proven), not proven
    if _is_a(cause, driver.BusyLoadingError):
        return StoreUnavailable(f"Redis at {where} is still loading its data: wait for it"), False
    if _is_a(cause, driver.TimeoutError, TimeoutError):
        return StoreUnavailable(
            f"Redis at {where} does not answer: is it running, stopped or behind a firewall?{_TLS if tls else ''}"
        ), False
    text = f"cannot reach Redis at {where} ({_last(cause)}): is the server running, and is the URL right?"
    text += _TLS if tls else "" if proven else hung_up(where, cause)
    return StoreUnavailable(text), not proven


def hung_up(where: str, cause: BaseException) -> str:
    """A guess, of a server that ended a connection without TLS before it had said a word."""
    ended = _is_a(cause, ConnectionResetError) or "closed" in _last(cause)
    return _PLAIN if ended and not where.startswith("/") else ""


def _shut_out(text: str, cause: BaseException, *, proven: bool) -> SemelError:
    told = NotConnected(text)
    told.__cause__ = cause
    if not proven:
        return told
    later = StoreUnavailable(text)
    later.__cause__ = told
    return later


def _last(error: BaseException) -> str:
    root = _chain(error)[-1]
    return str(root) or type(root).__name__


def refusal(where: str, error: ServerError) -> Exception:
    """What the caller gets for an error reply that trying again will not change."""
    remedy = _REMEDY.get(error.code)
    if remedy is None:
        return error
    told = _KIND.get(error.code, StoreUnavailable)(
        f"Redis at {where} refused the call ({error.code}): {remedy}"
    )
    told.__cause__ = error
    return told


def in_our_words(error: ServerError, prefix: str) -> Exception:
    """An error reply that nothing but a change will cure, in our own words."""
    text = str(error)
    if text.startswith("ERR semel: "):
        return ValueError(f"{text[11:]}: a lease, retention, tombstone or delay is negative or not a number")
    if error.code == "WRONGTYPE":
        return ConfigurationError(
            f"a key under the prefix {prefix!r} holds another program's data ({text}): choose another "
            "prefix=, or remove that key"
        )
    if "user executing the script" in text:
        return ConfigurationError(
            f"this Redis user may not run what a script needs ({text}): extend its ACL rules"
        )
    if "bulk length" in text or "proto-max-bulk-len" in text:
        return CodecError(
            f"a value is too large for Redis ({text}): raise proto-max-bulk-len on the server, or lower max_result"
        )
    return StoreUnavailable(f"Redis refused the call: {text}")
