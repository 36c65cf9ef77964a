"""What must hold in every world, by the names of the reliability goals (docs/concepts/guarantees.md)."""

from __future__ import annotations

from collections import Counter, defaultdict

from semel.testing.simulation.world import World

__all__ = ["violations"]

_ONCE = frozenset({"keyed", "tx", "steps", "probe"})


def violations(world: World) -> list[str]:
    """Every broken promise of this world, in words; empty when all is well."""
    found = list(world.server.broken)
    found += _effects(world)
    found += _answers(world)
    found += _mismatches(world)
    found += _liveness(world)
    return found


def doubled(world: World) -> int:
    """Keys whose effect was made more than once."""
    return sum(count > 1 for count in _counts(world).values())


def _counts(world: World) -> Counter[str]:
    if world.plan.mode == "tx":
        scopes = Counter(key for key, _ in world.server.effects)
        return Counter({key.hex(): count for key, count in scopes.items()})
    return Counter(effect.key for effect in world.effects)


def _effects(world: World) -> list[str]:
    """I1: at most one effect per key where that is promised; no effect twice without a fault to blame."""
    plan, counts = world.plan, _counts(world)
    if not plan.faults or _is_once(world):
        return [
            f"I1: {count} effects for {key} in mode {plan.mode}" for key, count in counts.items() if count > 1
        ]
    return []


def _is_once(world: World) -> bool:
    plan = world.plan
    kinds = {fault.kind for fault in plan.faults}
    if plan.mode == "probe":
        # Authoritative, but a zombie may act between the look and the re-run; so may a store that forgot the claim.
        return not (kinds & {"pause", "pause-at-point", "failover", "clock", "late", "store-down", "cancel"})
    if plan.mode == "hold":
        return not plan.lossy
    return plan.mode in ("keyed", "tx", "steps")


def _answers(world: World) -> list[str]:
    """I2: no acknowledged result without its effect. I3: all who are told a result are told the same one."""
    found: list[str] = []
    values: dict[str, set[str]] = defaultdict(set)
    for answer in world.answers:
        if answer.value is not None and answer.kind in ("execute", "claim"):
            values[answer.key].add(answer.value)
    made = {effect.value for effect in world.effects}
    for key, told in values.items():
        if len(told) > 1 and not world.plan.lossy:
            found.append(f"I3: callers of {key} were told {sorted(told)}")
        if world.plan.mode != "tx" and not told <= made:
            found.append(f"I2: {sorted(told - made)} was told without an effect")
    return found


def _mismatches(world: World) -> list[str]:
    """I6: of two requests under one key only one is ever executed."""
    if world.plan.lossy:
        return []
    requests: dict[str, set[int]] = defaultdict(set)
    for effect in world.effects:
        requests[effect.key].add(effect.request)
    # A released failure without steps accepts another request (R14): then both may have run, one of them in vain.
    lenient = any(op.fails for ops in world.plan.workers for op in ops) or any(
        fault.kind == "cancel" for fault in world.plan.faults
    )
    return [
        f"I6: two requests ran under {key}" for key, seen in requests.items() if len(seen) > 1 and not lenient
    ]


def _liveness(world: World) -> list[str]:
    """I9: after the faults every key is answered or says that it is unknown, within a lease and a bit."""
    if world.finished_at is None:
        return ["I9: the world never came to rest"]
    found: list[str] = []
    for answer in world.answers:
        if answer.worker != "audit.1":
            continue
        fine = answer.value is not None or answer.error == "KeyMismatch"
        unknown = answer.error == "OutcomeUnknown" and world.plan.mode in ("hold", "probe")
        if not (fine or unknown or answer.replayed):
            found.append(f"I9: {answer.key} ended in {answer.error or 'nothing'}")
    return found
