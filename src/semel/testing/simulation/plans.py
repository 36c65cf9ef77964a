"""One schedule as data: who calls what, how long things take, and what goes wrong. Made from a seed, shrunk by hand."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

__all__ = [
    "FAULTS",
    "MODES",
    "NETWORK",
    "ON_ERROR",
    "POINTS",
    "Fault",
    "Mode",
    "Op",
    "Plan",
    "beats_plan_of",
    "cancels_plan_of",
    "plan_from",
    "plan_of",
    "resets_plan_of",
    "straggler_plan_of",
    "sync_plan_of",
]

Mode = Literal["retry", "hold", "probe", "keyed", "tx", "steps"]
MODES: tuple[Mode, ...] = ("retry", "hold", "probe", "keyed", "tx", "steps")
# Kind of fault → how often it is drawn.
FAULTS: dict[str, int] = {
    "kill": 8,
    "kill-at-point": 12,
    "pause": 6,
    "pause-at-point": 10,
    "cancel": 4,
    "cancel-at-point": 8,
    "cancel-at-await": 6,
    "lose-request": 6,
    "lose-reply": 8,
    "reset-request": 5,
    "reset-reply": 8,
    "double": 8,
    "late": 8,
    "lose-wake": 4,
    "store-down": 6,
    "failover": 4,
    "clock": 4,
    "worker-clock": 0,  # drawn apart, so that what other faults a seed means does not depend on it
}
# `reset-late` is drawn in plans of its own: the others' seeds mean what they meant before it was known.
NETWORK = frozenset(
    {"lose-request", "lose-reply", "reset-request", "reset-reply", "reset-late", "double", "late"}
)
POINTS = (
    "claim.sent",
    "claim.won",
    "run.started",
    "run.returned",
    "settle.sent",
    "settle.stored",
    "renew.sent",
    "step.started",
    "step.returned",
    "step.stored",
    "wait.parked",
)
_SHAPES: dict[str, int] = {
    "plain": 53,
    "storm": 10,
    "repair": 16,
    "names": 8,
    "brief": 10,
    "stale": 3,
    "beat": 4,
}
_PLAIN: dict[str, int] = {"execute": 72, "consume": 8, "claim": 8, "purge": 4, "reconcile": 4, "peek": 4}
_REPAIR: dict[str, int] = {
    "execute": 50,
    "claim": 6,
    "resolve": 18,
    "forget": 10,
    "reconcile": 6,
    "purge": 6,
    "history": 4,
}
# What a call says about a known failure: the words of `on_error`, `Release(after=…)`, a callable, one that fails itself.
ON_ERROR = ("", "release", "hold", "replay", "after", "callable", "broken")
# Which call's own `on_unknown` may differ from its world's: never a more lenient one where the mode promises something.
_POLICIES: dict[Mode, tuple[str, ...]] = {
    "retry": ("hold", "probe"),
    "hold": (),
    "probe": ("hold",),
    "keyed": ("hold", "probe"),
    "tx": ("hold", "probe"),
    "steps": ("hold",),
}
_STEPS: tuple[Literal["", "hold", "probe"], ...] = ("", "", "", "hold", "probe")
# Scopes that meet when a part is left out, or when parts are joined by a separator.
_NAMES = (("t", "x", "k"), ("u", "x", "k"), ("t", "x", "y:k"), ("t", "x:y", "k"))


class Op(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of one client."""

    key: str
    after: float
    work: float
    wait: float
    request: int = 0
    fails: bool = False
    """Its function raises before it has had an effect."""
    on_error: str = ""
    """What its caller says about that: one of ON_ERROR."""
    labels: str = ""
    kind: str = "execute"
    tenant: str = "default"
    operation: str = "default"
    policy: str = ""
    """This call's own `on_unknown`, where it is not the world's."""
    word: Literal["value", "error", "release"] = "value"
    """What a resolver says."""

    @property
    def name(self) -> str:
        return f"{self.tenant}/{self.operation}/{self.key}"


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """What goes wrong: `worker` is hit at virtual time `at`, at its `nth` store call, pass of `point`, or await."""

    kind: str
    worker: int = 0
    at: float = 0.0
    span: float = 0.0
    nth: int = 1
    point: str = ""


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """A whole world: `batches`, `cache` and `notifies` switch layers and abilities of the simulated store.

    `step` is the `on_unknown` of the charging step in mode steps (empty: retry, with a key for the peer); `ids` mints a
    public id in every run; `doubts` makes probes undecided now and then; `warns` is on_lease_lost="warn".
    """

    seed: int
    mode: Mode
    lease: float
    latency: float
    workers: tuple[tuple[Op, ...], ...]
    faults: tuple[Fault, ...]
    retention: float | None = None
    batches: bool = False
    cache: bool = False
    notifies: bool = True
    tombstone: float = 0.0
    purge_every: float | None = None
    step: Literal["", "hold", "probe"] = ""
    ids: bool = False
    doubts: bool = False
    warns: bool = False
    colour: Literal["async", "sync"] = "async"
    workload: str = "core"
    clocks: tuple[tuple[float, float], ...] = ()
    """Each worker's own clock: seconds by which it is off, and how fast it goes. Empty: all are right."""
    posts: bool = False
    """The store has a quick way (`semel.posting`), as Redis has."""

    @property
    def lossy(self) -> bool:
        """The store forgets writes that it had acknowledged: the last column of the guarantee table."""
        return any(fault.kind == "failover" for fault in self.faults)

    @property
    def has_order(self) -> bool:
        """Whether some order of decisions must explain its history: what was lost, or swept away and is due again, has none."""
        sweeps = self.purge_every or any(op.kind == "purge" for ops in self.workers for op in ops)
        return not self.lossy and not (sweeps and _steps_back(self.faults))

    @property
    def slowest(self) -> float:
        """How fast the slowest of all clocks goes; the auditor's is right."""
        return min(1.0, *(rate for _, rate in self.clocks), 1.0)

    @property
    def kinds(self) -> set[str]:
        return {fault.kind for fault in self.faults}


