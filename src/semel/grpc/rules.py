"""What a gRPC call may do with a key: every decision, as data and pure functions. Interceptors only move messages.

Ids such as G09 name rows of the specification (docs/reference/grpc.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from math import floor, inf
from typing import Final, Literal, get_args

import grpc
import msgspec

from semel.errors import ConfigurationError
from semel.options import Duration

__all__ = [
    "ATTEMPTS",
    "CUT_WITHIN",
    "DEFAULT_FIELDS",
    "DEFAULT_NAME",
    "DETAILS",
    "MARKER",
    "PUSHBACK",
    "REPLAYED",
    "Effects",
    "Method",
    "OnStatus",
    "Rules",
    "Word",
    "checked",
    "checked_fields",
    "checked_names",
    "more_metadata",
    "patience",
    "storable",
    "word_for",
    "words_for",
]

Effects = Literal["db", "steps", "opaque"]
Word = Literal["store", "release", "hold"]
OnStatus = Callable[[grpc.StatusCode], Word | None]

DEFAULT_NAME: Final = "idempotency-key"
DEFAULT_FIELDS: Final = ("request_id", "idempotency_key")
MARKER: Final = "idempotency-replayed"
PUSHBACK: Final = "grpc-retry-pushback-ms"
ATTEMPTS: Final = "grpc-previous-rpc-attempts"
DETAILS: Final = "grpc-status-details-bin"
# gRPC ends the stream of a client who has left just as a whole one, and says a moment later that he has: in 400 tries 16 ms at most.
CUT_WITHIN: Final = 0.05  # seconds

# Of a handler's metadata; everything else belongs to one exchange (the same idea as HTTP's H28-H32).
REPLAYED: Final = frozenset({"content-language", "etag", "last-modified", "link", "location"})
_NEVER: Final = frozenset({"set-cookie", "www-authenticate", "authorization", "date", "server", MARKER})

_Code = grpc.StatusCode
# Said by a handler that knows what it says: the call's outcome (G09).
_FINAL: Final = frozenset(
    {
        _Code.OK,
        _Code.INVALID_ARGUMENT,
        _Code.NOT_FOUND,
        _Code.ALREADY_EXISTS,
        _Code.FAILED_PRECONDITION,
        _Code.OUT_OF_RANGE,
    }
)
# Refusals that are true only for now, or for this caller's present rights (G10): nothing happened.
_PASSING: Final = frozenset(
    {
        _Code.RESOURCE_EXHAUSTED,
        _Code.UNAUTHENTICATED,
        _Code.PERMISSION_DENIED,
        _Code.ABORTED,
        _Code.UNIMPLEMENTED,
    }
)


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """What is special about one method. None: as the interceptor says."""

    required: bool | None = None
    effects: Effects | None = None
    stream: bool = False
    """Streaming is opted in: messages are recorded up to `max_response` and sent when the handler has ended."""
    wait: Duration | None = None
    lease: Duration | None = None
    retention: Duration | None = None
    tombstone: Duration | None = None
    max_response: int | None = None
    max_request: int | None = None
    request_id: tuple[str, ...] | None = None
    on_status: OnStatus | None = None


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one method, complete. Times are seconds, sizes bytes."""

    names: tuple[str, ...] = (DEFAULT_NAME,)
    request_id: tuple[str, ...] = DEFAULT_FIELDS
    """Fields of the request that may hold the key: text (AIP-155), or a message {key, first_sent} (AEP-155)."""
    validate_only: str | None = "validate_only"
    required: bool = False
    strict: bool = False
    anonymous: bool = False
    min_length: int = 1
    effects: Effects = "db"
    stream: bool = False
    wait: float = 5.0
    max_waiters: int = 16
    lease: float = 10.0
    retention: float = 86_400.0
    tombstone: float = 30 * 86_400.0
    grace: float = 60.0
    max_response: int = 1 << 20
    max_request: int = 32 << 20
    replayed: frozenset[str] = REPLAYED
    on_status: OnStatus | None = None
    operation: str = "http"
    """One name for both carriers: a key used over HTTP is known here, and the other way round (G18). The face's own wins."""

    def but(self, method: Method) -> Rules:
        """These rules with what a method says."""
        said = {
            name: value.total_seconds() if isinstance(value, timedelta) else value
            for name, value in msgspec.structs.asdict(method).items()
            if value is not None
        }
        return msgspec.structs.replace(self, **said)


