"""Who plays what next. A driver stays at home: its helpers have the connections, the servers and the caches of one store.

A home is a store under one part of the product, where any number of drivers may be, or a lane, which belongs to one driver:
it owns the servers that it breaks. When a home has no more jobs, its drivers go where most is left to do for each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Final

from semel.testing.chaos.cells import Cell
from semel.testing.chaos.driver import Job

__all__ = ["Homes", "estimate"]

_LANE: Final = 4.0
"""Seconds until the servers of a lane are there."""


def estimate(cell: Cell) -> float:
    """About how many seconds a schedule takes: it waits for a lease, a time limit, a server's return."""
    if cell.fault == "slow":
        return 6.0
    if cell.fault in {"stall", "disk-full"}:
        return 2.5
    if cell.part == "messaging":
        return 4.0 if cell.fault == "zombie" else 2.0
    return 1.0 if cell.lane or cell.part == "http" else 0.4


class _Home:
    """Batches of jobs, in their order, and the drivers who are there."""

    def __init__(self, *, lane: bool) -> None:
        self.batches: deque[list[Job]] = deque()
        self.left = _LANE if lane else 0.0
        self.drivers: set[Hashable] = set()
        self._lane = lane

    def add(self, batch: list[Job]) -> None:
        self.batches.append(batch)
        self.left += sum(estimate(job.cell) for job in batch)

    def take(self) -> list[Job]:
        batch = self.batches.popleft()
        self.left -= sum(estimate(job.cell) for job in batch)
        return batch

    @property
    def waiting(self) -> float:
        """Seconds of work for one driver more; nothing where none may come."""
        if not self.batches or (self._lane and self.drivers):
            return 0.0
        return self.left / (len(self.drivers) + 1)


class Homes:
    """All jobs of a run, by home. Cells of a lane that are played in a batch go out together, each of them once in a batch."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._homes: dict[str, _Home] = {}
        lanes: dict[tuple[str, int, str], list[Job]] = {}
        for job in jobs:
            cell = job.cell
            if cell.lane:
                lanes.setdefault((cell.lane, job.number, "" if cell.batch else cell.name), []).append(job)
            else:
                self._at(f"{cell.store} under {cell.part}", lane=False).add([job])
        for (lane, _, _), batch in lanes.items():
            self._at(lane, lane=True).add(batch)

    def _at(self, name: str, *, lane: bool) -> _Home:
        return self._homes.setdefault(name, _Home(lane=lane))

    def next(self, driver: Hashable) -> list[Job] | None:
        """What this driver plays next; None when nothing is left that it may play."""
        homes = self._homes.values()
        home = next((each for each in homes if driver in each.drivers), None)
        if home is None or not home.batches:
            if home is not None:
                home.drivers.discard(driver)
            home = max(homes, key=lambda each: each.waiting, default=None)
            if home is None or not home.waiting:
                return None
            home.drivers.add(driver)
        return home.take()