def plan_from(text: str) -> Plan:
    """A plan as a failure prints it. ValueError when it is none."""
    try:
        return msgspec.json.decode(text, type=Plan)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is no plan: {error}") from error


def plan_of(seed: int) -> Plan:
    """The plan of the core workload for this seed."""
    rng = Random(f"plan/{seed}")  # noqa: S311 - repeatable on purpose
    mode = MODES[seed % len(MODES)]
    lease = rng.choice((0.5, 1.0, 2.0))
    shape = _drawn(rng, _SHAPES)
    if shape == "beat":
        return _beat(rng, seed, mode)
    workers = _workers(rng, shape, lease, mode)
    faults = tuple(_fault(rng, len(workers), lease) for _ in range(rng.choice((0, 1, 1, 2, 2, 3))))
    clocks, jumps = _clocks(Random(f"clocks/{seed}"), len(workers), lease)  # noqa: S311 - repeatable on purpose
    brief = shape == "brief"
    return Plan(
        seed=seed,
        mode=mode,
        lease=lease,
        latency=rng.choice((0.001, 0.01, 0.05)),
        workers=workers,
        faults=faults + jumps,
        retention=rng.choice((0.5, 1.5)) * lease if brief else None,
        batches=rng.random() < 0.2,
        cache=rng.random() < 0.2 or shape == "stale",
        notifies=rng.random() < 0.8,
        # Not under a clock that steps back: a body that a purge has taken away does not come back with the time.
        tombstone=(rng.choice((0.0, 1.0, 3.0)) if brief else 0.0) * lease * (not _steps_back(faults)),
        purge_every=lease if brief and rng.random() < 0.3 else None,
        step=rng.choice(_STEPS) if mode == "steps" else "",
        ids=mode == "steps" and rng.random() < 0.3,
        doubts=rng.random() < 0.15,
        warns=rng.random() < 0.1,
        clocks=clocks,
        posts=_posts(seed),
    )


def _clocks(
    rng: Random, workers: int, lease: float
) -> tuple[tuple[tuple[float, float], ...], tuple[Fault, ...]]:
    """Workers whose clocks are off, too fast or too slow (R20: nobody notices), and now and then one that jumps."""
    if rng.random() >= 0.25:
        return (), ()
    clocks = tuple((rng.uniform(-3600, 3600), rng.uniform(0.8, 1.25)) for _ in range(workers))
    if rng.random() >= 0.3:
        return clocks, ()
    span = rng.choice((-1, 1)) * rng.uniform(0.5, 3) * lease
    return clocks, (Fault("worker-clock", rng.randrange(workers), rng.uniform(0, 3 * lease), span),)


