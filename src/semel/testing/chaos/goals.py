"""When a run counts: the rules of reach for every run, and the figures of a long campaign. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from semel.testing.chaos.verdicts import Result, quantile

__all__ = [
    "AGAIN",
    "HUNG",
    "LONG_REPEAT",
    "WELL",
    "Figure",
    "campaign",
    "late",
    "misfortunes",
    "unreached",
    "well",
    "window",
]

WELL: Final = 0.9
"""The share of calls that must end well once the faults are over. A run in which nothing works proves nothing."""
LONG_REPEAT: Final = 20
AGAIN: Final = 0.02
"""The share of schedules that may have had no verdict at the first try."""
HUNG: Final = 0.002
"""The share of those in which somebody did not end in time. More of them would hide what hangs now and then; it is far below
`AGAIN`, which is for races that spare an anomaly."""
_FAULTS: Final = {"zombie": 1_000, "store-kill": 100, "power-loss": 40, "failover": 20}
_SCHEDULES: Final = 10_000
_LATE: Final = 1.0


class Figure(msgspec.Struct, kw_only=True):
    """One figure of a campaign, and what it must be."""

    name: str
    value: float
    goal: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    @property
    def text(self) -> str:
        bound = "at most" if self.at_most else "at least"
        return f"{self.name}: {self.value:,g} ({bound} {self.goal:,g}{'' if self.met else ': NOT MET'})"


def window(cell: str) -> str:
    """Where a fault strikes, whatever the store is: fault@point."""
    return cell.rpartition("/")[2]


def unreached(results: Iterable[Result], cells: Iterable[str]) -> list[str]:
    """Windows of these cells that no fault has hit."""
    hit = {window(each.cell) for each in results if each.bit}
    return sorted({window(cell) for cell in cells} - hit)


def well(results: Iterable[Result]) -> tuple[int, int]:
    """Calls that ended well after the faults were over, and all calls then."""
    found = list(results)
    return sum(each.well for each in found), sum(each.after for each in found)


def misfortunes(results: Iterable[Result]) -> dict[str, int]:
    """How often each fault has struck, those that missed left out. Schedules that were struck together by one misfortune of their server count as one."""
    found: dict[str, float] = defaultdict(float)
    for each in results:
        if each.bit:
            found[window(each.cell).partition("@")[0]] += 1 / each.together
    return {fault: round(times) for fault, times in found.items()}


def late(times: Sequence[float], *, share: float = 0.9) -> str:
    """Why these recoveries, in seconds beyond the lease and sorted, are too slow; empty when they are not, and for none."""
    found = quantile(times, share)
    if not times or found <= _LATE:
        return ""
    return f"{share:.0%} of the recoveries took up to {found:g} s beyond the lease: {_LATE:g} s is the limit"


def campaign(results: Sequence[Result], cells: Sequence[str], late: Sequence[float]) -> list[Figure]:
    """What a long run must reach; `late` are the seconds beyond the lease until a killed worker's effect was made."""
    struck = misfortunes(results)
    times = Counter(each.cell for each in results)
    fewest = min((times[cell] for cell in cells), default=0)
    return [
        Figure(name="schedules", value=len(results), goal=_SCHEDULES),
        *(Figure(name=name, value=struck.get(name, 0), goal=goal) for name, goal in _FAULTS.items()),
        Figure(name="schedules of each cell", value=fewest, goal=LONG_REPEAT),
        Figure(
            name="seconds beyond the lease until recovery, p99",
            value=round(quantile(late, 0.99), 3),
            goal=_LATE,
            at_most=True,
        ),
        Figure(name="recoveries measured", value=len(late), goal=100),
    ]
