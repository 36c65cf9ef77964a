"""What must hold in every world, by the names of the reliability goals (I…), the rulings (R…) and the history check (H1).

The server's auditor finds what one change of a record breaks; here is what only the whole world shows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import inf

from semel.layers.cache import MOST_SECONDS
from semel.testing.simulation.answers import misled
from semel.testing.simulation.history import inexplicable
from semel.testing.simulation.leftovers import leftovers
from semel.testing.simulation.plans import NETWORK, Plan
from semel.testing.simulation.workloads import workload_of
from semel.testing.simulation.world import SETTLE_TIMEOUT, TIMEOUT, Answered, World

__all__ = ["CHECKS", "doubled", "violations"]

CHECKS = {
    "I1": "at most one effect per key where the mode promises it; in any mode without a fault to blame",
    "I2": "no acknowledged result without its effect",
    "I3": "everybody who is told a result is told the same one, and nobody is told otherwise afterwards",
    "I4": "no second owner within the lease of the first, by the store's clock; tokens of owners grow",
    "I5": "a fenced owner changes nothing; an outcome is never overwritten",
    "I6": "of two requests under one key one is executed, and nobody is told the other's result",
    "I7": "nobody is told a result of another tenant, operation or key",
    "I9": "after the faults every key is answered, or says that it is unknown; the world comes to rest",
    "I10": "a lost run under hold or probe never becomes a success, a failure or a re-run by time alone; nothing else is unknown",
    "I11": "nothing is told of a key whose time is over, and that it is over only when the store says so",
    "I14": "a purge removes nothing that is not over",
    "I15": "when its calls have ended, a worker holds no run, claim, paid debt, seat, lead or place of theirs",
    "R2": "who is told a replay did not run it, and who is told that he ran it did",
    "R3": "nobody waits much longer than he said he would",
    "R7": "a live run is never forgotten; labels, ref and history are told as they were stored",
    "R9": "a known failure means what on_error said; a delayed release is delayed",
    "R10": "a call ends as cancelled only if its own caller cancelled it; its key is decided on at once",
    "R13": "a person's word is taken on unknown or failed keys and lapsed runs only, once",
    "R14": "a released key blocks nobody",
    "R16": "a lost message locks no key: not against its own sender, not for good",
    "R17": "a lease is lost only to another owner, and who lost it is stopped",
    "R19": "a used key is known as used until its tombstone ends, and not after; a purge takes its body",
    "R25": "one id per scope, durable when it is known, told with every result",
    "R26": "a step that was made is noted; one that was noted, or begun under hold, is not run again",
    "R30": "where the store wakes, a waiter is told soon after the outcome is there",
    "R31": "a forgotten outcome is replayed from a cache for a second at most; nobody follows a leader that gave up",
    "H1": "some order of atomic decisions explains what every worker was told by the store",
}
_TOLD = ("execute", "claim")


def violations(world: World) -> list[str]:
    """Every broken promise of this world, in words; empty when all is well."""
    found = [*world.server.auditor.broken, *world.broken]
    for check in (
        _effects,
        _answers,
        _strangers,
        _requests,
        _losses,
        _stale,
        _over,
        _patience,
        _liveness,
        misled,
        _rest,
    ):
        found += check(world)
    for own in workload_of(world.plan.workload).checks:
        found += own(world)
    if not found and world.plan.has_order:
        told, world.histories, world.undecided = inexplicable(world.server.history)
        found += told
    return found


def doubled(world: World) -> int:
    """Keys whose effect was made more than once, though nobody had freed them and their retention was not over."""
    freed = world.server.auditor.freed
    if world.plan.retention is not None:
        return 0
    return sum(count > 1 and name not in freed for name, count in _counts(world).items())


def _counts(world: World) -> Counter[str]:
    if world.plan.mode == "tx":
        return Counter(name for name, _ in world.server.effects)
    return Counter(effect.name for effect in world.effects)


def _effects(world: World) -> list[str]:
    """I1. A key that a person freed, or whose retention is over, may rightly run again; a peer's key outlives that."""
    plan, freed = world.plan, world.server.auditor.freed
    outlives = plan.mode in ("keyed", "steps") and not plan.step
    return [
        f"I1: {count} effects for {name} in mode {plan.mode}"
        for name, count in _counts(world).items()
        if count > 1 and _is_once(world) and (outlives or (name not in freed and plan.retention is None))
    ]


def _is_once(world: World) -> bool:
    plan, kinds = world.plan, world.plan.kinds - {"lose-wake"}
    if plan.mode in ("keyed", "tx", "steps") and not plan.step:
        return True
    if plan.mode == "hold" or plan.step == "hold":
        return not plan.lossy
    if not kinds:
        # A renewal that took most of the lease is a fault too: of whoever chose so short a lease for so slow a network.
        return not (plan.lease <= 20 * plan.latency and world.server.auditor.overtaken)
    if plan.mode == "probe" or plan.step == "probe":
        # Authoritative, but a zombie may act between the look and the re-run; so may a store that forgot the claim.
        return not _has_zombies(plan)
    return _is_one_lost_message(world)