def _posts(seed: int) -> bool:
    return Random(f"posts/{seed}").random() < 0.5  # noqa: S311 - repeatable on purpose


def _steps_back(faults: tuple[Fault, ...]) -> bool:
    return any(fault.kind == "clock" and fault.span < 0 for fault in faults)


def sync_plan_of(seed: int) -> Plan:
    """The same for callers of `Semel`. A thread cannot be cancelled, and its calls do not share a tick."""
    plan = plan_of(seed)
    faults = tuple(fault for fault in plan.faults if not fault.kind.startswith("cancel"))
    return msgspec.structs.replace(
        plan, faults=faults, batches=False, posts=False, colour="sync", workload="sync"
    )


def straggler_plan_of(seed: int) -> Plan:
    """A claim arrives after its caller gave up, and after somebody else has had the key and freed it."""
    if seed % 3 == 2:
        return _given_back_plan_of(seed)
    rng = Random(f"stragglers/{seed}")  # noqa: S311 - repeatable on purpose
    mode: Mode = rng.choice(("retry", "hold", "probe", "keyed"))
    lease = 2.0
    given_up = Op("k0", rng.uniform(0.0, 0.1), 0.0, 0.0, kind=rng.choice(("execute", "claim", "consume")))
    between = Op("k0", rng.uniform(0.3, 0.7), rng.choice((0.0, 0.05)), 0.0, fails=True, on_error="release")
    last = Op("k0", rng.uniform(0.3, 0.9), 0.01, rng.choice((0.0, 10 * lease)))
    workers = ((given_up,), (between,) if rng.random() < 0.5 else (between, last))
    late = Fault("late", 0, nth=1)
    latency = rng.choice((0.001, 0.01))
    return Plan(seed, mode, lease, latency, workers, (late,), workload="stragglers", posts=_posts(seed))


def _given_back_plan_of(seed: int) -> Plan:
    """An owner is killed. Whoever takes over never hears of it and gives up; then somebody comes with another request."""
    rng = Random(f"stragglers/{seed}")  # noqa: S311 - repeatable on purpose
    mode: Mode = rng.choice(("retry", "keyed", "tx", "steps"))
    lease = 0.5
    owner = Op("k0", 0.0, 1.0, 0.0)
    taker = Op("k0", rng.uniform(1.2, 1.5), 0.0, 0.0, kind=rng.choice(("execute", "claim", "consume")))
    other = Op("k0", rng.uniform(2.2, 2.8), 0.0, rng.choice((0.0, 10 * lease)), request=1)
    lost = Fault(rng.choice(("late", "lose-reply")), 1, nth=1)
    faults = (Fault("kill", 0, rng.uniform(0.05, 0.6)), lost)
    latency = rng.choice((0.001, 0.01))
    return Plan(
        seed,
        mode,
        lease,
        latency,
        ((owner,), (taker, other)),
        faults,
        workload="stragglers",
        posts=_posts(seed),
    )


