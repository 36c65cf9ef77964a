"""From the ledger to a verdict, and from a verdict to agreement or not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from semel.testing.chaos.cells import Cell, Heir, Verdict
from semel.testing.chaos.expectations import kind_of
from semel.testing.chaos.ledger import Answer, Effect

__all__ = ["Result", "compare", "counts", "heir_of", "judge", "quantile", "recovery", "settled"]

KEYED = "keyed"


class Result(msgspec.Struct, kw_only=True):
    """One schedule, over."""

    cell: str
    verdict: Verdict
    heir: Heir
    agrees: bool
    problem: str = ""
    breach: str = ""
    """What is wrong besides its verdict for certain, whoever did not end: it is never played again."""
    effects: int = 0
    calls: int = 0
    after: int = 0
    """Calls that were made when the fault was over, and `well`, those of them that ended as they should."""
    well: int = 0
    bit: bool = False
    seconds: float = 0.0
    recovery: float | None = None
    """Seconds from the fault to the next effect, where a killed worker's effect was made by another one."""
    lease: float = 0.0
    store: str = ""
    number: int = 0
    together: int = 1
    """How many schedules were struck by the same misfortune of their server."""
    batch: str = ""
    """The lane whose schedules of this round those are."""
    again: bool = False
    """At the first try somebody did not end in time, or it ended better than its cell says: it was played once more."""
    first: str = ""
    """What was wrong at the first try, then."""
    hung: bool = False
    """It was that somebody did not end in time."""
    story: list[str] = []
    """What happened, for a schedule that disagrees."""


def counts(cell: Cell, effects: Sequence[Effect], wanted: Sequence[str]) -> dict[str, int]:
    """How often each effect happened. A keyed peer makes one effect of all calls with the same key."""
    found: dict[str, int] = {}
    for what in wanted:
        mine = [each for each in effects if each.what == what]
        found[what] = len({each.peer for each in mine}) if cell.mode == KEYED else len(mine)
    return found


def judge(
    cell: Cell,
    effects: Sequence[Effect],
    answers: Sequence[Answer],
    wanted: Sequence[str],
    *,
    survived: Answer | None = None,
) -> Verdict:
    """The worst that can be said of the key. `survived`: when rows were counted after the store's misfortune, and how many."""
    made = counts(cell, effects, wanted)
    told = [each for each in answers if not each.error]
    last = [each for each in answers if each.by == "judge"]
    if told and min(made.values()) == 0:
        return Verdict.LOST
    if survived is not None and not survived.attempt and any(each.at < survived.at for each in told):
        # It was told, and was gone; a later call has made it, once. Twice would be doubled.
        return Verdict.LOST if max(made.values()) == 1 else Verdict.DOUBLED
    if max(made.values()) > 1 or any(each.by == "judge" for each in effects):
        return Verdict.DOUBLED
    # A store that has forgotten the first result gives the next caller's to everybody from then on.
    if kind_of(cell) != "loss" and any(one.value != other.value for one, other in pairwise(told)):
        return Verdict.TORN
    if any(each.error == "OutcomeUnknown" for each in answers):
        return Verdict.UNKNOWN
    if last and last[-1].replayed and set(made.values()) == {1}:
        return Verdict.ONCE
    return Verdict.STUCK


def heir_of(answers: Sequence[Answer]) -> Heir:
    mine = [each for each in answers if each.by == "heir"]
    if not mine:
        return Heir.ANY
    match mine[-1]:
        case Answer(error="OutcomeUnknown"):
            return Heir.UNKNOWN
        case Answer(error=error) if error:
            return Heir.BUSY
        case Answer(replayed=True):
            return Heir.REPLAYED
    return Heir.RAN


def compare(cell: Cell, verdict: Verdict, heir: Heir, *, bit: bool) -> str:
    """Why the cell does not hold; empty when it does."""
    if not bit:
        return f"the fault did not strike: nothing reached {cell.point}"
    if verdict != cell.expected:
        return f"expected {cell.expected}, found {verdict}"
    if cell.heir is not Heir.ANY and heir is not cell.heir:
        return f"expected that the next caller {_said(cell.heir)}, found that it {_said(heir)}"
    return ""


def _said(heir: Heir) -> str:
    return {
        Heir.RAN: "runs it",
        Heir.REPLAYED: "gets a replay",
        Heir.UNKNOWN: "is told that the outcome is unknown",
        Heir.BUSY: "is told that it is in progress",
        Heir.ANY: "does not exist",
    }[heir]


def recovery(effects: Sequence[Effect], faults: Sequence[Answer]) -> float | None:
    """From the fault to the heir's effect."""
    mine = [each.at for each in effects if each.by == "heir"]
    return min(mine) - faults[0].at if mine and faults else None


def settled(cell: Cell, answers: Sequence[Answer]) -> tuple[int, int]:
    """Calls after the fault, and how many of them had a result, or heard what the policy says: that it is unknown."""
    # An heir that must find the key busy is a part of the fault: its zombie has not woken up.
    over = [
        each for each in answers if each.by == "judge" or (each.by == "heir" and cell.heir is not Heir.BUSY)
    ]
    return len(over), sum(not each.error or each.error == "OutcomeUnknown" for each in over)


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values. Of none there is none: nan, which is below no limit and above none."""
    return values[min(len(values) - 1, int(len(values) * share))] if values else float("nan")
