"""When a run counts: the rules of reach for every run, and the figures of a long campaign. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from semel.testing.chaos.verdicts import Result, quantile

__all__ = [
    "AGAIN",
    "LONG_REPEAT",
    "WELL",
    "Figure",
    "campaign",
    "figures",
    "hangs",
    "hung_again",
    "late",
    "may_hang",
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
_HUNG: Final = 3
_ROUND: Final = 3_809
"""So many of so many schedules may have hung at the first try: the busy machine's, not the product's. It is far below `AGAIN`, which
is for races that spare an anomaly."""
_FAULTS: Final = {"zombie": 1_000, "store-kill": 100, "power-loss": 40, "failover": 20}
_SCHEDULES: Final = 10_000
_LATE: Final = 1.0


class Figure(msgspec.Struct, kw_only=True):
    """One figure of a campaign, and what it must be. What was not measured is None, and not met."""

    name: str
    value: float | None
    goal: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    @property
    def text(self) -> str:
        bound = "at most" if self.at_most else "at least"
        value = "not measured" if self.value is None else f"{self.value:,.10g}"
        return f"{self.name}: {value} ({bound} {self.goal:,g}{'' if self.met else ': NOT MET'})"


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


def hangs(results: Iterable[Result]) -> int:
    """How often somebody did not end in time at the first try. A batch in which one did not is over for all, and counts as one."""
    hung = [each for each in results if each.hung]
    batches = {(each.batch, each.number) for each in hung if each.batch}
    return len(batches) + sum(not each.batch for each in hung)


def may_hang(schedules: int) -> int:
    """How often that may be."""
    return max(_HUNG, _HUNG * schedules // _ROUND)


def hung_again(results: Sequence[Result]) -> list[str]:
    """Cells that hang more often than a busy machine explains: twice in a round, or in more than a tenth of many rounds."""
    hung = [each for each in results if each.hung]
    rounds = 1 + max((each.number for each in results), default=0)
    often = {
        cell for cell, times in Counter(each.cell for each in hung).items() if times > max(1, rounds // 10)
    }
    twice = {
        cell for (cell, _), times in Counter((each.cell, each.number) for each in hung).items() if times > 1
    }
    return sorted(often | twice)


def late(times: Sequence[float], *, share: float = 0.9) -> str:
    """Why these recoveries, in seconds beyond the lease and sorted, are too slow; empty when they are not, and for none."""
    found = quantile(times, share)
    if not times or found <= _LATE:
        return ""
    return f"{share:.0%} of the recoveries took up to {found:g} s beyond the lease: {_LATE:g} s is the limit"


def campaign(results: Sequence[Result], cells: Sequence[str], late: Sequence[float]) -> list[Figure]:
    """What a long run must reach; `late` are the seconds beyond the lease until a killed worker's effect was made."""
    times = Counter(each.cell for each in results)
    return figures(
        schedules=len(results),
        struck=misfortunes(results),
        fewest=min((times[cell] for cell in cells), default=0),
        late=round(quantile(late, 0.99), 3) if late else None,
        measured=len(late),
    )


def figures(
    *, schedules: int, struck: Mapping[str, int], fewest: int, late: float | None, measured: int
) -> list[Figure]:
    """The same of what was counted: `struck` by fault, `fewest` schedules of a cell, `late` as p99."""
    return [
        Figure(name="schedules", value=schedules, goal=_SCHEDULES),
        *(Figure(name=name, value=struck.get(name, 0), goal=goal) for name, goal in _FAULTS.items()),
        Figure(name="schedules of each cell", value=fewest, goal=LONG_REPEAT),
        Figure(name="seconds beyond the lease until recovery, p99", value=late, goal=_LATE, at_most=True),
        Figure(name="recoveries measured", value=measured, goal=100),
    ]
