"""What an HTTP request may do with a key: every decision, as data and pure functions. Adapters only move bytes.

`Rules` holds one route's options; profiles are named sets of them. Ids such as H14 name rows of the specification
(docs/reference/http.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict

import msgspec

from semel.errors import ConfigurationError
from semel.http.keys import core_key, minted_at, read_key
from semel.http.problem import DEFAULT_BASE, Problem
from semel.http.snapshot import Snapshot

__all__ = [
    "CORS_ALLOW_HEADERS",
    "CORS_EXPOSE_HEADERS",
    "MARKER",
    "PROFILES",
    "RETENTION",
    "Cors",
    "Rules",
    "Word",
    "control_of",
    "core_key",
    "cors",
    "is_allowed",
    "is_too_old",
    "minted_at",
    "more_headers",
    "prefer_wait",
    "read_key",
    "recorded",
    "storable",
    "titled",
    "word_for",
]

Word = Literal["store", "release", "replay", "hold"]
Effects = Literal["db", "steps", "opaque"]

MARKER: Final = "idempotency-replayed"
RETENTION: Final = "idempotency-retention"
CONTROL: Final = (
    b"idempotency-control"  # of a handler's response: no-store, store, retention=SECONDS; never sent on
)

CORS_ALLOW_HEADERS: Final = ("Idempotency-Key", "Prefer")
CORS_EXPOSE_HEADERS: Final = ("Idempotency-Replayed", "Idempotency-Retention", "Retry-After", "Location")

# H32. Everything else belongs to one exchange: cookies, challenges, dates, traces, limits, lengths (H28-H30).
REPLAYED_HEADERS: Final = frozenset(
    {
        b"content-type",
        b"content-language",
        b"content-disposition",
        b"content-encoding",
        b"content-location",
        b"content-range",
        b"location",
        b"etag",
        b"last-modified",
        b"link",
        b"vary",
    }
)
_NEVER: Final = frozenset(
    {
        b"set-cookie", b"www-authenticate", b"proxy-authenticate", b"authorization", b"date", b"age", b"server",
        b"server-timing", b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
        b"upgrade", b"content-length", CONTROL,
    }
)  # fmt: skip
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SENDABLE: Final = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
# Said by whoever stands in front, or true only for now. What a router says by itself is told elsewhere (`routers`).
_PASSING: Final = frozenset({401, 403, 408, 425, 429})


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a route. Times are seconds."""

    methods: frozenset[str] = frozenset({"POST", "PATCH"})
    sources: tuple[str, ...] = ("header:idempotency-key",)
    """Where the key comes from, in order: header:NAME, query:NAME, body:FIELD.PATH, path:NAME."""
    required: bool = False
    strict: bool = False
    min_length: int = 1
    uuid7: bool = False
    anonymous: bool = False
    scope: Literal["principal", "route"] = "principal"
    exclude: tuple[str, ...] = ()
    """Fields of a JSON body that do not tell requests apart."""
    effects: Effects = "db"
    stored: Literal["final", "success", "everything", "success-and-4xx"] | Callable[[int], bool] = "final"
    """Which responses are outcomes; a function of the status decides alone."""
    lease: float = 10.0
    wait: float = 5.0
    max_wait: float = 30.0
    max_waiters: int = 16
    retention: float = 86_400.0
    tombstone: float = 30 * 86_400.0
    grace: float = 60.0
    expired: Literal["reject", "new"] = "reject"
    max_response: int = 1 << 20
    spill: Any = None
    """Where longer responses are kept (`semel.http.spill.Spill`); None: they are not."""
    max_body: int = 32 << 20
    quota: float | None = None
    """New keys a second for each principal."""
    fail_open: bool = False
    store_timeout: float = 0.5
    """How long a store may think about a claim before the request is refused, or passed where `fail_open` says so."""
    secret: bool = False
    markers: tuple[str, ...] = (MARKER,)
    replay_headers: frozenset[bytes] = REPLAYED_HEADERS
    statuses: Mapping[str, int] = {}
    problem_base: str = DEFAULT_BASE
    repeatability: bool = False
    """OASIS Repeatable Requests: Repeatability-First-Sent is looked at, Repeatability-Result is sent."""

    def problem(self, problem: Problem) -> Problem:
        other = self.statuses.get(problem.kind.name)
        return problem if other is None else msgspec.structs.replace(problem, other_status=other)


