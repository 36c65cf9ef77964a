"""After a fork the child must not touch what it inherited: threads are gone, sockets belong to the parent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["epoch", "survive_fork"]

T = TypeVar("T")

epoch = 0
"""Another number in every child process: what remembers it knows whether it was inherited. Asked for as `forks.epoch`."""

_survivors: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def survive_fork(thing: T, reset: Callable[[T], None]) -> None:
    """Call `reset(thing)` in every child process, as long as `thing` lives. Costs nothing per call."""
    _survivors[thing] = reset


def _after_fork() -> None:
    global epoch  # noqa: PLW0603 - one number per process, read on the hot path
    epoch += 1
    for thing, reset in tuple(_survivors.items()):
        reset(thing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
