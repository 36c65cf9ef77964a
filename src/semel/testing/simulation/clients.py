"""The core's workload: what clients of the faces call, and the effects that their functions have on the world.

Written once for both colours, as the product is: in a sync world a face answers at once, inside a greenlet that waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from semel.errors import CodecError
from semel.options import NOT_FOUND, UNDECIDED, Found
from semel.run import CONSUMED, Run, current_run
from semel.testing.simulation.auditor import name_of
from semel.testing.simulation.failures import on_error_of, will_fail
from semel.testing.simulation.leads import leads_plan_of
from semel.testing.simulation.plans import (
    NETWORK,
    POINTS,
    Op,
    beats_plan_of,
    cancels_plan_of,
    plan_of,
    resets_plan_of,
    straggler_plan_of,
    sync_plan_of,
)
from semel.testing.simulation.workloads import Workload, register

if TYPE_CHECKING:
    from semel.testing.simulation.world import Answered, World

__all__ = ["CALLS", "policy_of", "probe_record"]

_DOUBT = 3  # every so many looks of a probe that has doubts are undecided


async def _each(answer: Any) -> Any:
    """What a face of either colour answers."""
    return await answer if isawaitable(answer) else answer


def _given(world: World, op: Op) -> dict[str, Any]:
    given: dict[str, Any] = {"tenant": op.tenant, "operation": op.operation}
    given |= {"request": _request(world, op), "wait": op.wait}
    if op.policy:
        given["on_unknown"] = world.plain(_probe, world) if op.policy == "probe" else op.policy
    if op.on_error:
        given["on_error"] = on_error_of(op, world.plan.lease)
    if op.labels:
        given["labels"] = {"colour": op.labels}
    return given


def _request(world: World, op: Op) -> dict[str, Any]:
    """Equal requests are not written equally: another order of fields, 5.0 for 5."""
    if (len(world.answers) + op.request) % 2:
        return {"amount": 5 + op.request, "unit": "EUR"}
    return {"unit": "EUR", "amount": 5.0 + op.request}


async def _execute(world: World, face: Any, op: Op, answered: Answered) -> None:
    outcome = await _each(face.execute(op.key, _function(world, op), **_given(world, op)))
    answered.value = None if outcome.replayed and outcome.marker == CONSUMED else outcome.value
    answered.replayed, answered.ref = outcome.replayed, outcome.ref


async def _consume(world: World, face: Any, op: Op, answered: Answered) -> None:
    answered.replayed = not await _each(face.consume(op.key, _function(world, op), **_given(world, op)))


async def _claim(world: World, face: Any, op: Op, answered: Answered) -> None:
    if world.plan.colour == "sync":
        with face.claim(op.key, **_given(world, op)) as claim:
            await _inside(world, claim, op, answered)
    else:
        async with face.claim(op.key, **_given(world, op)) as claim:
            await _inside(world, claim, op, answered)


async def _inside(world: World, claim: Any, op: Op, answered: Answered) -> None:
    if claim.replayed:
        answered.replayed = True
        with suppress(CodecError):  # it was consumed
            answered.value = claim.value
        return
    value = await _each(_function(world, op)())
    await _each(claim.complete(value))
    answered.value = value


async def _purge(world: World, face: Any, op: Op, answered: Answered) -> None:
    del world, op
    answered.value = await _each(face.purge())


async def _reconcile(world: World, face: Any, op: Op, answered: Answered) -> None:
    del world, op
    answered.value = (await _each(face.reconcile())).found


async def _peek(world: World, face: Any, op: Op, answered: Answered) -> None:
    del world
    record = await _each(face.peek(op.key, tenant=op.tenant, operation=op.operation))
    answered.value = "nothing" if record is None else record.state.value


async def _resolve(world: World, face: Any, op: Op, answered: Answered) -> None:
    world.count += 1
    said: dict[str, Any] = {"value": _value(op, world.count), "error": "a person says so", "release": True}
    word: dict[str, Any] = {op.word: said[op.word], "tenant": op.tenant, "operation": op.operation}
    await _each(face.resolve(op.key, actor="ada", reason="looked", **word))
    answered.value = op.word


async def _forget(world: World, face: Any, op: Op, answered: Answered) -> None:
    del world
    answered.value = await _each(face.forget(op.key, actor="ada", tenant=op.tenant, operation=op.operation))


async def _history(world: World, face: Any, op: Op, answered: Answered) -> None:
    """R7: every word that was taken before the question is told, and none that was never spoken."""
    spoken = world.server.spoken
    before = spoken[op.name]
    events = await _each(face.history(op.key, tenant=op.tenant, operation=op.operation))
    kept = not world.plan.lossy and world.plan.retention is None
    if kept and not before <= len(events) <= spoken[op.name]:
        world.broken.append(f"R7: of {before} words about {op.name} its history tells {len(events)}")
    answered.value = len(events)


# ------------------------------------------------------------------------------------------------- their functions


def _value(op: Op, number: int) -> str:
    """Says by itself for whom and for which request it was made."""
    return f"{op.name}#{number}?{op.request}"


def _function(world: World, op: Op) -> Any:
    return world.plain(_in_steps if world.plan.mode == "steps" else _effect, world, op)


async def _effect(world: World, op: Op) -> str:
    run = current_run()
    world.begin(op, run)
    world.count += 1
    value = _value(op, world.count)
    await asyncio.sleep(op.work / 2)
    world.check_owner(run)
    if op.fails:
        raise will_fail(world, op, run)
    if world.plan.mode == "keyed":
        # The peer remembers the key: a repeated call is answered with what the first one did.
        value, fresh = _at_peer(world, run.downstream_key("peer"), value)
    else:
        fresh = world.plan.mode != "tx"
    if fresh:
        world.happen(op, value)
    await asyncio.sleep(op.work / 2)
    return value


async def _in_steps(world: World, op: Op) -> str:
    run = current_run()
    world.begin(op, run)
    if world.plan.ids:
        _check_id(world, run, await _each(run.new_id("ord")))

    async def charge() -> str:
        _check_step(world, run, "charge")
        world.count += 1
        value, fresh = _value(op, world.count), True
        key = run.downstream_key("charge")
        await asyncio.sleep(op.work / 2)
        world.check_owner(run)
        if not world.plan.step:
            value, fresh = _at_peer(world, key, value)
        if fresh:
            world.happen(op, value)
        world.made.append((op, run.ask.nonce, "charge"))
        return value

    async def ship(value: str) -> str:
        _check_step(world, run, "ship")
        return value

    value: str = await _each(run.step("charge", world.plain(charge), on_unknown=_of_step(world, op)))
    await asyncio.sleep(op.work / 2)
    if op.fails:
        raise will_fail(world, op, run)
    again: str = await _each(run.step("ship", world.plain(ship), value))
    return again


def _of_step(world: World, op: Op) -> Any:
    """The `on_unknown` of the step that has the effect."""

    async def look() -> Any:
        return _found(world, op.name)

    match world.plan.step:
        case "hold":
            # Of some worlds the next version asks for less. What was begun under hold stays held (R10); what was not would be
            # under retry from then on, of which nothing is promised.
            return "retry" if world.plan.seed % 2 and "charge" in current_run().steps else "hold"
        case "probe":
            return world.plain(look)
        case _:
            return "retry"


def _at_peer(world: World, key: str, value: str) -> tuple[str, bool]:
    known = world.downstream.setdefault(key, value)
    return known, known == value


def _owns(world: World, run: Run) -> bool:
    grant = world.server.auditor.grants.get(run.scope.hash)
    return grant is not None and grant.nonce == run.ask.nonce


def _check_step(world: World, run: Run, name: str) -> None:
    """R26: what was noted as done, or was begun under hold, is not run again by its owner, nor by who takes over."""
    key, auditor = run.scope.hash, world.server.auditor
    if not _owns(world, run):
        return
    if name in auditor.noted.get(key, ()):
        world.broken.append(f"R26: step {name} of {run.key} ran again after it was noted")
    if world.plan.step == "hold" and auditor.begun.get((key, name), run.ask.nonce) != run.ask.nonce:
        world.broken.append(f"R26: step {name} of {run.key} ran again though it is held")


def _check_id(world: World, run: Run, text: str) -> None:
    """R25: one id per scope, durable when it is known, unless a failover has lost the note while its answer was on its way."""
    noted = world.server.auditor.ids.get(run.scope.hash)
    lost = noted is None and world.plan.lossy
    if _owns(world, run) and noted != text.encode() and not lost:
        world.broken.append(f"R25: {run.key} was given the id {text}, which is not the one that was noted")


# --------------------------------------------------------------------------------------------------------- probes


def policy_of(world: World) -> Any:
    """The world's `on_unknown`."""
    if world.plan.mode == "hold":
        return "hold"
    return world.plain(_probe, world) if world.plan.mode == "probe" else "retry"


