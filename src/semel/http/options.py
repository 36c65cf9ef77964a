"""The options of middlewares and decorators, for type checkers and editors. `config` checks their values, by name.

Each is explained in docs/reference/http.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

from semel.bodies import BodyStore
from semel.http.spill import Spill
from semel.options import Duration

__all__ = ["DecoratorOptions", "FastAPIOptions", "MiddlewareOptions", "RouteOptions"]

Resolver = Callable[[Any], Any]
"""A function of the framework's request; under ASGI it may be a coroutine function."""


class RouteOptions(TypedDict, total=False):
    """What may differ from route to route."""

    profile: Literal["ietf", "success-only", "stripe-v1", "acp", "adcp", "iceberg", "oasis"]
    methods: Iterable[str]
    header: str | Iterable[str]
    sources: str | Iterable[str]
    required: bool
    strict: bool
    min_length: int
    uuid7: bool
    anonymous: bool
    scope: Literal["principal", "route"]
    exclude: str | Iterable[str]
    effects: Literal["db", "steps", "opaque"]
    stored: Literal["final", "success", "everything", "success-and-4xx"] | Callable[[int], bool]
    lease: Duration
    wait: Duration
    max_wait: Duration
    max_waiters: int
    retention: Duration | None
    tombstone: Duration
    grace: Duration
    expired: Literal["reject", "new"]
    max_response: int
    spill: str | Spill | BodyStore | None
    max_body: int
    quota: float | None
    fail_open: bool
    store_timeout: Duration
    secret: bool
    markers: str | Iterable[str]
    replay_headers: str | Iterable[str]
    problem_base: str


class _Asked(RouteOptions, total=False):
    """Who else is asked about a request."""

    authorize: Resolver | None
    key: Resolver | None
    events: Any


class DecoratorOptions(_Asked, total=False):
    """A decorated route: what comes before it has authenticated and authorized."""

    principal: Resolver | None
    tenant: Resolver | None


class FastAPIOptions(_Asked, total=False):
    """The same under FastAPI, where `principal` and `tenant` may also be field paths over the function's arguments."""

    principal: Resolver | str | None
    tenant: Resolver | str | None


class MiddlewareOptions(DecoratorOptions, total=False):
    """A middleware answers replays by itself: it must be told who has authorized them."""

    authenticated_outside: bool
    routes: Mapping[str, RouteOptions | bool | None]
