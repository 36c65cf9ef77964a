"""Whether a run proves anything: every window was hit, calls ended once the faults had stopped, histories were decided.

And as many schedules were played as were wanted: a campaign that stopped before is not that campaign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.testing.simulation.plans import FAULTS, NETWORK
from semel.testing.simulation.workloads import workload_of

if TYPE_CHECKING:
    from semel.testing.simulation.runner import Report
    from semel.testing.simulation.world import Answered, World

__all__ = ["CLASSES", "LEAST_ENDED", "MOST_UNDECIDED", "class_of", "ended_share", "is_struck", "shortcomings"]

LEAST_ENDED = 0.9
"""Of the calls that began after the last fault had ended: a value, or a final word of the rulings."""
MOST_UNDECIDED = 0.001
"""Of the histories: those whose search for an order was given up as too long."""

CLASSES = ("value", "ruled", "refused")
# Final by the rulings: asking again changes nothing, or (the function's own failure) is its caller's affair.
_RULED = frozenset({"KeyMismatch", "PreviousFailure", "KeyExpired", "OutcomeUnknown", "Flaw"})
# A person's word on a key that takes none (R13) is refused for good as well.
_WORDS = frozenset({"resolve", "forget"})
_TROUBLES = NETWORK | FAULTS.keys()
_LOOKED_AT = 50  # plans of a workload, to know whether its histories must have an order


def class_of(answer: Answered) -> str:
    """value: it was told what it asked for. ruled: it was told a final outcome. refused: it has to ask again."""
    if not answer.error:
        return "value"
    final = answer.error in _RULED or (
        answer.op.kind in _WORDS and answer.error in ("ConfigurationError", "InProgress")
    )
    return "ruled" if final else "refused"


def ended_share(answers: dict[str, int]) -> float:
    """The share of calls that ended with a value or a final word; refusals are the rest."""
    every = sum(answers.values())
    return 1.0 - answers.get("refused", 0) / every if every else 0.0


def is_struck(world: World) -> bool:
    """Whether a fault of its plan hit something."""
    return any(name.partition("@")[0] in _TROUBLES for name in world.reached)


def shortcomings(report: Report, workload: str, *, wanted: int = 1) -> list[str]:
    """Why this run proves nothing, in words; empty when it is valid. `wanted`: how many schedules it must have played."""
    if not report.schedules:
        return ["no schedule was played"]
    found: list[str] = []
    known = workload_of(workload)
    if report.schedules < wanted:
        found.append(f"only {report.schedules:,} of {wanted:,} schedules were played")
    missed = sorted(name for name in known.windows if not report.reached.get(name))
    if missed:
        found.append(f"{len(missed)} of {len(known.windows)} windows were never hit: {', '.join(missed)}")
    if (share := ended_share(report.after)) < LEAST_ENDED:
        found.append(
            f"after the faults only {share:.1%} of the calls ended, {LEAST_ENDED:.0%} must: {report.after}"
        )
    if not report.histories and any(known.plan(seed).has_order for seed in range(_LOOKED_AT)):
        found.append("no history was searched for an order of decisions")
    if report.undecided > MOST_UNDECIDED * max(report.histories, 1):
        found.append(f"{report.undecided} of {report.histories} histories were too long to be decided")
    counted = {"doubled": report.doubled, "unknown": report.unknown}
    for shown in known.shows:
        mode, _, anomaly = shown.partition(" ")
        if not counted[anomaly].get(mode):
            found.append(f"mode {mode} never showed what it does not promise: no key was {anomaly}")
    return found
