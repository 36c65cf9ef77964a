"""What a client may be told: once for all its requests, and for one request. Checked where it is said."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from math import inf
from typing import Any, Final, TypedDict, Unpack

import msgspec

from semel.errors import ConfigurationError, InvalidKey
from semel.ids import mint
from semel.options import Duration, seconds

__all__ = [
    "ClientOptions",
    "RequestOptions",
    "Retrying",
    "Settings",
    "Wish",
    "new_key",
    "sending",
    "settings_from",
    "wish_for",
    "wish_from",
]

_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_KEY: Final = re.compile(r"[!-~]{1,255}")
_NOT_BARE: Final = re.compile(r'[",;\\]')


class Retrying(msgspec.Struct, frozen=True):
    """What `on_retry` is told before each pause: the attempt that failed, why, and how long the pause is."""

    method: str
    host: str
    attempt: int
    why: str
    wait: float
    error: Exception | None = None


class ClientOptions(TypedDict, total=False):
    """Options of the transports and the adapter; each has a default that is good enough."""

    key: Callable[[Any], str] | None
    """Makes a request's key from the request; the default is a new UUIDv7, whose age a server can see."""
    methods: Collection[str] | str
    header: str
    quoted: bool
    """Send the key as a structured-field string ("…"), as the IETF draft has it. Bare is what most services read."""
    attempts: int
    backoff: tuple[Duration, Duration]
    """The first and the longest pause; each pause is a random part of it (full jitter), doubled every time."""
    max_wait: Duration
    """The longest pause that a server may ask for by Retry-After."""
    deadline: Duration | None
    """For all attempts and pauses together. No attempt begins after it, and none is given more time than is left."""
    retention: Duration | None
    """How long the server keeps a key, if it does not say so itself; of the two the shorter counts."""
    trusted: bool
    """The server is known to honour keys: a 5xx or 409 without a problem is repeated as well."""
    retry_lost: bool
    """Repeat when the reply was lost (a timeout, a reset). False: only once the server has shown that the key counts."""
    max_body: int
    """A body that comes as a stream is kept, to be sent again, up to this many bytes."""
    max_response: int
    """A response of known length up to this many bytes is read within the attempt, so that a cut one is asked for again."""
    on_retry: Callable[[Retrying], object] | None


class RequestOptions(TypedDict, total=False):
    """Options of one request: `extensions={"semel": {…}}` of httpx, or `with sending(…)`."""

    key: str
    action: str
    """The business action. With `keys=` its key is the same after a restart."""
    request: Any
    """What is compared under one action, instead of method, URL, media type and body."""
    enabled: bool
    attempts: int
    max_wait: Duration
    deadline: Duration | None
    retention: Duration | None
    trusted: bool
    retry_lost: bool


class Settings(msgspec.Struct, frozen=True):
    """Checked options; durations are seconds, `inf` for none."""

    key: Callable[[Any], str] | None = None
    methods: frozenset[str] = frozenset({"POST", "PATCH"})
    header: str = "Idempotency-Key"
    quoted: bool = False
    attempts: int = 5
    backoff: tuple[float, float] = (0.25, 8.0)
    max_wait: float = 60.0
    deadline: float = inf
    retention: float = inf
    trusted: bool = False
    retry_lost: bool = True
    max_body: int = 64 << 20
    max_response: int = 1 << 20
    on_retry: Callable[[Retrying], object] | None = None

    def field(self, key: str) -> str:
        """The key as it stands in the header."""
        if not self.quoted:
            return key
        escaped = key.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    def minted(self, request: Any) -> str:
        return new_key() if self.key is None else self.checked_key(self.key(request))

    def checked_key(self, key: object) -> str:
        """1 to 255 visible ASCII characters; never echoed."""
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise InvalidKey(
                "an idempotency key has 1 to 255 visible ASCII characters: make a shorter or plainer one"
            )
        if not self.quoted and _NOT_BARE.search(key):
            raise InvalidKey("a key with quotes, commas, semicolons or backslashes needs quoted=True")
        return key


class Wish(msgspec.Struct, frozen=True):
    """What one request asks for. `direct`: it was said for this very request, not for a block around it."""

    key: str | None = None
    action: str | None = None
    request: Any = None
    enabled: bool = True
    direct: bool = False


_OWN: Final = frozenset({"key", "action", "request", "enabled"})
_around: ContextVar[Mapping[str, Any] | None] = ContextVar("semel_sending", default=None)


