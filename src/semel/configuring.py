"""Settings of a face from the environment, a mapping or a file: text becomes what the setting takes, a typo is refused."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Container, Mapping
from math import inf
from pathlib import Path
from typing import Any, Final

from semel.errors import ConfigurationError

__all__ = ["SETTINGS", "settings_from", "settings_of_environment"]

_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_ENDLESS: Final = frozenset({"inf", "forever"})


def _span(text: str) -> float:
    found = _SPAN.fullmatch(text.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError("write seconds, or a number with ms, s, m, h or d, as 30s or 7d")
    return float(found[1]) * _UNITS[found[2]]


def _endless(text: str) -> float | None:
    return None if text.strip().lower() in _ENDLESS | {"none"} else _span(text)


def _patience(text: str) -> float:
    return inf if text.strip().lower() in _ENDLESS else _span(text)


def _spans(text: str) -> list[float]:
    return [_span(each) for each in text.split(",")]


def _size(text: str) -> int | None:
    if text.strip().lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError("write a number of bytes, or none") from None


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("write true or false")
    return word in _TRUE


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


# What a text means, for each setting that a text can say.
SETTINGS: Final[Mapping[str, Callable[[str], Any]]] = {
    "url": str,
    **dict.fromkeys(("tenant", "operation", "prefix", "table", "readable", "namespace", "secret"), str),
    **dict.fromkeys(("on_error", "on_unknown", "on_lease_lost", "fingerprints", "ref_type"), str),
    **dict.fromkeys(("lease", "tombstone", "timeout", "settle_timeout", "purge_every"), _span),
    "wait": _patience,
    "retention": _endless,
    "poll": _spans,
    **dict.fromkeys(("max_result", "max_waiters", "threads", "acks", "cache", "capacity"), int),
    "compress_over": _size,
    **dict.fromkeys(("enabled", "create", "coalesce", "inline"), _truth),
    "index": _names,
}
# And what no text can say: objects, and keys that do not belong where everybody reads them.
_PROGRAMS: Final = {
    "hooks": "hooks=[log_events]",
    "encrypt": "encrypt={'2026-a': …}",
    "result_type": "result_type=Order",
}


def settings_of_environment(
    environ: Mapping[str, str], prefix: str, given: Container[str] = ()
) -> dict[str, Any]:
    """What `SEMEL_URL`, `SEMEL_LEASE` … say. A variable that is nearly one of them is refused; others are none of ours.

    `given` are the settings that the program itself gives: where it reads its keys from is its own affair.
    """
    if not isinstance(prefix, str):
        raise ConfigurationError(
            f"prefix= is the text that variables begin with, as 'SEMEL_', not {prefix!r}"
        )
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue
        name = variable[len(prefix) :].lower()
        if name in SETTINGS:
            found[name] = _typed(name, text, variable)
        elif name in _PROGRAMS:
            if name not in given:
                raise _of_the_program(variable, name, "the environment", "from_env")
        elif near := difflib.get_close_matches(name, SETTINGS, 1, 0.8):
            raise ConfigurationError(f"{variable} is no setting: did you mean {prefix}{near[0].upper()}?")
    if "url" not in found and "url" not in given:
        raise ConfigurationError(f"{prefix}URL is not set: it is the URL of the store, as sqlite:///semel.db")
    return found


def settings_from(
    source: Mapping[str, Any] | str | Path, section: str, said: Container[str] = ()
) -> dict[str, Any]:
    """Settings from a mapping, or from the section of a TOML or JSON file. Every name must be known.

    `said` are the settings that the program itself gives.
    """
    given = _section(_read(Path(source)), section, source) if isinstance(source, str | Path) else source
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"a configuration is a mapping, or the path of a TOML or JSON file, not {type(given).__name__}"
        )
    found: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"a configuration names its settings by text, not by {name!r}")
        if name in _PROGRAMS:
            raise _of_the_program(repr(name), name, "a configuration", "from_config")
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1)
            hint = f": did you mean {near[0]!r}?" if near else f"; settings are {', '.join(sorted(SETTINGS))}"
            raise ConfigurationError(f"{name!r} is no setting of a configuration{hint}")
        found[name] = _typed(name, value, name) if isinstance(value, str) else value
    if "url" not in found and "url" not in said:
        raise ConfigurationError('a configuration needs "url", the URL of the store, as sqlite:///semel.db')
    return found


def _of_the_program(shown: str, name: str, source: str, maker: str) -> ConfigurationError:
    return ConfigurationError(
        f"{shown}: {name} is given by the program, not by {source}: {maker}(…, {_PROGRAMS[name]})"
    )


def _typed(name: str, text: str, shown: str) -> Any:
    try:
        return SETTINGS[name](text)
    except ValueError as error:
        raise ConfigurationError(f"{shown}={text!r} cannot be understood: {error}") from error


def _read(path: Path) -> Any:
    try:
        text = path.read_text("utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"the configuration cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # of either format
        raise ConfigurationError(f"the configuration {path} is no TOML or JSON: {error}") from error


def _section(whole: Any, section: str, source: object) -> Mapping[str, Any]:
    found = whole
    for part in str(section).split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"the configuration {source} has no section [{section}]")
    return found
