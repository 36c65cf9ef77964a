"""From a request to its key, its sender and its fingerprint: everything that happens before the store is asked (H13)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec

from semel.errors import ConfigurationError, InvalidKey
from semel.http.body import Body
from semel.http.config import Plan
from semel.http.fingerprints import fingerprint, media_type, parse_json
from semel.http.guard import Guard, Keyed
from semel.http.keys import core_key, minted_at, read_key
from semel.http.problem import Problem
from semel.http.rules import Rules, is_too_old, prefer_wait
from semel.keys import check_tenant

__all__ = ["Asked", "Incoming", "identify", "keyed_of"]


class Incoming(Protocol):
    """A request of any protocol, before its body is read."""

    method: str
    path: str
    """All of it, as the client sent it: part of the fingerprint."""
    routed: str
    """Without the place where the application is mounted: what `routes=` are compared with."""
    query: bytes

    def lines(self, name: str) -> list[bytes]:
        """The values of a header, a line each."""
        ...

    def request(self) -> Any:
        """What resolvers get: the framework's own request object, if there is one."""
        ...


class Asked(msgspec.Struct, frozen=True):
    """A request that wants to be done once: its guard, and its key if that did not have to wait for the body."""

    guard: Guard
    parts: Mapping[str, str]
    key: str | None


def identify(plan: Plan, incoming: Incoming) -> Asked | Problem | None:
    """Look at a request without touching its body. None: it has no key and needs none, let it pass untouched."""
    found = plan.guard_for(incoming.method, incoming.routed) if plan.once.enabled else None
    if found is None:
        return None
    guard, parts = found
    rules = guard.rules
    if plan.key is not None:
        return Asked(guard, parts, None)
    lines = _lines(rules, incoming, parts)
    if lines:
        key = _read(rules, lines)
        return key if isinstance(key, Problem) else Asked(guard, parts, key)
    if any(source.startswith("body:") for source in rules.sources):
        return Asked(guard, parts, None)
    return rules.problem(Problem.of("key-missing")) if rules.required else None


def _lines(rules: Rules, incoming: Incoming, parts: Mapping[str, str]) -> list[bytes]:
    for source in rules.sources:
        kind, _, name = source.partition(":")
        found: list[bytes] = []
        if kind == "header":
            found = incoming.lines(name)
        elif kind == "query" and incoming.query:
            pairs = parse_qsl(incoming.query.decode("latin-1"), keep_blank_values=True)
            found = [value.encode("utf-8", "surrogateescape") for known, value in pairs if known == name]
        elif kind == "path" and name in parts:
            found = [parts[name].encode("utf-8", "surrogateescape")]
        if found:
            return found
    return []


def _read(rules: Rules, lines: list[bytes]) -> str | Problem:
    key = read_key(lines, strict=rules.strict, least=rules.min_length)
    if isinstance(key, Problem):
        return rules.problem(key)
    if rules.uuid7 and minted_at(key) is None:
        return rules.problem(Problem.of("key-malformed", reason="the key must be a UUIDv7"))
    if is_too_old(rules, key, time.time()):
        return rules.problem(Problem.of("key-expired"))
    return key


async def keyed_of(
    plan: Plan, asked: Asked, incoming: Incoming, read: Callable[[], Awaitable[Body | Problem]]
) -> tuple[Keyed, Body] | Problem | Body:
    """The request as the store will know it. A lone Body: it has no key after all, and needs none."""
    guard, key = asked.guard, asked.key
    rules = guard.rules
    request = incoming.request()
    body: Body | Problem | None = None
    if key is None:  # it is in the body, or only the caller's own resolver knows
        body = await read()
        late = (
            body
            if isinstance(body, Problem)
            else await _late_key(plan, rules, incoming, body, request, guard)
        )
        if isinstance(late, Problem):
            return _refused(rules, body, late)
        if late is None:
            return body
        key = late
    sender = await _sender(plan, guard, incoming, request)
    if isinstance(sender, Problem):
        return _refused(rules, body, sender)
    body = await read() if body is None else body
    if isinstance(body, Problem):
        return rules.problem(body)
    principal, tenant = sender
    route = f"{incoming.method} {incoming.path}"
    keyed = Keyed(
        key=key,
        principal=principal,
        tenant=tenant,
        fingerprint=_fingerprint(rules, incoming, body),
        wait=prefer_wait(rules, incoming.lines("prefer")),
        route=route,
        operation="http" if rules.scope == "principal" else _route_name(route),
    )
    return keyed, body


