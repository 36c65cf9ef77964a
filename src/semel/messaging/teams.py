"""Relays as a team: who they are to a sink, which of them owns a part, and what they may be told."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Collection
from datetime import timedelta
from typing import Any, Final

from semel.errors import ConfigurationError
from semel.messaging.routes import Target
from semel.options import seconds

__all__ = ["bind", "check", "check_scope", "draw", "team_of"]

_SHORTEST: Final = 0.05
_NAME: Final = 120
_sources: Final[weakref.WeakKeyDictionary[Any, str]] = weakref.WeakKeyDictionary()


def bind(target: Target, source: str) -> None:
    """Tell the sink who publishes. One sink object has one frontier: it serves one outbox and team."""
    tell = getattr(target.sink, "bind", None)
    said = f"{source}:{target.way}" if tell is not None else source
    if target.sink.guarantee != "at-least-once":
        known = _said(target.sink, said)
        if known != said:
            raise ConfigurationError(
                f"the sink of route {target.name!r} is used by another outbox, relay name or route: their numbers would be "
                "taken for each other. Give each its own sink object, or its URL"
            )
    if tell is not None:
        tell(said)


def _said(sink: Any, said: str) -> str:
    """Who publishes to the sink, as far as is known. One that cannot be a key or have references is taken at its word."""
    try:
        return _sources.setdefault(sink, said)
    except TypeError:
        return said


def draw(part: int, names: list[str]) -> str:
    """Rendezvous: every relay draws the same winner, and one that joins or leaves moves only its own share."""
    return max(names, key=lambda name: hashlib.blake2b(f"{part}/{name}".encode(), digest_size=8).digest())


def team_of(topics: Collection[str], tenants: Collection[str]) -> str:
    """Relays that look at different messages must not share a part's state."""
    if topics or tenants:
        raise ConfigurationError(
            "a relay that is limited to topics or tenants needs a name= of its own, the same after every restart: what it has "
            "under way is remembered under it, apart from what other relays have"
        )
    return "relay"


def check(*, lease: float | timedelta, batch: int, max_attempts: int, loops: int) -> float:
    """ConfigurationError for what could only be a mistake; the lease in seconds."""
    long = seconds("lease", lease, least=_SHORTEST)
    if long == math.inf:
        raise ConfigurationError("lease must end: a relay that died would never be succeeded")
    for name, value, most in (
        ("batch", batch, 5000),
        ("max_attempts", max_attempts, 10_000),
        ("loops", loops, 16),
    ):
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigurationError(f"{name} must be 1 to {most}, not {value!r}")
    return long


def check_scope(
    name: str | None, topics: Collection[str], tenants: Collection[str], sink_safety: float | timedelta
) -> float:
    """ConfigurationError for what could only be a mistake; how long batches are kept, in seconds."""
    if not (_are_names(topics) and _are_names(tenants)):
        raise ConfigurationError('topics and tenants are lists of names, such as ["orders"], not one text')
    for topic in topics:
        if any(sign in topic for sign in "*?["):
            raise ConfigurationError(
                f"topics= are whole names, and {topic!r} looks like a pattern: routes have patterns"
            )
    given: Any = name
    if given is not None and not (isinstance(given, str) and 1 <= len(given) <= _NAME):
        raise ConfigurationError(f"a relay's name has 1 to {_NAME} characters; {given!r} is none")
    kept = seconds("sink_safety", sink_safety)
    if kept == math.inf:
        raise ConfigurationError("sink_safety is a number of seconds, 0 or more, that ends")
    return kept


def _are_names(given: Any) -> bool:
    return (
        not isinstance(given, str)
        and isinstance(given, Collection)
        and all(isinstance(each, str) for each in given)
    )