def resets_plan_of(seed: int) -> Plan:
    """A connection is reset under a request that arrives all the same, after its second copy was answered.

    One schedule of two is about nothing else: the claim, somebody who has the key meanwhile and frees it, and somebody who
    comes last. The others are the core's, with this fault besides.
    """
    rng = Random(f"resets/{seed}")  # noqa: S311 - repeatable on purpose
    sync = rng.random() < 0.25
    if rng.random() < 0.5:
        plan = sync_plan_of(seed) if sync else plan_of(seed)
        reset = Fault("reset-late", rng.randrange(len(plan.workers)), nth=rng.randint(1, 6))
        return msgspec.structs.replace(plan, faults=(*plan.faults, reset), workload="resets")
    mode: Mode = rng.choice(("retry", "hold", "probe", "keyed"))
    lease = 2.0
    kind = rng.choice(("execute", "claim", "consume"))
    # Either somebody has the key already, or it is won and freed, and then somebody has it and frees it, too.
    won = rng.random() < 0.3
    first = Op(
        "k0",
        rng.uniform(0.0, 0.02) if won else rng.uniform(0.05, 0.15),
        0.0,
        rng.choice((0.0, 0.0, 0.1, 10 * lease)),
        request=int(not won and rng.random() < 0.2),
        fails=won,
        on_error="release" if won else "",
        kind=kind,
    )
    holder = Op(
        "k0", rng.uniform(0.15, 0.3) * won, rng.uniform(0.1, 0.4), 0.0, fails=True, on_error="release"
    )
    last = Op("k0", rng.uniform(0.3, 0.9), 0.01, rng.choice((0.0, 10 * lease)))
    workers = ((first,), (holder,) if rng.random() < 0.5 else (holder, last))
    return Plan(
        seed,
        mode,
        lease,
        rng.choice((0.001, 0.01)),
        workers,
        (Fault("reset-late", 0, nth=1),),
        colour="sync" if sync else "async",
        workload="resets",
        posts=not sync and _posts(seed),
    )


def beats_plan_of(seed: int) -> Plan:
    """Runs of one worker whose heartbeats travel together, and of which one or two are overtaken while it stands still."""
    rng = Random(f"beats/{seed}")  # noqa: S311 - repeatable on purpose
    mode: Mode = rng.choice(("retry", "keyed", "tx"))
    lease = 1.0
    names = [f"k{number}" for number in range(rng.choice((2, 2, 3)))]
    runs = tuple(Op(name, 0.0, lease * rng.uniform(4, 6), 0.0) for name in names)
    heirs = tuple(
        Op(name, rng.uniform(0.1, 0.5), lease * rng.choice((0.01, 3.0)), 10 * lease)
        for name in rng.sample(names, rng.randint(1, len(names) - 1))
    )
    still = Fault("pause", 0, rng.uniform(0.5, 1.5) * lease, rng.uniform(1.1, 1.8) * lease)
    latency = rng.choice((0.001, 0.01))
    return Plan(
        seed, mode, lease, latency, (runs, heirs), (still,), warns=rng.random() < 0.3, workload="beats"
    )


def cancels_plan_of(seed: int) -> Plan:
    """One caller is cancelled, at a point or at an await, and somebody waits for its key. Nothing else goes wrong."""
    rng = Random(f"cancels/{seed}")  # noqa: S311 - repeatable on purpose
    mode = MODES[seed % len(MODES)]
    lease = 2.0
    kind = rng.choice(("execute", "execute", "claim", "consume"))
    victim = Op("k0", 0.0, rng.choice((0.0, 0.01, lease * 0.5)), 0.0, kind=kind)
    waiter = Op("k0", rng.uniform(0.0, 0.5), 0.01, 10 * lease)
    fault = Fault("cancel-at-point", 0, nth=rng.randint(1, 2), point=rng.choice(POINTS))
    if rng.random() < 0.4:
        fault = Fault("cancel-at-await", 0, nth=rng.randint(1, 12))
    return Plan(
        seed,
        mode,
        lease,
        rng.choice((0.001, 0.01)),
        ((victim,), (waiter,)),
        (fault,),
        step=rng.choice(_STEPS) if mode == "steps" else "",
        workload="cancels",
        posts=_posts(seed),
    )


def _drawn(rng: Random, weights: dict[str, int]) -> str:
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


def _workers(rng: Random, shape: str, lease: float, mode: Mode) -> tuple[tuple[Op, ...], ...]:
    if shape == "storm":
        # Many callers of one key at once: coalescing inside a worker, waiters in all of them.
        return tuple(
            tuple(_storm_op(rng, lease) for _ in range(rng.randint(3, 6))) for _ in range(rng.randint(1, 2))
        )
    if shape == "stale":
        return _stale_ops(rng)
    names = [("default", "default", f"k{number}") for number in range(rng.choice((1, 1, 2)))]
    if shape == "names":
        names = rng.sample(_NAMES, 3)
    most = 4 if shape in ("names", "brief", "repair") else 3
    return tuple(
        tuple(_op(rng, shape, names, lease, mode) for _ in range(rng.randint(1, most)))
        for _ in range(rng.randint(2, 3))
    )


