"""The options of each verb, as editors and type checkers know them: a word that is misspelt is seen before the program runs.

What an option means, and what it may be, is decided where it is read (`options.py`, `face.py`); a test compares the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

from semel.options import Duration, OnError

__all__ = [
    "CallOptions",
    "Conduct",
    "DecoratorOptions",
    "Forgetting",
    "Place",
    "Readable",
    "Recovering",
    "Resolving",
]

Readable = Literal["full", "masked", "none"]


class Conduct(TypedDict, total=False):
    """What a face takes as the default of all its calls, besides what its signature names."""

    poll: tuple[Duration, Duration]
    on_error: OnError | None
    on_unknown: Literal["retry", "hold"] | Callable[..., Any]
    on_lease_lost: Literal["cancel", "warn"]
    result_type: Any
    ref_type: str | None
    compress_over: int | None
    max_waiters: int
    fingerprints: Literal["optional", "required"]
    inline: bool


class _Asked(Conduct, total=False):
    """Of a call and of a decorated function."""

    operation: str
    lease: Duration
    retention: Duration | None
    tombstone: Duration
    wait: Duration
    max_result: int
    fields: Iterable[str] | None
    labels: Mapping[str, str] | None
    readable: Readable


class CallOptions(_Asked, total=False):
    """Of `execute`, `consume` and `claim`."""

    tenant: str
    request: Any
    fingerprint: str | None
    kwargs: Mapping[str, Any] | None


class DecoratorOptions(_Asked, total=False):
    """Of `@once`: key, request and tenant are field paths over the arguments, or functions of them."""

    key: str | Callable[..., Any] | None
    request: str | Callable[..., Any] | None
    tenant: str | Callable[..., Any]
    method: str | None


class Place(TypedDict, total=False):
    """Which key is meant, besides its text."""

    tenant: str
    operation: str


class Forgetting(Place, total=False):
    retention: Duration | None


class Resolving(Forgetting, total=False):
    tombstone: Duration
    result_type: Any


class Recovering(TypedDict, total=False):
    """How what a `reconcile` settles is kept."""

    retention: Duration | None
    tombstone: Duration
    result_type: Any
    max_result: int
    compress_over: int | None
    lease: Duration
    on_error: OnError | None
    on_lease_lost: Literal["cancel", "warn"]
