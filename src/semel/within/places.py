"""Where won claims stand in a caller's transaction, in the order in which they were claimed.

A savepoint holds everything since, later savepoints included. Where an older run ends before a younger one, the younger
one goes with it: with a run that is kept into the transaction around it (`merged`), with a run that is undone to nothing
(`gone`). Going back to a younger savepoint after an older run is settled would undo that outcome, so nobody may.
"""

from __future__ import annotations

from typing import Final
from weakref import ref

import msgspec

from semel.within.ports import Savepoint

__all__ = ["Place", "enter", "inside", "is_open", "leave"]

# Runs that are open now, by connection, scope and table: a run that waits for itself would wait for ever. One that was left
# without an end goes with its owner: it must not stand in the way of whoever has that connection, or its address, next.
_open_runs: Final[dict[int, dict[tuple[bytes, str], ref[Place]]]] = {}
_MANY_RUNS: Final = 4096


class Place(msgspec.Struct, weakref=True):
    """Where a won claim stands: its savepoint, and whether the transaction around it was begun by us (SQLite)."""

    point: Savepoint
    began: bool
    connection: int = 0
    key: tuple[bytes, str] = (b"", "")
    """The scope, and the table of its record: faces with tables of their own have nothing to do with each other's keys."""
    transaction: int = 0
    """The caller's transaction by the database's own number, known once the run is settled (PostgreSQL)."""
    merged: bool = False
    """An older run was kept: what this one writes can no longer be undone alone."""
    gone: bool = False
    """An older run was undone, and this one with it."""

    @property
    def is_counted(self) -> bool:
        """Whether a library waits for the end of its savepoint."""
        return self.point.counted and not self.merged and self.point.alive


def is_open(connection: int, key: tuple[bytes, str]) -> bool:
    runs = _open_runs.get(connection)
    if runs is None or (known := runs.get(key)) is None:
        return False
    return known() is not None


def enter(place: Place) -> None:
    runs = _open_runs.get(place.connection)
    if runs is None:
        if len(_open_runs) >= _MANY_RUNS:
            _drop_the_ownerless()
        runs = _open_runs[place.connection] = {}
    elif len(runs) >= _MANY_RUNS or place.key in runs:
        for key, known in list(runs.items()):
            if known() is None:
                del runs[key]  # even of the same key: a place that stays would keep its turn
    runs[place.key] = ref(place)


def leave(place: Place) -> None:
    """Twice is no mistake, and never takes another place of the same key away."""
    runs = _open_runs.get(place.connection)
    if runs is None or (known := runs.get(place.key)) is None or known() is not place:
        return
    del runs[place.key]
    if not runs:
        _open_runs.pop(place.connection, None)


def inside(place: Place) -> list[Place]:
    """Those that were claimed later and are open, the latest first."""
    later: list[Place] = []
    for known in reversed(_open_runs.get(place.connection, {}).values()):
        each = known()
        if each is place:
            return later
        if each is not None:
            later.append(each)
    return []


def _drop_the_ownerless() -> None:
    for connection, runs in list(_open_runs.items()):
        if all(known() is None for known in list(runs.values())):
            _open_runs.pop(connection, None)
