"""From a request to its key, its sender and its fingerprint: everything that happens before the store is asked (H13)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl

import msgspec

from semel.http.body import Body
from semel.http.config import Plan
from semel.http.digests import outline, told_sha256
from semel.http.fingerprints import digest_of, media_type, parse_json
from semel.http.guard import Admitted, Guard, Keyed
from semel.http.keys import BARE, core_key, minted_at, read_key
from semel.http.problem import Problem
from semel.http.reply import Reply
from semel.http.resolving import plain, principal_of, tenant_of
from semel.http.rules import Rules, is_allowed, is_too_old, prefer_wait
from semel.http.snapshot import Snapshot
from semel.keys import mask

__all__ = ["First", "Incoming", "Ready", "enter", "get_ready", "refused"]

_RARE: Final = frozenset(
    {b"early-data", b"prefer", b"content-digest"}
)  # most requests have none: one look for all
_UNASKED: Final = object()


class Incoming(Protocol):
    """A request of any protocol, before its body is read."""

    method: str
    path: str
    """All of it, as the client sent it: part of the fingerprint."""
    routed: str
    """Without the place where the application is mounted: what `routes=` are compared with."""
    query: bytes

    def lines(self, name: bytes) -> list[bytes]:
        """The values of a header, whose name is in lower case, a line each."""
        ...

    def has_any(self, names: frozenset[bytes]) -> bool:
        """Whether one of these headers is there."""
        ...

    def request(self) -> Any:
        """What resolvers get: the framework's own request object, if there is one."""
        ...

    async def read(self, limit: int) -> Body | Problem:
        """All of the body, so that the application can read it again."""
        ...


class Ready(msgspec.Struct, frozen=True, gc=False):
    """All that is needed to ask the store. Close the body when it is over."""

    guard: Guard
    keyed: Keyed
    body: Body


class First(msgspec.Struct, frozen=True, gc=False):
    """The key is ours: begin, run the application with this body, and close the body afterwards."""

    guard: Guard
    admitted: Admitted
    body: Body


async def enter(plan: Plan, incoming: Incoming) -> First | Reply | Body | None:
    """What is to be done with a request.

    None: it has no key and needs none, let it pass untouched. A Body: let it pass too, but its body was read (its key
    might have been in it, or the store is down and the route said fail_open). A Reply: send it. First: run it once.
    """
    ready = await get_ready(plan, incoming)
    if not isinstance(ready, Ready):
        return ready
    try:
        admitted = await ready.guard.admit(ready.keyed)
    except BaseException:
        ready.body.close()
        raise
    if isinstance(admitted, Admitted):
        return First(ready.guard, admitted, ready.body)
    return refused(ready, admitted)


def refused(ready: Ready, instead: Problem | Snapshot | None) -> Reply | Body:
    """What is to be done with a request that the store has not admitted."""
    if instead is None:  # fail_open
        return ready.body
    ready.body.close()
    return _at_once(ready.guard, instead)


async def get_ready(plan: Plan, incoming: Incoming) -> Ready | Reply | Body | None:
    """The first half of `enter`, up to the store. Whoever waits for that need not wait inside of this coroutine."""
    found = plan.guard_for(incoming.method, incoming.routed) if plan.once.enabled else None
    if found is None:
        return None
    guard, parts = found
    is_late = plan.key is not None
    key = None if is_late else _early_key(guard, incoming, parts)
    if key is None and not is_late:
        is_late = any(kind == "body" for kind, _, _ in guard.sources)
        if not is_late:
            return guard.replies.problem(Problem.of("key-missing")) if guard.rules.required else None
    if isinstance(key, Problem):
        return guard.replies.problem(key)
    request, told = incoming.request(), _UNASKED
    if (
        key is not None
        and plan.only_principal is not None
        and not guard.rules.repeatability
        and not incoming.has_any(_RARE)
    ):  # nearly every request: its key, its sender, its body
        try:
            told = plan.only_principal(request)
        except PermissionError:
            return guard.replies.problem(Problem.of("not-authorized"))
        if type(told) is str and told:
            body = await incoming.read(guard.rules.max_body)
            if type(body) is Body:
                return Ready(guard, _keyed(guard, key, told, incoming, parts, body), body)
            return _at_once(guard, body)
    known = await _known_at_length(plan, guard, key, incoming, parts, request, told)
    return Ready(guard, *known) if isinstance(known, tuple) else _at_once(guard, known)


