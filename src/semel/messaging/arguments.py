"""What outboxes, relays and inboxes are told, checked when they are made: what could only be a mistake is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from typing import Any

from semel.errors import ConfigurationError
from semel.messaging.events import Emit, teller
from semel.options import seconds

__all__ = ["emitter", "pauses", "refuse_unknown"]


def refuse_unknown(
    made: Callable[..., Any], unknown: Collection[str], known: Sequence[str] | None = None
) -> None:
    """ConfigurationError for a keyword that `made` does not have; `known` are those that it may be given, if not all."""
    if not unknown:
        return
    if known is None:
        parameters = inspect.signature(made).parameters.values()
        known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    name = min(unknown)
    close = get_close_matches(name, known, 1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigurationError(f"unknown option {name!r}: {guess}The options are {', '.join(known)}")


def pauses(name: str, given: Any) -> tuple[float, float]:
    """The first and the longest pause, in seconds."""
    try:
        first, longest = given
    except (TypeError, ValueError):
        first = longest = None
    if first is None:
        raise ConfigurationError(f"{name} is (first, longest) in seconds, not {given!r}")
    least, most = seconds(name, first), seconds(name, longest)
    if not 0 < least <= most:
        raise ConfigurationError(f"{name} is (first, longest) in seconds, not {given!r}")
    return least, most


def emitter(hooks: Collection[Emit]) -> Emit:
    """One callable for all hooks. ConfigurationError for what is no list of callables."""
    given: Any = hooks
    if callable(given) or not isinstance(given, Collection) or not all(map(callable, given)):
        raise ConfigurationError(f"hooks is a list of functions of one event, such as [print], not {given!r}")
    return teller(tuple(hooks))