def word_for(rules: Rules, code: grpc.StatusCode) -> Word:
    """What a handler's status means for its key: the outcome, nothing happened, or nobody knows (G09, G10).

    Failures that leave open whether something happened follow `effects`: db and steps are run again (steps go on where
    they stopped), opaque ones are held.
    """
    if rules.on_status is not None and (word := rules.on_status(code)) is not None:
        if word not in get_args(Word):
            raise ConfigurationError(
                f'on_status answered {word!r} for {code.name}; it must answer "store", "release", "hold" or None'
            )
        return word
    if code in _FINAL:
        return "store"
    if code in _PASSING or rules.effects != "opaque":
        return "release"
    return "hold"


def words_for(rules: Rules) -> Mapping[grpc.StatusCode, Word]:
    """The word for every code, so that `on_status` is asked at start-up and cannot fail after an effect."""
    return {code: word_for(rules, code) for code in grpc.StatusCode}


def patience(rules: Rules, remaining: float | None) -> float:
    """How long a caller waits for another one: less than it has left, so that it is told before it gives up (G06).

    Cut to tenths (hundredths of a short rest): the core keeps checked options by their value.
    """
    if remaining is None or remaining * 0.9 >= rules.wait:
        return rules.wait
    left = max(0.0, remaining * 0.9)
    return floor(left * 10) / 10 if left >= 1 else floor(left * 100) / 100


def storable(
    rules: Rules, metadata: Iterable[tuple[str, str | bytes]]
) -> tuple[tuple[str, str | bytes], ...]:
    """What a replay gives again of a handler's metadata; several entries of one name stay several."""
    return tuple((name, value) for name, value in metadata if name in rules.replayed or name == DETAILS)


def checked_names(option: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """Metadata names as gRPC takes them: lower case, and not its own."""
    names = (given,) if isinstance(given, str) else tuple(given)
    if not names:
        raise ConfigurationError(f"{option} is empty: name the metadata that carries the key")
    for name in names:
        legal = bool(name) and all(c in _LEGAL for c in str(name))
        if not legal or name.startswith("grpc-"):
            raise ConfigurationError(
                f"{option} has {name!r}: metadata names are lower-case letters, digits, '-', '_' and '.', "
                "and those that begin with grpc- belong to gRPC"
            )
    return names


def checked_fields(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names of the fields that may hold a key; None: none."""
    fields = (given,) if isinstance(given, str) else tuple(given or ())
    _check_fields(fields)
    return fields


def _check_fields(fields: object) -> None:
    right = type(fields) is tuple and all(isinstance(field, str) for field in fields)
    _check("request_id", fields, right, "a tuple of names of fields")


_LEGAL: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")


def more_metadata(given: Iterable[str]) -> frozenset[str]:
    """The allow-list of replayed metadata, longer."""
    names = tuple(given)
    if not names:
        return REPLAYED
    added = frozenset(checked_names("replay_metadata", names))
    if wrong := added & _NEVER:
        raise ConfigurationError(
            f"replay_metadata has {min(wrong)!r}, which belongs to one exchange: it is never replayed"
        )
    return REPLAYED | added


def checked(rules: Rules) -> Rules:
    """The same rules. Raises ConfigurationError, which names the option."""
    _check("effects", rules.effects, rules.effects in get_args(Effects), "one of db, steps, opaque")
    for name in ("wait", "retention", "tombstone", "grace"):
        value = getattr(rules, name)
        _check(name, value, _number(value) and value >= 0, "seconds, not negative")
    _check("wait", rules.wait, rules.wait < inf, "finite: a server does not wait for ever")
    _check("tombstone", rules.tombstone, rules.tombstone < inf, "finite")
    _check("lease", rules.lease, _number(rules.lease) and 0.05 <= rules.lease < inf, "0.05 seconds or more")
    for name in ("max_response", "max_request", "max_waiters", "min_length"):
        value = getattr(rules, name)
        _check(name, value, type(value) is int and value >= 0, "a whole number, not negative")
    _check_fields(rules.request_id)
    words_for(rules)
    return rules


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124 - NaN


def _check(name: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise ConfigurationError(f"{name} must be {wanted}, not {value!r}")
