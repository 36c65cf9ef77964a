"""Functions that `@once` gave the same operation, since they have the same name: each is answered with what the other one did."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

from semel.errors import SemelWarning

__all__ = ["Namesakes"]

_MOST = 8  # a factory may make thousands before one of them is called


class Namesakes:
    """Which functions took their name for their operation, of one face; weakly, as what is gone shares nothing any more.

    They are compared at a function's first call and not when it is decorated: a module that is reloaded, and a cell of a notebook
    that is run again, decorate the new function while the name still means the old one.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[weakref.ref[Any], ...]] = {}
        self._told: set[str] = set()

    def add(self, operation: str, once: Any) -> None:
        """`once` lives as long as what was decorated, and has its function as `__wrapped__`."""
        if operation in self._told:
            return
        alive = [ref for ref in self._known.get(operation, ()) if ref() is not None]
        # Of two threads one may be overlooked: a hint is not worth a lock that a fork would have to mend.
        self._known[operation] = (*alive[-_MOST:], weakref.ref(once))

    def look(self, operation: str, once: Any) -> None:
        """Warns, once per operation, if another live function has it too."""
        if operation in self._told:
            return
        mine = _innermost(once.__wrapped__)
        for ref in self._known.get(operation, ()):
            other = ref()
            if other is None or not _differ(mine, theirs := _innermost(other.__wrapped__)):
                continue
            self._told.add(operation)
            self._known.pop(operation, None)
            # At the function and not at its call, which is as deep in semel as its colour and kind say.
            code = mine.__code__
            warnings.warn_explicit(
                f"two functions have the operation {operation!r}, which is their name, and so share their keys: what one of them did is "
                f"not done by the other one ({_places(theirs, mine)}). Say operation='…' for each of them; or for both the same one, if "
                "they are one action",
                SemelWarning,
                code.co_filename,
                code.co_firstlineno,
                mine.__module__,
            )
            return


def _innermost(fn: Callable[..., Any]) -> Any:
    """Beneath what `functools.wraps` names after it, and without the object of a method or the arguments of a partial."""
    fn = inspect.unwrap(fn)
    while (inner := fn.func if isinstance(fn, partial) else getattr(fn, "__func__", None)) is not None:
        fn = inspect.unwrap(inner)
    return fn


def _differ(one: Any, other: Any) -> bool:
    """Whether they are two functions of one program, and not two states of one that somebody is writing."""
    mine, theirs = getattr(one, "__code__", None), getattr(other, "__code__", None)
    if one is other or not isinstance(mine, CodeType) or not isinstance(theirs, CodeType):
        return False
    if mine is theirs:  # made twice, by a factory or in a loop
        return True
    # Another file is another cell of a notebook; the same line, compiled again, is a module that was reloaded.
    return mine.co_filename == theirs.co_filename and mine.co_firstlineno != theirs.co_firstlineno


def _places(*fns: Any) -> str:
    places = dict.fromkeys(f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}" for fn in fns)
    return " and ".join(places) if len(places) > 1 else f"both were made at {min(places)}"