def _refused(rules: Rules, body: Body | Problem | None, problem: Problem) -> Problem:
    if isinstance(body, Body):
        body.close()
    return rules.problem(problem)


async def _sender(
    plan: Plan, guard: Guard, incoming: Incoming, request: Any
) -> tuple[str, str | None] | Problem:
    """Who sends a keyed request, and whether it may be looked at. Before the body is read, where that is possible."""
    rules = guard.rules
    if incoming.lines("early-data") == [b"1"]:
        return Problem.of("too-early", retry_after=1.0)
    if rules.repeatability and (problem := _first_sent(rules, incoming)) is not None:
        return problem
    if plan.authorize is not None and not await _allowed(plan, guard, request):
        return Problem.of("not-authorized")
    principal = "" if plan.principal is None else _principal(await _ask(guard, plan.principal, request))
    if not principal and not rules.anonymous:
        return Problem.of("not-authenticated")
    tenant = None if plan.tenant is None else _tenant(await _ask(guard, plan.tenant, request))
    return principal, tenant


def _fingerprint(rules: Rules, incoming: Incoming, body: Body) -> str:
    content_type = b", ".join(incoming.lines("content-type")).decode("latin-1")
    return fingerprint(incoming.method, incoming.path, incoming.query, content_type, body, rules.exclude)


def _route_name(route: str) -> str:
    """A route as part of the identity (ACP): readable when the core takes it, else hashed."""
    return core_key("http", route)


async def _late_key(
    plan: Plan, rules: Rules, incoming: Incoming, body: Body, request: Any, guard: Guard
) -> str | Problem | None:
    """The key from the body, or from the caller's own resolver."""
    text: Any = None
    if plan.key is not None:
        text = await _ask(guard, plan.key, request)
    elif media_type(b"".join(incoming.lines("content-type")).decode("latin-1")).endswith("json"):
        paths = [source.partition(":")[2] for source in rules.sources if source.startswith("body:")]
        try:
            value = (
                parse_json(body.whole if body.whole is not None else bytes(body.view())) if body.size else {}
            )
        except (ValueError, RecursionError):
            # There may be a key in it, and another reader might find it: never run it as if there were none.
            return Problem.of("key-malformed", reason="the body that should hold the key cannot be read")
        text = next((found for path in paths if (found := _field(value, path)) is not None), None)
    if text is None:
        return Problem.of("key-missing") if rules.required else None
    if not isinstance(text, str):
        return Problem.of("key-malformed", reason="the key must be text")
    return _read(rules, [text.encode("utf-8", "surrogatepass")])


def _field(value: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def _first_sent(rules: Rules, incoming: Incoming) -> Problem | None:
    lines = incoming.lines("repeatability-first-sent")
    try:
        sent = parsedate_to_datetime(lines[0].decode("latin-1")).timestamp()
    except (IndexError, ValueError, TypeError):
        return rules.problem(
            Problem.of("key-malformed", reason="Repeatability-First-Sent must be an HTTP date")
        )
    now = time.time()
    if sent + rules.retention + rules.grace < now or sent > now + rules.grace:
        return rules.problem(Problem.of("key-expired"))
    return None


# ----------------------------------------------------------------------------------------------------- resolvers


async def _ask(guard: Guard, resolver: Callable[[Any], Any], request: Any) -> Any:
    value = resolver(request)
    if hasattr(value, "__await__"):
        if guard.engine.runtime.colour == "sync":
            value.close()
            raise ConfigurationError(
                f"{getattr(resolver, '__qualname__', resolver)} is async, and this middleware is not: give a plain function"
            )
        value = await value
    return value


async def _allowed(plan: Plan, guard: Guard, request: Any) -> bool:
    try:
        answer = await _ask(guard, plan.authorize, request)  # type: ignore[arg-type]  # asked only when there is one
    except PermissionError:
        return False
    return bool(answer)


def _principal(value: Any) -> str:
    """An id as text. An object's own text may be its address, which is another one at every request."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise ConfigurationError(
            f"principal= returned a {type(value).__name__}: return the sender's id, a str, int or UUID"
        )
    return str(value)


def _tenant(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return check_tenant(value)
    except InvalidKey as error:
        raise ConfigurationError(f"tenant= returned what is no tenant: {error}") from error