PROFILES: Final[Mapping[str, Mapping[str, Any]]] = {
    "ietf": {},
    "success-only": {"stored": "success"},
    "stripe-v1": {
        "stored": "everything",
        "expired": "new",
        "tombstone": 0.0,
        "markers": ("idempotent-replayed",),
        "statuses": {"key-reused": 400},
        "wait": 0.0,
    },
    "acp": {
        "required": True,
        "scope": "route",
        "expired": "new",
        "tombstone": 0.0,
        "stored": "success-and-4xx",
        "markers": ("idempotent-replayed", MARKER),
    },
    "adcp": {
        "required": True,
        "stored": "success",
        "quota": 60.0,
        "wait": 4.5,
        "min_length": 16,
        "sources": ("header:idempotency-key", "body:idempotency_key"),
    },
    "iceberg": {"uuid7": True, "stored": "success-and-4xx"},
    "oasis": {
        "sources": ("header:repeatability-request-id",),
        "statuses": {"key-reused": 400, "key-expired": 412},
        "stored": "success-and-4xx",
        "wait": 0.0,
        "markers": (),
        "repeatability": True,
    },
}


# ------------------------------------------------------------------------------------------ what becomes of a response


def word_for(rules: Rules, status: int, control: str = "") -> Word:
    """What a handler's response means for its key (H14, H15).

    store: it is the outcome. release: the key is free again. replay: a failure that is given again until somebody has
    looked into it. hold: unknown until then.
    """
    if control == "no-store":
        return "release"
    is_unclear = status >= 500 and rules.effects == "opaque"
    if callable(rules.stored):
        if control == "store" or rules.stored(status):
            return "store"
        return "hold" if is_unclear else "release"
    if control == "store" or rules.stored == "everything" or 200 <= status < 300:
        return "store"
    if (
        is_unclear
    ):  # never freed: where a failure is not to be given again, nothing is until somebody has looked
        return "replay" if rules.stored in ("final", "success") else "hold"
    if status >= 500 or rules.stored == "success":
        return "release"
    return "release" if status in _PASSING or (status == 419 and rules.uuid7) else "store"


def control_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, float | None]:
    """A handler's own word on its response: no-store or store, and a retention of its own."""
    word, retention = "", None
    for name, value in headers:
        if name.lower() != CONTROL:
            continue
        for part in value.decode("latin-1").lower().split(","):
            text = part.strip()
            if text in ("no-store", "store"):
                word = text
            elif text.startswith("retention="):
                digits = text.removeprefix("retention=")
                retention = float(digits) if digits.isdecimal() else retention
    return word, retention