def _has_zombies(plan: Plan) -> bool:
    """A run may act after its lease, and after somebody looked for what it did."""
    return not plan.kinds - {"lose-wake"} <= {"kill", "kill-at-point", *NETWORK} - {"late"}


def _is_one_lost_message(world: World) -> bool:
    """It is repeated while the lease lasts: unseen, in every mode (R16, R17)."""
    plan = world.plan
    quick = plan.lease >= 2 and plan.latency <= 0.01
    return quick and len(plan.faults) == 1 and plan.kinds <= {"lose-request", "lose-reply", "double", "late"}


def _answers(world: World) -> list[str]:
    """I2 and I3."""
    found: list[str] = []
    told: dict[str, set[str]] = defaultdict(set)
    for answer in world.answers:
        if answer.error or answer.op.kind not in _TOLD:
            continue
        if answer.value is None:
            if (answer.op.name, b"") in world.server.auditor.settled:
                continue  # consume keeps no result
            found.append(f"I2: a caller of {answer.op.name} was told of an outcome without a value")
        else:
            told[answer.op.name].add(answer.value)
    made = _made(world)
    for name, values in told.items():
        again = name in world.server.auditor.freed or world.plan.retention is not None
        if len(values) > 1 and not world.plan.lossy and not again:
            found.append(f"I3: callers of {name} were told {sorted(values)}")
        if not values <= made:
            found.append(f"I2: {sorted(values - made)} was told without an effect")
    return found


def _made(world: World) -> set[str]:
    """Every value that an effect, or a person's word, stands behind."""
    made = {effect.value for effect in world.effects}
    results = set(world.server.auditor.words)
    if world.plan.mode == "tx":
        results |= {result for _, result in world.server.auditor.settled}
    return made | {value for value in map(world.decoded, results) if value is not None}


def _strangers(world: World) -> list[str]:
    """I7, and I6 for what is told: a value says by itself for whom and for which request it was made."""
    found: list[str] = []
    words = {world.decoded(word) for word in world.server.auditor.words}
    for answer in world.answers:
        if answer.error or answer.op.kind not in _TOLD or answer.value is None:
            continue
        name, _, rest = answer.value.partition("#")
        if name != answer.op.name:
            found.append(f"I7: a caller of {answer.op.name} was told {answer.value}")
        request = rest.partition("?")[2]
        told = world.plan.mode not in ("keyed", "steps", "probe") and answer.value not in words
        if told and request != str(answer.op.request):
            found.append(f"I6: a caller with request {answer.op.request} was told {answer.value}")
    return found


def _requests(world: World) -> list[str]:
    """I6: of two requests under one key only one is ever executed, and equal ones never conflict."""
    plan = world.plan
    asked: dict[str, set[int]] = defaultdict(set)
    lenient = set(world.server.auditor.freed)
    if _has_zombies(plan):
        lenient |= world.server.auditor.probed
    for op in (op for ops in plan.workers for op in ops):
        if op.kind in ("execute", "consume", "claim"):
            asked[op.name].add(op.request)
        if op.fails:
            # A released failure without steps accepts another request (R14): both may have run, one of them in vain.
            lenient.add(op.name)
    for answer in world.answers:
        asked[answer.op.name].add(
            answer.op.request if answer.op.kind in ("execute", "consume", "claim") else 0
        )
    found = [
        f"I6: an equal request under {answer.op.name} was refused as another one"
        for answer in world.answers
        if answer.error == "KeyMismatch" and len(asked[answer.op.name]) == 1
    ]
    if plan.lossy or plan.retention is not None or any(kind.startswith("cancel") for kind in plan.kinds):
        return found
    ran: dict[str, set[int]] = defaultdict(set)
    for effect in world.effects:
        ran[effect.name].add(effect.request)
    return found + [
        f"I6: two requests ran under {name}"
        for name, seen in ran.items()
        if len(seen) > 1 and name not in lenient
    ]


def _losses(world: World) -> list[str]:
    """R17: LeaseLost means that somebody else held the key, and one lost heartbeat gives it to nobody."""
    plan = world.plan
    if plan.lossy or plan.retention is not None:
        return []
    auditor = world.server.auditor
    overtaken = auditor.overtaken if _is_one_lost_message(world) else ()
    return [f"R17: {name} was taken from an owner who was alive" for name in sorted(overtaken)] + [
        f"R17: a caller of {answer.op.name} was told LeaseLost though nobody else ever held it"
        for answer in world.answers
        if answer.error == "LeaseLost"
        and len(auditor.owners.get(answer.op.name, ())) < 2
        and answer.op.name not in auditor.freed
    ]