def _op(rng: Random, shape: str, names: list[tuple[str, str, str]], lease: float, mode: Mode) -> Op:
    tenant, operation, key = rng.choice(names)
    kind = _drawn(rng, _REPAIR if shape == "repair" else _PLAIN)
    late = kind in ("resolve", "forget", "purge", "reconcile") or shape == "brief"
    after = rng.expovariate(4) if rng.random() < 0.7 else 0.0
    fails = rng.random() < 0.12
    own = _POLICIES[mode]
    return Op(
        key=key,
        after=after + (rng.uniform(0, 4 * lease) if late else 0.0),
        work=rng.choice((0.0, 0.01, lease * 0.5, lease * 1.5)),
        wait=rng.choice((0.0, lease, 10 * lease)),
        request=1 if rng.random() < (0.3 if shape == "brief" else 0.08) else 0,
        fails=fails,
        on_error=rng.choice(ON_ERROR) if fails else "",
        labels=rng.choice(("", "", "red", "blue")),
        kind=kind,
        tenant=tenant,
        operation=operation,
        policy=rng.choice(own) if own and rng.random() < 0.08 else "",
        word=rng.choice(("value", "error", "release")) if kind == "resolve" else "value",
    )


def _storm_op(rng: Random, lease: float) -> Op:
    fails = rng.random() < 0.15
    return Op(
        key="k0",
        after=rng.uniform(0, 0.02) if rng.random() < 0.6 else rng.uniform(0, lease),
        work=rng.choice((0.01, lease * 0.5, lease * 1.5)),
        wait=rng.choice((0.0, 10 * lease, 10 * lease, 10 * lease)),
        request=1 if rng.random() < 0.15 else 0,
        fails=fails,
        on_error=rng.choice(ON_ERROR) if fails else "",
        kind="execute" if rng.random() < 0.8 else "claim",
    )


def _stale_ops(rng: Random) -> tuple[tuple[Op, ...], ...]:
    """A worker has seen an outcome that another one forgets: how long will it replay it?"""

    def op(kind: str, soonest: float, latest: float) -> Op:
        return Op("k0", rng.uniform(soonest, latest), rng.choice((0.0, 0.01)), 1.0, kind=kind)

    reader = tuple(op("execute", *when) for when in ((0.0, 0.1), (0.2, 0.4), (0.6, 1.5), (1.5, 4.0)))
    return reader, (op("forget", 0.4, 0.9), op("execute", 0.0, 3.0))


def _beat(rng: Random, seed: int, mode: Mode) -> Plan:
    """One message of a long run is lost, and somebody waits for its lease to lapse: it must not."""
    lease = 2.0
    long_run = Op("k0", 0.0, lease * rng.uniform(1.2, 1.8), 0.0, kind=rng.choice(("execute", "claim")))
    waiter = Op("k0", rng.uniform(0.1, 0.6), 0.01, 10 * lease)
    lost = Fault(rng.choice(("lose-request", "lose-reply", "late")), 0, nth=rng.randint(1, 4))
    latency = rng.choice((0.001, 0.01))
    return Plan(seed, mode, lease, latency, ((long_run,), (waiter,)), (lost,), posts=_posts(seed))


def _fault(rng: Random, workers: int, lease: float) -> Fault:
    kind = _drawn(rng, FAULTS)
    worker, at = rng.randrange(workers), rng.uniform(0, 3 * lease)
    match kind:
        case "kill" | "cancel":
            return Fault(kind, worker, at, nth=rng.randint(1, 3))
        case "kill-at-point" | "cancel-at-point":
            return Fault(kind, worker, nth=rng.randint(1, 2), point=rng.choice(POINTS))
        case "cancel-at-await":
            return Fault(kind, worker, nth=rng.randint(1, 12))
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
        case "store-down" | "failover":
            return Fault(kind, at=at, span=rng.uniform(0.1, 2) * lease)
        case "clock":
            return Fault(kind, at=at, span=rng.choice((-1, 1)) * rng.uniform(0.5, 3) * lease)
        case _:
            return Fault(kind, worker, nth=rng.randint(1, 8))