def new_key() -> str:
    """A UUIDv7 from the operating system's randomness."""
    return str(mint("key", time.time_ns() // 1_000_000, os.urandom(10)).uuid)


@contextmanager
def sending(**options: Unpack[RequestOptions]) -> Iterator[None]:
    """What the one request inside the block asks for, in any of the libraries; what it says itself wins.

        with sending(action="charge order 7"):
            session.post(url, json={"cents": 500})

    A second request under the same action or key must be the same request.
    """
    given = {**(_around.get() or {}), **options}
    wish_from(Settings(), given, {})  # a mistake is named here, not at the request
    token = _around.set(given)
    try:
        yield
    finally:
        _around.reset(token)


def settings_from(options: Mapping[str, Any]) -> Settings:
    """Checked; an unknown name or a bad value is a ConfigurationError."""
    _refuse_unknown(options, Settings.__struct_fields__)
    return msgspec.structs.replace(
        Settings(), **{name: _checked(name, value) for name, value in options.items()}
    )


def wish_from(settings: Settings, around: Mapping[str, Any] | None, direct: Any) -> tuple[Settings, Wish]:
    """The settings of one request and what it asks for. What is said directly wins over the block around it."""
    if not around and not direct:
        return settings, Wish()
    if not isinstance(direct, Mapping):
        raise ConfigurationError(
            f'extensions["semel"] must be a mapping of options, not {type(direct).__name__}'
        )
    given = {**(around or {}), **direct}
    _refuse_unknown(given, RequestOptions.__annotations__)
    own = {name: value for name, value in given.items() if name in _OWN}
    if given.get("key") is not None and given.get("action") is not None:
        raise ConfigurationError(
            "give key= or action=, not both: the key of an action comes from the store of keys"
        )
    changes = {name: _checked(name, value) for name, value in given.items() if name not in _OWN}
    _switch("enabled", own.get("enabled", True))
    wish = Wish(**own, direct="key" in direct or "action" in direct)
    if wish.key is not None:
        settings.checked_key(wish.key)
    return msgspec.structs.replace(settings, **changes), wish


def wish_for(settings: Settings, direct: Any) -> tuple[Settings, Wish]:
    """As `wish_from`, with the block that is around this request."""
    return wish_from(settings, _around.get(), direct)


def _refuse_unknown(given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            close = get_close_matches(str(name), known, 1)
            guess = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigurationError(f"unknown option {name!r}: {guess}The options are {', '.join(known)}")


def _checked(name: str, value: Any) -> Any:
    match name:
        case "attempts":
            return _count(name, value, 1)
        case "max_body" | "max_response":
            return _count(name, value, 0)
        case "deadline" | "retention":
            return inf if value is None else seconds(name, value)
        case "max_wait":
            return seconds(name, value)
        case "backoff":
            return _backoff(value)
        case "methods":
            return _methods(value)
        case "header":
            return _header(value)
        case "quoted" | "trusted" | "retry_lost":
            return _switch(name, value)
        case _:  # key, on_retry
            if value is not None and not callable(value):
                raise ConfigurationError(f"{name} must be a function, not {value!r}")
            return value


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be a whole number, {least} or more, not {value!r}")
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, not {value!r}")
    return value


def _backoff(value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigurationError(f"backoff must be a pair (first, longest) of seconds, not {value!r}")
    first, longest = seconds("backoff[0]", value[0]), seconds("backoff[1]", value[1])
    if first > longest or longest == inf:
        raise ConfigurationError(
            f"backoff must begin with the shorter pause and end with a finite one, not {value!r}"
        )
    return first, longest


def _methods(value: Any) -> frozenset[str]:
    if isinstance(value, str):
        value = (value,) if value else ()
    if not isinstance(value, Collection) or not all(isinstance(each, str) for each in value):
        raise ConfigurationError(f'methods must be a list of names, such as ("POST", "PATCH"), not {value!r}')
    if not value:
        raise ConfigurationError(
            "methods is empty, so no request would get a key: name them, or use httpx as it is"
        )
    if wrong := [each for each in value if not _TOKEN.fullmatch(each)]:
        raise ConfigurationError(
            f'methods holds {wrong[0]!r}, which is no method: write a list, such as ("POST", "PATCH")'
        )
    return frozenset(each.upper() for each in value)


def _header(value: Any) -> str:
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        raise ConfigurationError(
            f'header must be the name of a header, such as "Idempotency-Key", not {value!r}'
        )
    return value
