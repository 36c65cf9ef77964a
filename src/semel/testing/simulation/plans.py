"""One schedule as data: who calls what, how long things take, and what goes wrong. Made from a seed, shrunk by hand."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

__all__ = ["FAULTS", "MODES", "Fault", "Op", "Plan", "plan_of"]

Mode = Literal["retry", "hold", "probe", "keyed", "tx", "steps"]
MODES: tuple[Mode, ...] = ("retry", "hold", "probe", "keyed", "tx", "steps")
FAULTS = (
    "kill",
    "kill-at-point",
    "pause",
    "pause-at-point",
    "cancel",
    "lose-request",
    "lose-reply",
    "double",
    "late",
    "store-down",
    "failover",
    "clock",
)
NETWORK = frozenset({"lose-request", "lose-reply", "double", "late"})
POINTS = (
    "claim.sent",
    "claim.won",
    "run.started",
    "run.returned",
    "settle.sent",
    "settle.stored",
    "renew.sent",
    "step.returned",
)


class Op(msgspec.Struct, frozen=True):
    """One call of one client."""

    key: str
    after: float
    work: float
    wait: float
    request: int = 0
    fails: bool = False
    kind: Literal["execute", "consume", "claim", "forget", "reconcile", "purge"] = "execute"


class Fault(msgspec.Struct, frozen=True):
    """What goes wrong: `worker` is hit at virtual time `at`, at the `nth` store call, or at the `nth` pass of `point`."""

    kind: str
    worker: int = 0
    at: float = 0.0
    span: float = 0.0
    nth: int = 1
    point: str = ""


class Plan(msgspec.Struct, frozen=True):
    seed: int
    mode: Mode
    lease: float
    latency: float
    workers: tuple[tuple[Op, ...], ...]
    faults: tuple[Fault, ...]

    @property
    def lossy(self) -> bool:
        """The store forgets writes that it had acknowledged: the last column of the guarantee table."""
        return any(fault.kind == "failover" for fault in self.faults)

    @property
    def clocked(self) -> bool:
        return any(fault.kind == "clock" for fault in self.faults)


def plan_of(seed: int) -> Plan:
    rng = Random(f"plan/{seed}")  # noqa: S311 - repeatable on purpose
    mode = MODES[seed % len(MODES)]
    lease = rng.choice((0.5, 1.0, 2.0))
    keys = [f"k{number}" for number in range(rng.choice((1, 1, 2)))]
    workers = tuple(
        tuple(_op(rng, keys, lease, mode) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(2, 3))
    )
    faults = tuple(_fault(rng, len(workers), lease) for _ in range(rng.choice((0, 1, 1, 2, 2, 3))))
    return Plan(seed, mode, lease, rng.choice((0.001, 0.01, 0.05)), workers, faults)


def _op(rng: Random, keys: list[str], lease: float, mode: Mode) -> Op:
    kind = rng.choices(("execute", "consume", "claim", "purge", "reconcile"), (70, 10, 10, 5, 5))[0]
    return Op(
        key=rng.choice(keys),
        after=rng.expovariate(4) if rng.random() < 0.7 else 0.0,
        work=rng.choice((0.0, 0.01, lease * 0.5, lease * 1.5)),
        wait=rng.choice((0.0, lease, 10 * lease)),
        request=1 if rng.random() < 0.08 else 0,
        fails=rng.random() < 0.12 and mode not in ("hold", "probe"),
        kind=kind,  # type: ignore[arg-type]
    )


def _fault(rng: Random, workers: int, lease: float) -> Fault:
    kind = rng.choices(FAULTS, (8, 12, 6, 10, 8, 8, 12, 8, 8, 6, 4, 4))[0]
    worker, at = rng.randrange(workers), rng.uniform(0, 3 * lease)
    match kind:
        case "kill" | "cancel":
            return Fault(kind, worker, at)
        case "kill-at-point":
            return Fault(kind, worker, nth=rng.randint(1, 2), point=rng.choice(POINTS))
        case "pause":
            return Fault(kind, worker, at, rng.uniform(0.5, 4) * lease)
        case "pause-at-point":
            return Fault(
                kind,
                worker,
                span=rng.uniform(1.1, 4) * lease,
                nth=rng.randint(1, 2),
                point=rng.choice(POINTS),
            )
        case "store-down":
            return Fault(kind, at=at, span=rng.uniform(0.1, 2) * lease)
        case "failover":
            return Fault(kind, at=at, span=rng.uniform(0.1, 2) * lease)
        case "clock":
            return Fault(kind, at=at, span=rng.choice((-1, 1)) * rng.uniform(0.5, 3) * lease)
        case _:
            return Fault(kind, worker, nth=rng.randint(1, 8))
