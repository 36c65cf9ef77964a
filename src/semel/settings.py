"""What a face is told when it is made, checked so that a mistake is named at once and not at the first call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from semel.calls import clean
from semel.coroutines import refuse_async
from semel.errors import ConfigurationError
from semel.hosts import scheme_of
from semel.options import OF_A_CALL, Options
from semel.store import Settings, Store

__all__ = [
    "check_words",
    "checked_hooks",
    "checked_index",
    "checked_labels",
    "checked_readable",
    "checked_ring",
    "checked_store_settings",
    "knows",
]

# What only some stores know, and which. `table`, `create` and `capacity` are not among them: one configuration serves all stores,
# and where there are no tables, or no bounds, there is nothing to name, to make or to keep.
_OF_SOME: Mapping[str, tuple[str, frozenset[str]]] = {
    "acks": ("a number of replicas to wait for on Redis", frozenset({"redis"})),
    "index": ("an index for look-ups on Redis", frozenset({"redis"})),
}
_FAMILIES: Mapping[str, str] = {
    "memory": "memory",
    **dict.fromkeys(("sqlite", "sqlite3"), "sqlite"),
    **dict.fromkeys(("postgresql", "postgres", "asyncpg", "psycopg", "psycopg_pool"), "postgresql"),
    **dict.fromkeys(("mysql", "mariadb", "asyncmy", "pymysql"), "mysql"),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "unix"), "redis"),
}
_DEFAULTS = Settings()
_MOST_LABELS = 64
_OUR_LABELS = "semel."


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
    if not isinstance(word, str) or word not in ("full", "masked", "none"):
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
    """Options that only some stores know are refused by the others, and by one that is open; not dropped in silence."""
    if isinstance(source, type):  # which has all the verbs of a store, too
        raise ConfigurationError(f"{source.__qualname__} is a class: make one of it, and pass that")
    if not isinstance(settings.table, str):
        raise ConfigurationError(f"table must be a name, not {settings.table!r}")
    for name, (meaning, _) in _OF_SOME.items():
        if getattr(settings, name) == getattr(_DEFAULTS, name):
            continue
        if isinstance(source, Store):
            raise ConfigurationError(
                f"{name} is {meaning}, and this {type(source).__name__} was opened without asking for it here: say it where "
                f"the store is made, as in open_store(url, Settings({name}=…), colour), or give the face its URL"
            )
        if not knows(source, name):
            raise ConfigurationError(
                f"{name} is {meaning}; a {_kind_of(source)} store does not know {name}=: leave it out"
            )
    return settings


def knows(source: object, name: str) -> bool:
    """Whether a store that is opened from this does something with that setting; a store of your own may."""
    family = _FAMILIES.get(_kind_of(source))
    return family is None or name not in _OF_SOME or family in _OF_SOME[name][1]


def _kind_of(source: object) -> str:
    """The scheme of a URL, the database of an engine, the package of a client; something unknown for a store of your own."""
    if isinstance(source, str):
        return scheme_of(source).partition("+")[0]
    package = type(source).__module__.partition(".")[0]
    return str(getattr(getattr(source, "dialect", None), "name", "")) if package == "sqlalchemy" else package


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
        if not name:
            raise ConfigurationError(f"a label has no name: give {text!r} one, of 1 to 64 characters")
        if name.startswith(_OUR_LABELS):
            raise ConfigurationError(
                f"the label {name!r} begins with {_OUR_LABELS!r}, as semel's own do: call it otherwise"
            )
        if clean(name + text) != name + text:
            raise ConfigurationError(
                f"a label holds NUL or half a surrogate pair, which not every store can keep: {name!r}: {text!r}"
            )
    return dict(labels)
