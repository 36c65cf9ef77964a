"""What a relay carries: topics by the patterns of its routes and by `topics=`, tenants by `tenants=`. No I/O in here.

Relays of one name share the work. Relays of two names know nothing of each other: a message that both carry is deleted by
whichever delivered it first, so it may go out twice, or by one of them only, whatever their sinks are. Each relay writes its
scope beside its heartbeat, so that the others can see it coming.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

import msgspec

__all__ = ["Neighbour", "Scope", "common", "scope_of"]

_ANY: Final = "?"
_MANY: Final = "*"


class Scope(msgspec.Struct, frozen=True):
    """As it is written down; `at` is the process, for people."""

    at: str
    patterns: tuple[str, ...]
    topics: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()

    def told(self) -> str:
        return msgspec.json.encode(self).decode()


class Neighbour(msgspec.Struct, frozen=True):
    """A living relay: how long it lives still, in seconds, since when (to compare with others of the same look), and what it said
    of itself."""

    team: str
    relay: str
    left: float
    since: float
    about: str


def scope_of(about: str) -> Scope | None:
    """What a relay wrote down; None for one that said nothing of it."""
    try:
        return msgspec.json.decode(about, type=Scope)
    except msgspec.MsgspecError:
        return None


def common(a: Scope, b: Scope) -> str | None:
    """What both carry, for people; None if nothing."""
    tenants = set(a.tenants) & set(b.tenants)
    if a.tenants and b.tenants and not tenants:
        return None
    found = _topics(a, b)
    if found is None or not (a.tenants or b.tenants):
        return found
    return f"{found} of tenant {min(tenants or {*a.tenants, *b.tenants})!r}"


def _topics(a: Scope, b: Scope) -> str | None:
    if a.topics or b.topics:
        named = set(a.topics) & set(b.topics) if a.topics and b.topics else {*a.topics, *b.topics}
        both = sorted(topic for topic in named if _has(a, topic) and _has(b, topic))
        return f"topic {both[0]!r}" if both else None
    pairs = ((one, other) for one in a.patterns for other in b.patterns if _meet(one, other))
    found = next(pairs, None)
    if found is None:
        return None
    return f"topic {found[0]!r}" if found[0] == found[1] else f"topics of both {found[0]!r} and {found[1]!r}"


def _has(scope: Scope, topic: str) -> bool:
    return any(fnmatchcase(topic, pattern) for pattern in scope.patterns)


def _meet(a: str, b: str) -> bool:
    """Whether a name exists that both patterns know. Two sets of characters ([ab], [bc]) are taken to meet."""
    one, other = _signs(a), _signs(b)
    ways, seen = [(0, 0)], set[tuple[int, int]]()
    while ways:
        i, j = place = ways.pop()
        if place in seen:
            continue
        seen.add(place)
        mine, theirs = one[i : i + 1], other[j : j + 1]
        if not mine and not theirs:
            return True
        if mine == [_MANY]:
            ways += [(i + 1, j)] + ([(i, j + 1)] if theirs else [])
        elif theirs == [_MANY]:
            ways += [(i, j + 1)] + ([(i + 1, j)] if mine else [])
        elif mine and theirs and _same(mine[0], theirs[0]):
            ways.append((i + 1, j + 1))
    return False


def _signs(pattern: str) -> Sequence[str]:
    """A pattern taken apart: characters, ?, * and sets, as fnmatch reads them."""
    signs, place = list[str](), 0
    while place < len(pattern):
        end = pattern.find("]", place + (3 if pattern[place + 1 : place + 2] == "!" else 2))
        length = end - place + 1 if pattern[place] == "[" and end > 0 else 1
        # A bracket that nothing closes is a character, and ours is spelled as a set of one.
        signs.append("[[]" if pattern[place] == "[" and length == 1 else pattern[place : place + length])
        place += length
    return signs


def _same(a: str, b: str) -> bool:
    """Whether a character exists that is both."""
    if _ANY in (a, b) or (len(a) > 1 and len(b) > 1):
        return True
    return fnmatchcase(a, b) if len(b) > 1 else fnmatchcase(b, a)