async def _probe(world: World, *_: Any) -> Any:
    await asyncio.sleep(world.plan.latency)
    run = current_run()
    world.looks += 1
    if world.plan.doubts and world.looks % _DOUBT == 1:
        return UNDECIDED
    return _found(world, f"{run.tenant}/{run.operation}/{run.key}")


def _found(world: World, name: str) -> Any:
    value = world.done_outside.get(name)
    if world.plan.mode == "tx":
        value = next((world.decoded(result) for made, result in world.server.effects if made == name), None)
    return NOT_FOUND if value is None else Found(value)


async def probe_record(world: World, record: Any) -> Any:
    """The probe that `reconcile` uses."""
    del record
    return await _probe(world)


def _granted_to_nobody(world: World) -> list[str]:
    """R16: a claim that its caller has given up, and that arrives all the same, holds up nobody."""
    if not world.plan.kinds <= {"late", "reset-late"}:
        return []  # a worker that was killed had no time to begin
    auditor = world.server.auditor
    # With so long a lease and so quick a network a run that was begun keeps its key, and ends: what is left was granted again.
    ran = set() if world.plan.lease >= 2 and world.plan.latency <= 0.01 else world.ran
    held = [(name, nonce) for name, nonce in auditor.lapsed if nonce not in ran]
    for key, record in world.server._records.items():
        grant = auditor.grants.get(key)
        if grant is not None and grant.ended is None and grant.nonce not in ran and record.scope:
            held.append((name_of(record.scope), grant.nonce))
    return [f"R16: {name} was granted to a claim that its caller had given up" for name, _ in held]