def storable(rules: Rules, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that a replay gives again; several lines of one name stay several lines."""
    kept = rules.replay_headers
    return [(name.lower(), value) for name, value in headers if name.lower() in kept]


def more_headers(names: Iterable[str]) -> frozenset[bytes]:
    """The allow-list, longer. Raises ValueError for a header that must not be replayed."""
    added = frozenset(name.lower().encode("latin-1") for name in names)
    if wrong := added & _NEVER:
        raise ValueError(min(wrong).decode())
    return REPLAYED_HEADERS | added


def recorded(status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """A response in stored form: what every repetition gets once a person has decided (H16).

    `once.resolve(core_key(key, principal), operation="http", value=recorded(201, b"…", {"content-type": "…"}), actor=…)`;
    the operation is that of `Semel(operation=…)` where it has one.
    Raises ConfigurationError for what could not be sent: a key is resolved once, so it is told before that.
    """
    code: Any = status
    text: Any = body
    lines: Any = headers or {}
    if not isinstance(code, int) or not 200 <= code <= 599:
        raise ConfigurationError(f"status must be that of a final response, 200 to 599, not {code!r}")
    if not isinstance(text, bytes):
        raise ConfigurationError(f"body must be bytes, not a {type(text).__name__}: json.dumps(…).encode()")
    if not isinstance(lines, Mapping):
        raise ConfigurationError(f"headers must be a mapping of names to text, not a {type(lines).__name__}")
    return Snapshot(int(code), [_line(name, value) for name, value in lines.items()], text).encode()


def _line(name: Any, value: Any) -> tuple[bytes, bytes]:
    if not isinstance(name, str) or not _TOKEN.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no header's name")
    if not isinstance(value, str) or not _SENDABLE.fullmatch(value):
        raise ConfigurationError(f"the value of {name!r} cannot be sent: one line of Latin-1 text is needed")
    raw = name.lower().encode()
    if raw in _NEVER:
        raise ConfigurationError(f"{name!r} belongs to one exchange and is never replayed: leave it out")
    return raw, value.encode("latin-1")


# ------------------------------------------------------------------------------------------------ what a request asks

_PREFER_WAIT: Final = re.compile(r'(?:^|[,;])\s*wait\s*=\s*"?(\d{1,6})"?\s*(?=$|[,;])', re.IGNORECASE)


class Cors(TypedDict):
    """What `cors` gives."""

    allow_headers: list[str]
    expose_headers: list[str]


def cors(*, profile: str = "ietf", header: str | Sequence[str] = ()) -> Cors:
    """`allow_headers` and `expose_headers` for a CORS middleware, for routes with these options (H43).

    `app.add_middleware(CORSMiddleware, allow_origins=[…], allow_methods=[…], **cors())`, outside of the idempotency
    middleware: its own answers must carry the headers of CORS too, or a page cannot read them.
    """
    if profile not in PROFILES:
        raise ConfigurationError(f"profile={profile!r} is not known: choose one of {', '.join(PROFILES)}")
    rules = Rules(**PROFILES[profile])
    named = [header] if isinstance(header, str) else list(header)
    sent = named or [
        name for kind, _, name in (source.partition(":") for source in rules.sources) if kind == "header"
    ]
    result = ["repeatability-first-sent"] if rules.repeatability else []
    told = ["repeatability-result"] if rules.repeatability else []
    shown = [*rules.markers, *told, RETENTION, "retry-after", "location"]
    return {
        "allow_headers": [titled(name) for name in (*sent, *result, "prefer")],
        "expose_headers": [titled(name) for name in shown],
    }


def titled(name: str) -> str:
    return "-".join(part.capitalize() for part in name.split("-"))


def prefer_wait(rules: Rules, lines: Sequence[bytes]) -> float:
    """How long this caller waits for another one: `Prefer: wait=N` within the cap, else the route's own (H10)."""
    for line in lines:
        found = _PREFER_WAIT.search(line.decode("latin-1"))
        if found:
            return min(float(found[1]), rules.max_wait)
    return rules.wait


def is_too_old(rules: Rules, key: str, now: float) -> bool:
    """A UUIDv7 that was minted longer ago than anything is kept: its first use, if any, is forgotten (H35)."""
    if len(key) != 36 or rules.expired != "reject" or rules.retention == float("inf"):
        return False
    made = minted_at(key)
    return made is not None and made + rules.retention + rules.grace < now


def is_allowed(answer: Any) -> bool:
    """What `authorize=` said. Only True allows; whatever else counts as true may be a refusal: a response, a coroutine, a tuple."""
    if answer and answer is not True:
        raise ConfigurationError(
            f"authorize= returned a {type(answer).__name__}: return True or False, or raise PermissionError"
        )
    return answer is True