def _at_once(guard: Guard, known: Problem | Snapshot | Body) -> Reply | Body:
    if isinstance(known, Snapshot):
        return guard.replies.replay(known)
    return guard.replies.problem(known) if isinstance(known, Problem) else known


def _early_key(guard: Guard, incoming: Incoming, parts: Mapping[str, str]) -> str | Problem | None:
    """The key, where it can be had without touching the body."""
    for kind, name, line in guard.sources:
        found: list[bytes] = []
        if kind == "header":
            found = incoming.lines(line)
        elif kind == "query" and incoming.query:
            pairs = parse_qsl(incoming.query.decode("latin-1"), keep_blank_values=True)
            found = [value.encode("utf-8", "surrogateescape") for known, value in pairs if known == name]
        elif kind == "path" and name in parts:
            found = [parts[name].encode("utf-8", "surrogateescape")]
        if found:
            if guard.takes_bare and len(found) == 1 and BARE.fullmatch(found[0]):
                return found[0].decode()  # nearly every key: all that `_read` asks
            return _read(guard.rules, found)
    return None


def _read(rules: Rules, lines: list[bytes]) -> str | Problem:
    key = read_key(lines, strict=rules.strict, least=rules.min_length)
    if isinstance(key, Problem):
        return key
    if rules.uuid7 and minted_at(key) is None:
        return Problem.of("key-malformed", reason="the key must be a UUIDv7")
    return key


def _keyed(
    guard: Guard, key: str, principal: str, incoming: Incoming, parts: Mapping[str, str], body: Body
) -> Keyed:
    rules = guard.rules
    route = f"{incoming.method} {_shown(guard, incoming.path, parts) if parts else incoming.path}"
    operation = guard.operation if rules.scope == "principal" else core_key(guard.operation, route)
    printed = _fingerprint(rules, incoming, body)
    is_old = len(key) == 36 and is_too_old(rules, key, time.time())
    return Keyed(key, principal, None, printed, rules.wait, route, operation, "", is_old)


async def _known_at_length(
    plan: Plan,
    guard: Guard,
    key: str | None,
    incoming: Incoming,
    parts: Mapping[str, str],
    request: Any,
    told: Any,
) -> tuple[Keyed, Body] | Problem | Body | Snapshot:
    """The request as the store will know it, whatever it may be. A lone Body: it has no key after all, and needs none.

    A Snapshot: its answer is known before its body has come. `told`: what `principal=` has said, if it has been asked.
    """
    rules = guard.rules
    body: Body | Problem | None = None
    if key is None:  # it is in the body, or only the caller's own resolver knows
        body = await incoming.read(rules.max_body)
        late = (
            body
            if isinstance(body, Problem)
            else await _late_key(plan, rules, incoming, body, request, guard)
        )
        if isinstance(late, Problem):
            return _refused(body, late)
        if late is None:
            return body
        key = late
    if incoming.lines(b"early-data"):  # whatever it says: RFC 8470 knows no other value than 1
        return _refused(body, Problem.of("too-early", retry_after=1.0))
    sender = await _sender(plan, guard, incoming, request, told)
    if isinstance(sender, Problem):
        return _refused(body, sender)
    principal, tenant = sender
    route = f"{incoming.method} {_shown(guard, incoming.path, parts) if parts else incoming.path}"
    digest = told_sha256(incoming.lines(b"content-digest"))
    wait = prefer_wait(rules, incoming.lines(b"prefer"))
    operation = guard.operation if rules.scope == "principal" else core_key(guard.operation, route)
    outlined = "" if digest is None else _outline(incoming, digest)
    if digest is not None and body is None and incoming.lines(b"expect"):
        early = await guard.early(Keyed(key, principal, tenant, b"", wait, route, operation, outlined))
        if early is not None:
            return early
    body = await incoming.read(rules.max_body) if body is None else body
    if isinstance(body, Problem):
        return body
    if digest is not None and not body.parsed and body.digest != digest:
        return _refused(body, Problem.of("digest-mismatch"))
    printed = _fingerprint(rules, incoming, body)
    is_old = is_too_old(rules, key, time.time())
    return Keyed(key, principal, tenant, printed, wait, route, operation, outlined, is_old), body