CALLS: dict[str, Callable[..., Any]] = {
    "execute": _execute,
    "consume": _consume,
    "claim": _claim,
    "purge": _purge,
    "reconcile": _reconcile,
    "peek": _peek,
    "resolve": _resolve,
    "forget": _forget,
    "history": _history,
}

_VERBS = ("claim", "settle", "renew", "note", "peek", "watch", "scan", "purge")
# The cells of the guarantee table that say less than once: zombies and lost writes double, and who holds is told that nobody knows.
_LESS = ("retry doubled", "probe doubled", "hold doubled", "hold unknown")
_STRIKES = {"kill", "pause", "store-down", "failover", "clock", "worker-clock", "lose-wake"}


def _windows(kinds: tuple[str, ...], verbs: tuple[str, ...], others: set[str]) -> frozenset[str]:
    """Every fault at every point of the core, and every trouble of the network at these verbs."""
    at_points = {f"{kind}-at-point@{point}" for kind in kinds for point in POINTS}
    troubles = NETWORK - {"reset-late"}  # that has schedules of its own
    return frozenset(at_points | {f"{kind}@{verb}" for kind in troubles for verb in verbs} | others)


register(
    Workload(
        "core",
        plan=plan_of,
        calls=CALLS,
        points=POINTS,
        windows=_windows(
            ("kill", "pause", "cancel"),
            _VERBS,
            _STRIKES | {"cancel", "cancel-at-await", "posted@claim", "posted@settle"},
        ),
        shows=_LESS,
    )
)
register(
    Workload(
        "sync",
        plan=sync_plan_of,
        calls=CALLS,
        points=POINTS,
        # It is run a tenth as often: the rare verbs are left to the core's.
        windows=_windows(("kill", "pause"), ("claim", "settle", "renew"), _STRIKES),
        shows=_LESS,
    )
)
register(
    Workload(
        "stragglers",
        plan=straggler_plan_of,
        calls=CALLS,
        checks=(_granted_to_nobody,),
        windows=frozenset({"late@claim", "lose-reply@claim", "kill"}),
    )
)
register(
    Workload(
        "resets",
        plan=resets_plan_of,
        calls=CALLS,
        checks=(_granted_to_nobody,),
        windows=frozenset(f"reset-late@{verb}" for verb in ("claim", "settle", "renew", "note", "watch")),
    )
)
register(
    Workload(
        "beats",
        plan=beats_plan_of,
        calls=CALLS,
        windows=frozenset({"pause", "renew.sent"}),
        shows=("retry doubled",),
    )
)
_PARKED = {"cancel-at-point@wait.parked"}  # the caller that is cancelled never waits
register(
    Workload(
        "cancels",
        plan=cancels_plan_of,
        calls=CALLS,
        points=POINTS,
        windows=_windows(("cancel",), (), {"cancel-at-await"}) - _PARKED,
        shows=("retry doubled", "hold unknown"),
    )
)
register(
    Workload(
        "leads",
        plan=leads_plan_of,
        calls=CALLS,
        points=POINTS,
        windows=frozenset(
            {"cancel", "cancel-at-await"} | {f"cancel-at-point@{point}" for point in POINTS[:6]}
        ),
        shows=("hold unknown",),
    )
)
