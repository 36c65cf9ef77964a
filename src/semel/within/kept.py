"""Statements that a caller's session keeps by name (PREPARE), so that a claim as text is neither analysed nor planned.

A session is shown one when it comes for the second time: who comes once would only pay for it. Behind a pooler, or where
somebody says DISCARD ALL, a name is gone when it is needed; that is seen once, and then no session is trusted any more.
It decides which of two texts is sent, and never what a key is.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final
from weakref import WeakKeyDictionary

__all__ = ["SESSIONS", "Sessions", "Way"]


class Way(Enum):
    TEXT = auto()
    """In full: the session has never seen it, or cannot keep it."""
    PREPARE = auto()
    """In full, to be kept, and by its name."""
    NAME = auto()
    """By its name alone."""


# A member is asked for at its class by a search, each time.
_TEXT: Final = Way.TEXT
_PREPARE: Final = Way.PREPARE
_NAME: Final = Way.NAME


class Sessions:
    """What the sessions of this process keep."""

    def __init__(self) -> None:
        self.trusted = True
        self._ways: WeakKeyDictionary[object, dict[str, Way]] = WeakKeyDictionary()

    def choose(self, session: object | None, name: str) -> Way:
        """How a statement goes to this session now. After PREPARE it goes in full, unless `keeps` is told that it went well."""
        if session is None or not self.trusted:
            return _TEXT
        ways = self._ways.get(session)
        if ways is None:
            ways = self._ways[session] = {}
        way = ways.get(name)
        if way is None:
            ways[name] = _PREPARE
            return _TEXT
        if way is _PREPARE:
            ways[name] = _TEXT
        return way

    def keeps(self, session: object | None, name: str) -> None:
        """The session has prepared it."""
        if session is not None:
            self._ways[session][name] = _NAME

    def distrust(self) -> None:
        """A session did not have what it had kept."""
        self.trusted = False


SESSIONS: Final = Sessions()
