"""What a call may say, checked once. Durations are seconds or timedelta at the edge and float seconds inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from math import inf, isnan
from typing import Any, Literal, get_origin

import msgspec

from semel import ids
from semel.codec.annotations import texts_of
from semel.coroutines import refuse_async
from semel.errors import ConfigurationError
from semel.model import Policy
from semel.shown import shown

__all__ = [
    "NOT_FOUND",
    "UNDECIDED",
    "Duration",
    "Found",
    "OnError",
    "Options",
    "Release",
    "check_probe",
    "checked_policy",
    "checked_type",
    "count",
    "release_delay",
    "resolve",
    "seconds",
    "switch",
    "unknown_option",
]

Duration = float | int | timedelta
MIN_LEASE = 0.05
MAX_LEASE = 30 * 86_400.0


class Found(msgspec.Struct, frozen=True):
    """A probe's answer: the effect happened, and this is its result."""

    value: Any = None
    ref: str | None = None


class _Word:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        """The one word of this module, for a probe that answers from another process."""
        return self._name


NOT_FOUND = _Word("NOT_FOUND")  # the effect did not happen: it may be run
UNDECIDED = _Word("UNDECIDED")  # the probe could not tell: the key stays unknown


def check_probe(answer: Any) -> None:
    """A probe that answers anything else has a mistake in it, and a mistake must not pass for "could not tell"."""
    if not isinstance(answer, Found) and answer is not NOT_FOUND and answer is not UNDECIDED:
        raise ConfigurationError(
            f"a probe answers Found(value), NOT_FOUND or UNDECIDED, not {shown(answer)}; the key stays unknown"
        )


class Release(msgspec.Struct, frozen=True):
    """An `on_error` decision: free the key, but let nobody try again before `after` seconds."""

    after: Duration = 0.0

    def __post_init__(self) -> None:
        if type(self.after) is not float or not 0.0 <= self.after < inf:
            release_delay(self)


OnErrorWord = Literal["release", "hold", "replay"]
OnError = OnErrorWord | Release | Callable[[Exception], "str | Release"]


class Options(msgspec.Struct, frozen=True):
    """Everything about a call but its key, its function and its request."""

    tenant: str = "default"
    operation: str = "default"
    lease: float = 10.0
    retention: float = 86_400.0
    tombstone: float = 0.0
    wait: float = 0.0
    poll: tuple[float, float] = (0.005, 0.1)
    on_error: OnError | None = None
    on_unknown: Literal["retry", "hold"] | Callable[..., Any] = "retry"
    on_lease_lost: Literal["cancel", "warn"] = "cancel"
    result_type: Any = None
    ref_type: str | None = None
    max_result: int = 1 << 20
    compress_over: int | None = None
    max_waiters: int = 1_000
    fingerprints: Literal["optional", "required"] = "optional"
    inline: bool = False

    @property
    def policy(self) -> Policy:
        word = self.on_unknown
        if word == "retry":
            return Policy.RETRY
        return Policy.HOLD if word == "hold" else Policy.PROBE


_WORDS: Mapping[str, frozenset[Any]] = {
    "on_lease_lost": frozenset({"cancel", "warn"}),
    "fingerprints": frozenset({"optional", "required"}),
}


def seconds(name: str, value: Any, *, least: float = 0.0) -> float:
    """A duration as float seconds, or a ConfigurationError that names the option."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{name} must be seconds or a timedelta, not {value!r}")
    try:
        given = float(value)
    except OverflowError:
        raise ConfigurationError(
            f"{name} is beyond all measure: it must be seconds, or a timedelta"
        ) from None
    if isnan(given):
        raise ConfigurationError(f"{name} must be seconds or a timedelta, not {value!r}")
    if given < least:
        raise ConfigurationError(f"{name} must be at least {least:g} seconds, not {value!r}")
    return given


def count(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be a whole number, {least} or more, not {value!r}")
    return value


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, not {value!r}")
    return value


def resolve(defaults: Options, given: Mapping[str, Any]) -> Options:
    """`defaults` with what a call gave; an unknown name or a bad value is refused by name."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if name not in Options.__struct_fields__:
            raise unknown_option(name)
        check = _CHECKS.get(name)
        changes[name] = value if check is None else check(value)
    return msgspec.structs.replace(defaults, **changes)


OF_A_CALL = ("request", "fields", "fingerprint", "kwargs", "labels", "readable")