def _shown(guard: Guard, path: str, parts: Mapping[str, str]) -> str:
    """A path for people: a key that stands in it is a secret, and is masked as every other one."""
    keys = [parts[name] for kind, name, _ in guard.sources if kind == "path" and name in parts]
    return "/".join(mask(part) if part in keys else part for part in path.split("/")) if keys else path


def _outline(incoming: Incoming, digest: bytes) -> str:
    content_type = b", ".join(incoming.lines(b"content-type")).decode("latin-1")
    return outline(incoming.method, incoming.path, incoming.query, content_type, digest)


def _refused(body: Body | Problem | None, problem: Problem) -> Problem:
    if isinstance(body, Body):
        body.close()
    return problem


async def _sender(
    plan: Plan, guard: Guard, incoming: Incoming, request: Any, told: Any
) -> tuple[str, str | None] | Problem:
    """Who sends a keyed request, and whether it may be looked at. Before the body is read, where that is possible.

    `told`: what `principal=` has said, if it has been asked.
    """
    rules = guard.rules
    if rules.repeatability and (problem := _first_sent(rules, incoming)) is not None:
        return problem
    try:
        if plan.authorize is not None and not is_allowed(await _ask(guard, plan.authorize, request)):
            return Problem.of("not-authorized")
        principal = ""
        if plan.principal is not None:
            if told is _UNASKED:
                told = plan.principal(request)
            principal = (
                told if type(told) is str else principal_of(await _awaited(guard, plan.principal, told))
            )
        if not principal and not rules.anonymous:
            return Problem.of("not-authenticated")
        tenant = None if plan.tenant is None else tenant_of(await _ask(guard, plan.tenant, request))
        if tenant == "":
            return Problem.of("not-authenticated")
    except PermissionError:
        return Problem.of("not-authorized")
    return principal, tenant


def _fingerprint(rules: Rules, incoming: Incoming, body: Body) -> bytes:
    kind = incoming.lines(b"content-type")
    content_type = bytes(kind[0]) if len(kind) == 1 else b", ".join(kind)
    return digest_of(incoming.method, incoming.path, incoming.query, content_type, body, rules.exclude)


async def _late_key(
    plan: Plan, rules: Rules, incoming: Incoming, body: Body, request: Any, guard: Guard
) -> str | Problem | None:
    """The key from the body, or from the caller's own resolver."""
    text: Any = None
    if plan.key is not None:
        try:
            text = await _ask(guard, plan.key, request)
        except PermissionError:
            return Problem.of("not-authorized")
    elif media_type(b"".join(incoming.lines(b"content-type")).decode("latin-1")).endswith("json"):
        paths = [name for kind, name, _ in guard.sources if kind == "body"]
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
    lines = incoming.lines(b"repeatability-first-sent")
    try:
        sent = parsedate_to_datetime(lines[0].decode("latin-1")).timestamp()
    except (IndexError, ValueError, TypeError, OverflowError):
        return Problem.of("key-malformed", reason="Repeatability-First-Sent must be an HTTP date")
    now = time.time()
    if sent + rules.retention + rules.grace < now or sent > now + rules.grace:
        return Problem.of("key-expired")
    return None


# ----------------------------------------------------------------------------------------------------- resolvers


async def _ask(guard: Guard, resolver: Callable[[Any], Any], request: Any) -> Any:
    return await _awaited(guard, resolver, resolver(request))


async def _awaited(guard: Guard, resolver: Callable[[Any], Any], value: Any) -> Any:
    if hasattr(value, "__await__") and guard.engine.runtime.colour == "async":
        return await value
    return plain(resolver, value, where="this middleware is not")
