"""What a face is told when it is made, checked so that a mistake is named at once and not at the first call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from semel.calls import clean
from semel.coroutines import refuse_async
from semel.errors import ConfigurationError
from semel.options import OF_A_CALL, Options
from semel.store import Settings

__all__ = [
    "check_words",
    "checked_hooks",
    "checked_index",
    "checked_labels",
    "checked_readable",
    "checked_ring",
    "checked_store_settings",
]

_REDIS_ONLY = {"acks": "a number of replicas to wait for", "index": "an index for look-ups"}
_MOST_LABELS = 64


def check_words(given: Iterable[str], constructor: Callable[..., object], face: str) -> None:
    """Refuse a word that the constructor does not know, with its own words as guesses."""
    for name in given:
        if name in Options.__struct_fields__:
            continue
        if name in OF_A_CALL:
            raise ConfigurationError(f"{name!r} belongs to one call, not to {face}(...): give it to execute")
        own = [
            word for word, what in signature(constructor).parameters.items() if what.kind is what.KEYWORD_ONLY
        ]
        known = list(dict.fromkeys((*own, *Options.__struct_fields__)))
        close = get_close_matches(name, known, 1)
        guess = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigurationError(f"unknown setting {name!r}: {guess}{face}(...) takes {', '.join(known)}")


def checked_hooks(hooks: Any) -> tuple[Callable[[object], object], ...]:
    given: tuple[Any, ...] = tuple(hooks) if isinstance(hooks, Iterable) else (None,)
    if not all(map(callable, given)):
        raise ConfigurationError(
            f"hooks must be a list of callables, such as hooks=[log_events], not {hooks!r}"
        )
    for hook in given:
        refuse_async(
            "a hook", hook, "hooks are called, not awaited; write a plain def that hands the event on"
        )
    return given


def checked_readable(word: Any) -> Any:
    if word not in ("full", "masked", "none"):
        raise ConfigurationError(f'readable must be "full", "masked" or "none", not {word!r}')
    return word


def checked_index(index: Any) -> frozenset[str]:
    named: tuple[Any, ...] = (
        (None,) if isinstance(index, str) or not isinstance(index, Iterable) else tuple(index)
    )
    if not all(isinstance(each, str) for each in named):
        raise ConfigurationError(f"index must be a set of names, such as index={{'ref'}}, not {index!r}")
    return frozenset(named)


def checked_store_settings(settings: Settings, source: object) -> Settings:
    """Options that only some stores know are refused by the others, not dropped in silence."""
    if not isinstance(settings.table, str):
        raise ConfigurationError(f"table must be a name, not {settings.table!r}")
    scheme = source.partition(":")[0].partition("+")[0] if isinstance(source, str) else ""
    if scheme and scheme not in ("redis", "rediss", "valkey", "valkeys", "unix"):
        for name, meaning in _REDIS_ONLY.items():
            if getattr(settings, name):
                raise ConfigurationError(
                    f"{name} is {meaning} on Redis; a {scheme} store does not know it: leave it out"
                )
    return settings


def checked_ring(keys: Any) -> Any:
    if keys is None:
        return None
    if not isinstance(keys, Mapping):
        raise ConfigurationError(
            "encrypt must map key names to 32-byte keys: encrypt={'2026-a': os.urandom(32)}"
        )
    from semel.layers.encrypt import Ring  # needs an extra

    return Ring(keys)


def checked_labels(labels: Any) -> Mapping[str, str]:
    if not isinstance(labels, Mapping):
        raise ConfigurationError(f"labels must be a mapping of short texts, not {type(labels).__name__}")
    if len(labels) > _MOST_LABELS:
        raise ConfigurationError(f"a record takes at most {_MOST_LABELS} labels, not {len(labels)}")
    for name, text in labels.items():
        if not isinstance(name, str) or not isinstance(text, str) or len(name) > 64 or len(text) > 255:
            raise ConfigurationError(
                f"labels are short texts (64 and 255 characters at most), not {name!r}: {text!r}"
            )
        if clean(name + text) != name + text:
            raise ConfigurationError(
                f"a label holds NUL or half a surrogate pair, which not every store can keep: {name!r}: {text!r}"
            )
    return dict(labels)
