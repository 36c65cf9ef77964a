"""Schedules of one process whose leader gives up: those who follow it, and those who come when its key is free again."""

from __future__ import annotations

from random import Random

from semel.testing.simulation.plans import POINTS, Fault, Mode, Op, Plan

__all__ = ["leads_plan_of"]


def leads_plan_of(seed: int) -> Plan:
    """The first caller of a key is cancelled at a time, a point or an await; others of its own worker share what it asks."""
    rng = Random(f"leads/{seed}")  # noqa: S311 - repeatable on purpose
    mode: Mode = rng.choice(("retry", "keyed", "tx", "steps", "hold"))
    lease = 2.0
    kinds = ("execute", "execute", "claim", "consume")
    leader = Op("k0", 0.0, rng.choice((0.01, 0.3, 0.6)), 0.0, kind=rng.choice(kinds))
    followers = tuple(
        Op("k0", rng.uniform(0.0, 0.4), 0.01, rng.choice((0.0, 0.2, 10 * lease)), kind=rng.choice(kinds))
        for _ in range(rng.randint(0, 2))
    )
    late = tuple(
        Op("k0", rng.uniform(0.7, 3.0), 0.01, rng.choice((0.0, 0.0, 0.2)), kind=rng.choice(kinds))
        for _ in range(rng.randint(1, 2))
    )
    elsewhere = (Op("k0", rng.uniform(1.0, 4.0), 0.01, 10 * lease),)
    return Plan(
        seed,
        mode,
        lease,
        rng.choice((0.001, 0.01)),
        ((leader, *followers, *late), elsewhere),
        (_cancellation(rng),),
        batches=rng.random() < 0.2,
        workload="leads",
        posts=rng.random() < 0.5,
    )


def _cancellation(rng: Random) -> Fault:
    match rng.randrange(3):
        case 0:
            return Fault("cancel", at=rng.uniform(0.0, 0.6))
        case 1:
            return Fault("cancel-at-point", point=rng.choice(POINTS[:6]))
        case _:
            return Fault("cancel-at-await", nth=rng.randint(2, 8))