def _stale(world: World) -> list[str]:
    """R31: what was forgotten is not replayed, but from a cache for a second."""
    auditor = world.server.auditor
    if world.plan.kinds & {"clock", "worker-clock", "failover"} or not auditor.forgotten:
        return []
    found: list[str] = []
    kept = MOST_SECONDS / world.plan.slowest  # by the clock of whoever keeps it
    for (name, result), when in auditor.forgotten.items():
        if auditor.settled.get((name, result), 0.0) > when or not result:
            continue
        gone, value = when - 1_000_000.0, world.decoded(result)
        found += [
            f"R31: a caller of {name} was told {value} after it was forgotten"
            for answer in world.answers
            if answer.op.name == name
            and answer.value == value
            and answer.replayed
            and answer.began > gone + kept + 10 * world.plan.latency
        ]
    return found


def _over(world: World) -> list[str]:
    """I11 for what is told from memory: a result is replayed for its retention, not longer and not shorter."""
    plan = world.plan
    if plan.retention is None or plan.kinds & {"clock", "worker-clock", "failover"}:
        return []
    late = MOST_SECONDS * (1 / plan.slowest - 1) + 10 * plan.latency
    if plan.kinds & {"store-down", *NETWORK}:
        late += (
            2 * TIMEOUT
        )  # a follower shares what its leader was told, whose cache then asked a store that was gone
    ends = {
        (name, world.decoded(result)): when - 1_000_000.0 + plan.retention
        for (name, result), when in world.server.auditor.settled.items()
    }
    over_at = world.server.auditor.over_at
    early = [
        f"I11: a caller of {answer.op.name} was told that its time is over, which the store had not said"
        for answer in world.answers
        if answer.error == "KeyExpired" and over_at.get(answer.op.name, inf) > 1_000_000.0 + answer.at
    ]
    return early + [
        f"I11: a caller of {answer.op.name} was told {answer.value} after its time"
        for answer in world.answers
        if answer.replayed
        and answer.value is not None
        and answer.began > ends.get((answer.op.name, answer.value), answer.began) + late
    ]


def _patience(world: World) -> list[str]:
    """R3, with room for what the faults of this plan take. Everybody counts by his own clock."""
    plan = world.plan
    trouble = sum(abs(fault.span) for fault in plan.faults)
    room = 4 * plan.lease + 3 * SETTLE_TIMEOUT + 10 * TIMEOUT + 40 * plan.latency + trouble
    return [
        f"R3: a caller of {answer.op.name} waited {answer.at - answer.began:.1f} s"
        for answer in world.answers
        if answer.at - answer.began > (answer.op.wait + 2 * answer.op.work + room) / plan.slowest
    ]


def _liveness(world: World) -> list[str]:
    """I9, I10 and the half of R16 that only time shows."""
    if world.finished_at is None:
        return ["I9: the world never came to rest"]
    found: list[str] = []
    failed = world.server.auditor.failed
    for answer in world.answers:
        name = answer.op.name
        if answer.error == "PreviousFailure" and name not in failed:
            found.append(f"I10: {name} was told as failed, which nobody had said")
        if answer.worker == "audit.1" and not _is_end(world, answer):
            found.append(f"I9: {name} ended in {answer.error or 'nothing'}")
        # The network's own copy of a claim may be granted after the first one was refused, when its sender has left. Copies
        # that we send follow a lost answer: those are released.
        doubled = name in world.server.granted_to_copies.values()
        if answer.error == "OutcomeUnknown" and not doubled and _never_began(world, name):
            found.append(f"R16: {name} is unknown though nobody ever ran it")
    return found


def _rest(world: World) -> list[str]:
    """I15. A world that never came to rest is told as such, and not for what it still holds."""
    return [] if world.finished_at is None else leftovers(world)


def _is_end(world: World, answer: Answered) -> bool:
    if answer.value is not None or answer.replayed or answer.error in ("KeyMismatch", "PreviousFailure"):
        return True
    plan = world.plan
    if answer.error == "KeyExpired":
        return plan.tombstone > 0
    # A probe that has no doubts decides, unless somebody said that this very key is to be held.
    held = plan.mode == "hold" or plan.step == "hold" or (plan.mode == "probe" and plan.doubts)
    held = held or any(
        op.policy or op.on_error in ("hold", "broken", "callable")
        for ops in plan.workers
        for op in ops
        if op.name == answer.op.name
    )
    return answer.error == "OutcomeUnknown" and held


def _never_began(world: World, name: str) -> bool:
    return name not in world.started and not any(
        kind.startswith(("kill", "failover")) for kind in world.plan.kinds
    )
