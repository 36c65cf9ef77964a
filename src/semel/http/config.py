"""The options of a middleware or decorator, checked when it is made: what is missing or contradicts is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, Literal

import msgspec

from semel.errors import ConfigurationError
from semel.face import Face
from semel.http.guard import Guard
from semel.http.keys import MAX_KEY
from semel.http.rules import PROFILES, Rules, more_headers
from semel.http.spill import Spill
from semel.options import MIN_LEASE, seconds

__all__ = ["Plan", "Route", "configure"]

_SECONDS: Final = frozenset({"lease", "wait", "max_wait", "retention", "tombstone", "grace", "store_timeout"})
_COUNTS: Final = frozenset({"max_waiters", "max_response", "max_body", "min_length"})
_FLAGS: Final = frozenset({"required", "strict", "uuid7", "fail_open", "secret", "anonymous"})
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "scope": ("principal", "route"),
    "effects": ("db", "steps", "opaque"),
    "stored": ("final", "success", "everything", "success-and-4xx"),
    "expired": ("reject", "new"),
}
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SOURCES: Final = ("header", "query", "body", "path")
_RULES: Final = _SECONDS | _COUNTS | _FLAGS | _WORDS.keys() | {
    "methods", "header", "sources", "exclude", "quota", "replay_headers", "problem_base", "profile", "markers", "spill",
}  # fmt: skip
_PLAN: Final = frozenset(
    {"principal", "tenant", "authorize", "authenticated_outside", "key", "routes", "events"}
)
_NO_PARTS: Final[Mapping[str, str]] = {}
_PARTS: Final = re.compile(r"(\{[^\W\d]\w*\}|\*)")
_FOREIGN: Final = re.compile(r"[{}<>]|/:[^\W\d]")
Resolver = Callable[[Any], Any]


class Route(msgspec.Struct, frozen=True):
    """A pattern such as "POST /orders/{id}" or "/payments/*", and its guard; None: the route is left alone."""

    method: str | None
    pattern: re.Pattern[str]
    bare: re.Pattern[str]
    """The same without a slash at its end."""
    guard: Guard | None


class Plan(msgspec.Struct, frozen=True):
    """A configured middleware: which guard a request meets, and who is asked about it."""

    once: Face
    routes: tuple[Route, ...]
    fallback: Guard | None
    principal: Resolver | None
    tenant: Resolver | None
    authorize: Resolver | None
    key: Resolver | None
    only_principal: Resolver | None = None
    """`principal`, where nobody else is asked about a sender."""
    is_slashed: bool = False
    """Some route ends with a slash."""

    def guard_for(self, method: str, path: str) -> tuple[Guard, Mapping[str, str]] | None:
        """The guard of a request and the named parts of its path; None: it passes untouched."""
        for route in self.routes:
            if route.method is None or route.method == method:
                found = route.pattern.fullmatch(path)
                if found:
                    return _guarded(route, method, found)
        if self.routes and (self.is_slashed or path.endswith("/")):
            # Litestar runs /orders/ as /orders, and others do if they are told to: it must not go around its guard.
            bare = path.rstrip("/")
            for route in self.routes:
                if (route.method is None or route.method == method) and (found := route.bare.fullmatch(bare)):
                    return _guarded(route, method, found)
        guard = self.fallback
        return (guard, _NO_PARTS) if guard is not None and method in guard.rules.methods else None


def _guarded(route: Route, method: str, found: re.Match[str]) -> tuple[Guard, Mapping[str, str]] | None:
    guard = route.guard
    return (guard, found.groupdict()) if guard and method in guard.rules.methods else None


def configure(
    once: Any, colour: Literal["sync", "async"], given: Mapping[str, Any], *, guarded: bool
) -> Plan:
    """A plan from options. `guarded`: whoever calls runs after authentication and authorization by itself."""
    if not isinstance(once, Face):
        raise ConfigurationError(
            f"once= must be a Semel or AsyncSemel, not {once!r}: create it at import time and hand it in"
        )
    if once._colour != colour:  # noqa: SLF001 - our own
        right = "AsyncSemel" if colour == "async" else "Semel"
        raise ConfigurationError(
            f"once= is a {type(once).__name__}, and this needs a {right}: open the store with it"
        )
    _known(given)
    if given.get("events") is not None:
        raise ConfigurationError(
            "events= attaches keyed SSE routes to an event bus, which this version does not have"
        )
    if guarded and given.get("routes") is not None:
        raise ConfigurationError("routes= is for middlewares: a decorated route is one already")
    if given.get("routes") is not None and not given["routes"]:
        raise ConfigurationError(
            "routes={} guards nothing: name routes, or leave it out to guard all of them"
        )
    defaults = _rules(Rules(), {name: value for name, value in given.items() if name not in _PLAN})
    _check_identity(given, defaults, guarded=guarded)
    _check_secret(once, defaults)
    routes = given.get("routes")
    if routes is None:
        _check_path(defaults, "")
    asked = [name for name in ("principal", "tenant", "authorize") if given.get(name) is not None]
    return Plan(
        once=once,
        routes=tuple(_route(once, defaults, name, options) for name, options in (routes or {}).items()),
        fallback=Guard(once, defaults) if routes is None else None,
        principal=_callable("principal", given),
        tenant=_callable("tenant", given),
        authorize=_callable("authorize", given),
        key=_callable("key", given),
        only_principal=_callable("principal", given) if asked == ["principal"] else None,
        is_slashed=any(name.strip().endswith("/") for name in routes or ()),
    )


def _known(given: Mapping[str, Any]) -> None:
    names = _RULES | _PLAN
    for name in given:
        if name not in names:
            close = get_close_matches(name, names, 1)
            guess = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigurationError(
                f"unknown option {name!r}: {guess}The options are {', '.join(sorted(names))}"
            )


def _callable(name: str, given: Mapping[str, Any]) -> Resolver | None:
    value = given.get(name)
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name}= must be a function of the request, not {value!r}")
    return value


def _check_identity(given: Mapping[str, Any], rules: Rules, *, guarded: bool) -> None:
    if given.get("principal") is None and not rules.anonymous:
        raise ConfigurationError(
            "no principal= is given: without it one user could be sent another user's response. Pass principal=, a function "
            "that returns the verified user's id for a request, or say anonymous=True for routes that have no users"
        )
    if given.get("principal") is not None and rules.anonymous:
        raise ConfigurationError("principal= and anonymous=True contradict each other: give one of them")
    if not isinstance(given.get("authenticated_outside", False), bool):
        raise ConfigurationError(
            f"authenticated_outside= must be True or False, not {given['authenticated_outside']!r}"
        )
    if not guarded and given.get("authorize") is None and not given.get("authenticated_outside"):
        raise ConfigurationError(
            "this middleware answers replays before your application sees the request, so somebody must have "
            "authenticated and authorized it: pass authorize=, a function that returns True for a request that may "
            "proceed, or say authenticated_outside=True when a layer in front of it does that"
        )


def _check_secret(once: Face, rules: Rules) -> None:
    if rules.secret and rules.anonymous:
        raise ConfigurationError(
            "secret=True and anonymous=True contradict each other: nobody could be kept out"
        )
    if rules.secret and once._ring is None:  # noqa: SLF001 - our own
        raise ConfigurationError(
            "secret=True stores responses encrypted only, and this store does not encrypt: give encrypt={key id: key} to "
            f"{type(once).__name__}(...)"
        )


# ------------------------------------------------------------------------------------------------------- rules


def _rules(start: Rules, given: Mapping[str, Any]) -> Rules:
    changes: dict[str, Any] = {}
    if "profile" in given:
        profile = given["profile"]
        if profile not in PROFILES:
            raise ConfigurationError(f"profile={profile!r} is not known: choose one of {', '.join(PROFILES)}")
        changes.update(PROFILES[profile])
    for name, value in given.items():
        if name in ("profile", "header"):
            continue
        changes[name] = _checked(name, value)
    if "header" in given:
        names = [given["header"]] if isinstance(given["header"], str) else list(given["header"])
        changes["sources"] = _sources([f"header:{name}" for name in names])
    if changes.get("expired") == "new" and "tombstone" not in given:
        changes["tombstone"] = 0.0  # what is known as used could not be new
    rules = msgspec.structs.replace(start, **changes)
    if rules.expired == "new" and rules.tombstone:
        raise ConfigurationError(
            f"expired='new' and tombstone={rules.tombstone:g} contradict each other: for as long as a key is known as used it "
            "is not new. Leave tombstone= out, or say expired='reject'"
        )
    if rules.anonymous and rules.min_length < 16:
        rules = msgspec.structs.replace(rules, min_length=16)  # H08: nobody else's key may be guessed
    return rules


def _checked(name: str, value: Any) -> Any:  # noqa: C901 - one question per kind of option
    if name in _SECONDS:
        if value is None and name == "retention":
            return float("inf")
        least = {"lease": MIN_LEASE, "store_timeout": 0.01}.get(name, 0.0)
        return seconds(name, value, least=least)
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"{name}= must be True or False, not {value!r}; per route: routes={{...}}"
            )
        return value
    if name in _COUNTS:
        most = MAX_KEY if name == "min_length" else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            bound = f"from 0 to {MAX_KEY}" if name == "min_length" else "from 0 on"
            raise ConfigurationError(f"{name}= must be a whole number {bound}, not {value!r}")
        return value
    if name in _WORDS:
        if not (value in _WORDS[name] or (name == "stored" and callable(value))):
            raise ConfigurationError(f"{name}= must be one of {', '.join(_WORDS[name])}, not {value!r}")
        return value
    if name == "methods":
        methods = frozenset(_method(method) for method in _texts(name, value))
        if not methods:
            raise ConfigurationError(
                "methods= is empty, so no request could carry a key: name them, such as ['POST', 'PATCH'], or say "
                "routes={…: False} for routes that are to be left alone"
            )
        return methods
    if name == "sources":
        return _sources(_texts(name, value))
    if name == "replay_headers":
        try:
            return more_headers(_texts(name, value))
        except ValueError as error:
            raise ConfigurationError(
                f"replay_headers= may not hold {error}: it belongs to one exchange"
            ) from None
    if name == "spill":
        return Spill.of(value)
    if name == "exclude":
        return tuple(_texts(name, value))
    if name == "markers":
        return tuple(_token("markers", text).lower() for text in _texts(name, value))
    if name == "problem_base" and (
        not isinstance(value, str) or not value.isprintable() or not value.isascii()
    ):
        raise ConfigurationError(f"problem_base= is the beginning of a URI, not {value!r}")
    if name == "quota" and value is not None and not (isinstance(value, int | float) and value > 0):
        raise ConfigurationError(f"quota= is a number of new keys per second, above 0, not {value!r}")
    return value


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigurationError(f"{name}= must be a list of names, not {value!r}")
    return texts


def _token(option: str, text: str) -> str:
    if not _TOKEN.fullmatch(text):
        raise ConfigurationError(f"{option}= holds {text!r}, which is no name of a header")
    return text


def _method(text: str) -> str:
    method = text.upper()
    if not method.isalpha() or not method.isascii():
        raise ConfigurationError(
            f"methods= holds {text!r}, which is no method: write a list, such as ['POST', 'PATCH']"
        )
    if method in _SAFE:
        raise ConfigurationError(
            f"methods= holds {method}, which has no effect that could happen twice: leave it out"
        )
    return method


def _sources(sources: Sequence[str]) -> tuple[str, ...]:
    if not sources:
        raise ConfigurationError(
            "sources= (or header=) is empty, so no key would be found: name a place, such as header:Idempotency-Key, or leave it out and "
            "give key=, a function of the request"
        )
    for source in sources:
        kind, colon, name = source.partition(":")
        if kind not in _SOURCES or not colon or not name:
            raise ConfigurationError(
                f"{source!r} is no place for a key: write header:NAME, query:NAME, body:FIELD.PATH or path:NAME"
            )
        if kind == "header":
            _token("header", name)
    return tuple(source.lower() if source.startswith("header:") else source for source in sources)


# ------------------------------------------------------------------------------------------------------ routes


def _route(once: Face, defaults: Rules, name: str, options: Any) -> Route:
    method, space, path = name.strip().partition(" ")
    if not space:
        method, path = "", method
    if not path.startswith(("/", "*")):
        raise ConfigurationError(
            f'the route {name!r} is none: write "/orders", "POST /orders/{{id}}" or "/api/*"'
        )
    guard = None
    if options is not False:
        given = {} if options is True or options is None else dict(options)
        if wrong := given.keys() - _RULES:
            raise ConfigurationError(f"the route {name!r} has the unknown option {min(wrong)!r}")
        if method:
            given.setdefault("methods", (_method(method),))
        rules = _rules(defaults, given)
        if method and method.upper() not in rules.methods:
            raise ConfigurationError(
                f"the route {name!r} is for {method.upper()}, and its methods= do not hold it: leave one of them out"
            )
        _check_secret(once, rules)
        _check_path(rules, path)
        guard = Guard(once, rules)
    return Route(method.upper() or None, _pattern(path), _pattern(path.rstrip("/")), guard)


def _check_path(rules: Rules, path: str) -> None:
    for source in rules.sources:
        kind, _, name = source.partition(":")
        if kind == "path" and f"{{{name}}}" not in path:
            raise ConfigurationError(
                f"{source!r} needs a route that names it, such as routes={{'/orders/{{{name}}}': …}}"
            )


def _pattern(path: str) -> re.Pattern[str]:
    parts = _PARTS.split(path)
    names = [part for part in parts[1::2] if part != "*"]
    if len(names) != len(set(names)) or any(_FOREIGN.search(part) for part in parts[::2]):
        # Taken as it is written it would match nothing, and its requests would pass without a guard.
        raise ConfigurationError(
            f"the route {path!r} is none: a part of a path is written {{name}}, each name once, and * stands for anything; "
            "{id:int}, {rest:path}, <id> and :id are written otherwise here"
        )
    text = "".join(
        ".*" if part == "*" else f"(?P<{part[1:-1]}>[^/]+)" if part in names else re.escape(part)
        for part in parts
    )
    return re.compile(text, re.DOTALL)  # also a path with a line break in it
