"""What callers were told, held against what happened: flags, refs, doubts, and how long it took them."""

from __future__ import annotations

from semel.testing.simulation.clients import CALLS
from semel.testing.simulation.plans import NETWORK, Plan
from semel.testing.simulation.workloads import workload_of
from semel.testing.simulation.world import Answered, World

__all__ = ["misled"]

_ASKED = ("execute", "consume", "claim")
_CANCELS = frozenset({"cancel", "cancel-at-point", "cancel-at-await"})
_MANY = 45
"""Messages, each of which takes the latency on average: what needs nine of them takes that long once in 10^11 times."""


def misled(world: World) -> list[str]:
    """Every answer that is not borne out, in words. For calls of the core's clients only: another workload's are its own."""
    if workload_of(world.plan.workload).calls is not CALLS:
        return []
    asked = [answer for answer in world.answers if answer.op.kind in _ASKED]
    return [
        text
        for check in (_flags, _refs, _second_thoughts, _doubts, _lost_steps, _slow_cancels, _slow_waiters)
        for text in check(world, asked)
    ]


def _flags(world: World, asked: list[Answered]) -> list[str]:
    """R2: `replayed` is said to those, and only to those, who did not run the function."""
    return [
        f"R2: a caller of {answer.op.name} was told {'a replay, and had' if answer.replayed else 'that it ran it, and had not'}"
        for answer in asked
        if not answer.error and answer.replayed == (answer.call in world.executed)
    ]


def _refs(world: World, asked: list[Answered]) -> list[str]:
    """R25: the id that a run minted is its ref, for everybody who is told its result."""
    if not world.plan.ids:
        return []
    auditor, plan = world.server.auditor, world.plan
    words = {world.decoded(word) for word in auditor.words}
    anew = (
        plan.lossy or plan.retention is not None
    )  # then a key may be used twice, with one and the same effect at the peer
    first: dict[str, str | None] = {}
    found: list[str] = []
    for answer in asked:
        if answer.error or answer.op.kind != "execute" or answer.value is None or answer.value in words:
            continue
        another = first.setdefault(answer.value, answer.ref) != answer.ref
        if answer.ref is None or (another and not anew and answer.op.name not in auditor.freed):
            found.append(
                f"R25: a caller of {answer.op.name} was told {answer.value} with the ref {answer.ref}"
            )
    return found


def _second_thoughts(world: World, asked: list[Answered]) -> list[str]:
    """I3: after somebody was told that it is done, nobody is told otherwise."""
    plan, freed = world.plan, world.server.auditor.freed
    if plan.lossy or plan.retention is not None:
        return []
    done_at: dict[str, float] = {}
    for answer in asked:
        if not answer.error:
            done_at[answer.op.name] = min(answer.at, done_at.get(answer.op.name, answer.at))
    return [
        f"I3: a caller of {answer.op.name} was told {answer.error} after it had been told as done"
        for answer in asked
        if answer.error in ("OutcomeUnknown", "PreviousFailure", "Flaw")
        and answer.op.name not in freed
        and answer.began > done_at.get(answer.op.name, answer.began)
    ]


def _doubts(world: World, asked: list[Answered]) -> list[str]:
    """I10: who is told that a key is unknown is told what the store says, or a step that is held."""
    if world.plan.step == "hold":
        return []
    return [
        f"I10: a caller of {answer.op.name} was told that it is unknown, which the store had not said"
        for answer in asked
        if answer.error == "OutcomeUnknown" and answer.op.name not in world.server.auditor.doubtful
    ]


def _lost_steps(world: World, asked: list[Answered]) -> list[str]:
    """R26: a step that was made is noted, though one message is lost or its caller is cancelled meanwhile."""
    del asked
    plan = world.plan
    if len(plan.faults) != 1 or not plan.kinds <= _CANCELS | NETWORK or not _is_quick(plan):
        return []
    return [
        f"R26: a step {name} of {op.name} was made and not noted"
        for op, nonce, name in world.made
        if (nonce, name) not in world.server.auditor.noted_by
    ]


def _slow_cancels(world: World, asked: list[Answered]) -> list[str]:
    """R10: a cancelled run is decided on at once, not when its lease is over."""
    plan, ended_at = world.plan, world.server.auditor.ended_at
    if len(plan.faults) != 1 or not plan.kinds <= _CANCELS or not _is_quick(plan):
        return []
    return [
        f"R10: a cancelled run of {answer.op.name} was left to its lease"
        for answer in asked
        if answer.error == "CancelledError"
        and (nonce := world.executed.get(answer.call)) is not None
        and ended_at.get(nonce, answer.at + 2_000_000.0) - 1_000_000.0 > answer.at
    ]


def _slow_waiters(world: World, asked: list[Answered]) -> list[str]:
    """R30 and R3 where nothing went wrong: the settle wakes who waits, and nobody waits longer than he said."""
    plan = world.plan
    if plan.faults or plan.clocks or not _is_quick(plan):
        return []
    settled, most = world.server.auditor.settled, _MANY * plan.latency
    done_at = {
        (name, world.decoded(result)): when - 1_000_000.0
        for (name, result), when in settled.items()
        if result
    }
    found = [
        f"R3: a caller of {answer.op.name} waited {answer.at - answer.began:.3f} s instead of {answer.op.wait:g}"
        for answer in asked
        if answer.error == "InProgress" and answer.at - answer.began > answer.op.wait + most
    ]
    if not plan.notifies or plan.retention is not None:
        return found
    return found + [
        f"R30: a caller of {answer.op.name} slept on after the outcome was there"
        for answer in asked
        if answer.replayed
        and (when := done_at.get((answer.op.name, answer.value))) is not None
        and answer.at - max(when, answer.began) > most
    ]


def _is_quick(plan: Plan) -> bool:
    """Messages take next to nothing of a lease, or of the second after which a waiter looks by himself."""
    return plan.lease >= 1 and plan.latency <= 0.01