def unknown_option(name: str, more: tuple[str, ...] = ()) -> ConfigurationError:
    """`more` are options that this kind of call has besides."""
    known = tuple(dict.fromkeys((*more, *Options.__struct_fields__, *OF_A_CALL)))
    close = get_close_matches(name, known, 1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return ConfigurationError(
        f"unknown option {name!r}: {guess}The options of a call are {', '.join(known)}; arguments for the function go in "
        "positionally or as kwargs={...}; settings of the store are given to Semel(...)"
    )


def checked_type(value: Any) -> Any:
    """Whatever an annotation may be, but no text, nor one with text in it: nobody knows whose names are meant."""
    if value is None or type(value) is type:
        return value
    kind = type(value)
    known = (
        isinstance(value, type)
        or get_origin(value) is not None
        or kind.__module__ in ("typing", "typing_extensions")
        or hasattr(value, "__get_pydantic_core_schema__")
    )
    if known and next(texts_of(value), None) is None:
        return value
    raise ConfigurationError(
        f"result_type must be a type, such as int, list[Order] or Order | None, not {value!r}: name the class itself, "
        "not its text nor a value"
    )


def _kind(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and ids.is_kind(value)):
        return value
    raise ConfigurationError(
        f'ref_type must be the type of a public id, as run.new_id("ord") gives it: a short lower-case word, not {value!r}'
    )


def _lease(value: Any) -> float:
    lease = seconds("lease", value, least=-inf)  # its bounds are told below
    if not MIN_LEASE <= lease <= MAX_LEASE:
        raise ConfigurationError(
            f"lease must be between {MIN_LEASE:g} seconds (a shorter one would end before its first renewal) and "
            f"30 days, not {value!r}: it is how long a killed worker's key stays locked, 10 is a good value"
        )
    return lease


def _tombstone(value: Any) -> float:
    tombstone = seconds("tombstone", value)
    if tombstone == inf:
        raise ConfigurationError("tombstone must be finite; retention=None keeps the whole record for ever")
    return tombstone


def _poll(value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigurationError(f"poll must be a pair (first, most) of seconds, not {value!r}")
    first, most = seconds("poll[0]", value[0], least=0.001), seconds("poll[1]", value[1], least=0.001)
    if first > most:
        raise ConfigurationError(f"poll must begin with the shorter pause, not {value!r}")
    return first, most


def _on_error(value: Any) -> Any:
    if callable(value):
        refuse_async(
            "on_error", value, "its answer is needed at once, nothing is awaited there; write a plain def"
        )
        return value
    if value is None or (isinstance(value, str) and value in ("release", "hold", "replay")):
        return value
    if isinstance(value, Release):
        return Release(release_delay(value))
    raise ConfigurationError(
        f'on_error must be "release", "hold", "replay", Release(after=seconds) or a callable of the exception, '
        f"not {value!r}"
    )


def release_delay(release: Release) -> float:
    after = seconds("Release(after)", release.after)
    if after == inf:
        raise ConfigurationError(
            'Release(after=inf) would never let anybody try again: that is on_error="replay"'
        )
    return after


def checked_policy(value: Any, *, plain: bool = False) -> Any:
    """An `on_unknown`, of a call or of a step; in plain code nobody awaits a probe."""
    if callable(value):
        if plain:
            refuse_async("the probe of a Semel", value, "write a plain def, or use AsyncSemel")
        return value
    if isinstance(value, str) and value in ("retry", "hold"):  # of an array `in` makes no truth
        return value
    raise ConfigurationError(
        f'on_unknown must be "retry", "hold" or a probe function that answers Found(value), NOT_FOUND or '
        f"UNDECIDED, not {value!r}"
    )


def _count(name: str, value: Any) -> int | None:
    if value is None and name == "compress_over":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{name} must be a whole number that is not negative, not {value!r}")
    return value


def _word(name: str, value: Any, allowed: frozenset[Any]) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(sorted(map(repr, allowed)))}, not {value!r}"
        )
    return value


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "retention": lambda value: inf if value is None else seconds("retention", value),
    "lease": _lease,
    "wait": partial(seconds, "wait"),
    "tombstone": _tombstone,
    "poll": _poll,
    "on_error": _on_error,
    "on_unknown": checked_policy,
    "inline": partial(switch, "inline"),
    "result_type": checked_type,
    "ref_type": _kind,
    **{name: partial(_count, name) for name in ("max_result", "max_waiters", "compress_over")},
    **{name: partial(_word, name, allowed=allowed) for name, allowed in _WORDS.items()},
}
