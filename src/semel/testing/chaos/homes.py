"""Who plays what next. A driver stays at home: its helpers have the connections, the servers and the caches of one store.

A home is a store under one part of the product, where any number of drivers may be, or a lane, which belongs to one driver:
it owns the servers that it breaks. When a home has no more jobs of this round, its drivers go where most is left to do for each
of them. Rounds come one after the other, everywhere: a run that is cut short has seen all kinds of misfortune.
"""

from __future__ import annotations

from collections import defaultdict, deque
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
    return 1.0 if cell.lane or cell.part in {"http", "grpc"} else 0.4


class _Home:
    """Batches of jobs, in their order, and the drivers who are there."""

    def __init__(self, *, lane: bool) -> None:
        self.batches: deque[list[Job]] = deque()
        self.drivers: set[Hashable] = set()
        self._left: dict[int, float] = defaultdict(float)
        self._owner: Hashable = None
        self._lane = lane

    def add(self, batch: list[Job]) -> None:
        if self._lane and not self.batches:
            self._left[batch[0].number] = _LANE
        self.batches.append(batch)
        self._left[batch[0].number] += sum(estimate(job.cell) for job in batch)

    def take(self, driver: Hashable) -> list[Job]:
        self.drivers.add(driver)
        if self._lane:
            self._owner = driver
        batch = self.batches.popleft()
        self._left[batch[0].number] -= sum(estimate(job.cell) for job in batch)
        return batch

    @property
    def round(self) -> int:
        return self.batches[0][0].number

    def open_to(self, driver: Hashable) -> bool:
        return bool(self.batches) and (self._owner in (None, driver))

    @property
    def owned(self) -> bool:
        """Its servers are there, at its only driver."""
        return self._owner is not None

    @property
    def waiting(self) -> float:
        """Seconds of work that this round has for one driver more."""
        return self._left[self.round] / (len(self.drivers) + 1)


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
        homes = [each for each in self._homes.values() if each.open_to(driver)]
        if not homes:
            return None
        this = min(each.round for each in homes)
        due = [each for each in homes if each.round == this]
        home = next((each for each in due if driver in each.drivers), None)
        if home is None:
            for each in self._homes.values():
                each.drivers.discard(driver)
            home = max(due, key=lambda each: (each.owned, each.waiting))
        return home.take(driver)
