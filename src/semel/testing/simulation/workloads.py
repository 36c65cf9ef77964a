"""What a world does, as parts that can be added: each later part of the product registers its own.

    register(Workload("outbox", plan=plan_of_outbox, calls={"publish": publish, "execute": publish}, checks=(no_gap,),
                      points=("relay.sent",), windows=frozenset({"kill-at-point@relay.sent"})))

    python -m semel.testing.simulation --load your.module --workload outbox --schedules 2000

A seed belongs to one workload, so that a new one changes no recorded seed of another. What a workload gets for nothing:
virtual time, kills, pauses, cancellations at points and awaits, the faulty network, the server's auditor, shrinking.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from semel.testing.simulation.plans import Op, Plan

if TYPE_CHECKING:
    from semel.testing.simulation.world import Answered, World

__all__ = ["Workload", "register", "workload_of", "workloads"]

Caller = Callable[["World", Any, Op, "Answered"], Awaitable[None]]


class Workload(msgspec.Struct, frozen=True):
    name: str
    plan: Callable[[int], Plan]
    """The plan of a seed, drawn from `Random(f"…/{seed}")` and nothing else; it says `workload=name`."""
    calls: Mapping[str, Caller]
    """By `Op.kind`: one call of one client through its worker's face; what it is told goes into the `Answered`. After the
    faults every key is asked for once more, by "execute"."""
    checks: tuple[Callable[[World], list[str]], ...] = ()
    """Invariants of this workload's own, each line "NAME: what was broken"; the core's hold for all."""
    points: tuple[str, ...] = ()
    """Fault points that its plans aim at."""
    windows: frozenset[str] = frozenset()
    """Names in `World.reached` (a point, a fault, "fault@point", "fault@verb"): a run in which one was never hit is invalid."""
    shows: tuple[str, ...] = ()
    """Where a mode promises less, what it must have shown ("retry doubled", "hold unknown"): else the faults did not bite."""

    def drawn(self, seed: int) -> Plan:
        """The plan of a seed. ValueError if it is another workload's, which would play without the calls and checks of this one."""
        plan = self.plan(seed)
        if plan.workload != self.name:
            raise ValueError(
                f"the plan function of {self.name!r} made a plan with workload={plan.workload!r} of seed {seed}: it must say "
                f"workload={self.name!r}"
            )
        return plan


_registered: dict[str, Workload] = {}


def register(workload: Workload) -> None:
    """Make a workload known to plans, runner and command line. A name is taken once."""
    if _registered.setdefault(workload.name, workload) is not workload:
        raise ValueError(f"there is a workload {workload.name!r} already: choose another name")


def workload_of(name: str) -> Workload:
    try:
        return _registered[name]
    except KeyError:
        raise ValueError(f"no workload {name!r}; there are {', '.join(sorted(_registered))}") from None


def workloads() -> tuple[str, ...]:
    return tuple(_registered)
