"""How many functions run now, asked of those who run them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from semel.face import Face
from semel.flow import Engine
from semel.once import AsyncSemel, Semel

__all__ = ["Watched"]


class Watched:
    """Faces that are looked at, for as long as they live."""

    def __init__(self) -> None:
        self._faces: weakref.WeakSet[Face] = weakref.WeakSet()

    def add(self, once: Face) -> None:
        """Look at it from now on."""
        self._faces.add(once)

    @property
    def in_flight(self) -> int:
        """Functions that run now. One inside `within` is not among them: it has no lease that could be seen."""
        return sum(engine.heart.count for face in tuple(self._faces) for engine in _engines(face))


def _engines(face: Face) -> Iterable[Engine]:
    match face:
        case Semel():
            return () if face._made is None else (face._made,)  # noqa: SLF001 - our own
        case AsyncSemel():
            return tuple(face._engines.values())  # noqa: SLF001 - our own
        case _:
            return ()
