"""Decorators in the wrong order: a framework that was given the bare function would never call the guarded one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final
from weakref import WeakSet

from semel.errors import ConfigurationError

__all__ = ["check_order", "guards"]

_OF: Final = "__semel_of__"
_guarded: Final[WeakSet[Callable[..., Any]]] = WeakSet()


def guards(guarded: Callable[..., Any], bare: Callable[..., Any]) -> None:
    """Remember which function a guarded one runs."""
    setattr(guarded, _OF, bare)
    _guarded.add(guarded)


def check_order(registered: Iterable[Callable[..., Any]]) -> None:
    """Raises ConfigurationError for a function that has a guard and is registered without it.

    One that is registered in both forms is meant so.
    """
    known = list(registered)
    bare = {id(getattr(guarded, _OF)) for guarded in list(_guarded)}
    bare -= {id(getattr(function, _OF, None)) for function in known}
    for function in known:
        if id(function) in bare:
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigurationError(
                f"{name} is registered without its guard, so that nothing is recorded: @idempotent(…) stands above the "
                "decorator of its route, which has seen the bare function; put it below. If both are wanted, "
                "register another function that calls this one"
            )
