"""A master that says nothing when all of them are asked: the others are used without it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Absent"]


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands in the place of the reply, in what `Link.command_everywhere` finds."""

    again: Callable[[], Awaitable[Any]]
    """Its reply after all, with as much patience as any call has; raises as any call does."""
    later: Callable[[Callable[[Any], None]], None]
    """Have the reply judged before the first call that needs this master; what the judge raises, that call raises."""
