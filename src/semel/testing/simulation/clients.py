"""The core's workload: what clients of the faces call, and the effects that their functions have on the world."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from semel.options import NOT_FOUND, Found
from semel.run import Run, current_run
from semel.testing.simulation.plans import POINTS, Op, plan_of
from semel.testing.simulation.workloads import Workload, register

if TYPE_CHECKING:
    from semel.once import AsyncSemel
    from semel.testing.simulation.world import Answered, World

__all__ = ["Flaw", "policy_of", "probe_record"]


class Flaw(Exception):
    """A known failure of the simulated function."""


def _given(world: World, op: Op) -> dict[str, Any]:
    given: dict[str, Any] = {"tenant": op.tenant, "operation": op.operation}
    given |= {"request": _request(world, op), "wait": op.wait}
    if op.policy:
        given["on_unknown"] = op.policy
    return given


def _request(world: World, op: Op) -> dict[str, Any]:
    """Equal requests are not written equally: another order of fields, 5.0 for 5."""
    if (len(world.answers) + op.request) % 2:
        return {"amount": 5 + op.request, "unit": "EUR"}
    return {"unit": "EUR", "amount": 5.0 + op.request}


async def _execute(world: World, face: AsyncSemel, op: Op, answered: Answered) -> None:
    outcome = await face.execute(op.key, _function(world, op), **_given(world, op))
    answered.value, answered.replayed = outcome.value, outcome.replayed


async def _consume(world: World, face: AsyncSemel, op: Op, answered: Answered) -> None:
    answered.replayed = not await face.consume(op.key, _function(world, op), **_given(world, op))


async def _claim(world: World, face: AsyncSemel, op: Op, answered: Answered) -> None:
    async with face.claim(op.key, **_given(world, op)) as claim:
        if claim.replayed:
            answered.value, answered.replayed = claim.value, True
            return
        value = await _function(world, op)()
        await claim.complete(value)
        answered.value = value


async def _purge(world: World, face: AsyncSemel, op: Op, answered: Answered) -> None:
    del world, op
    answered.value = await face.purge()


async def _reconcile(world: World, face: AsyncSemel, op: Op, answered: Answered) -> None:
    del world, op
    answered.value = (await face.reconcile()).found


async def _peek(world: World, face: AsyncSemel, op: Op, answered: Answered) -> None:
    del world
    record = await face.peek(op.key, tenant=op.tenant, operation=op.operation)
    answered.value = "nothing" if record is None else record.state.value


async def _resolve(world: World, face: AsyncSemel, op: Op, answered: Answered) -> None:
    world.count += 1
    said: dict[str, Any] = {"value": _value(op, world.count), "error": "a person says so", "release": True}
    word: dict[str, Any] = {op.word: said[op.word], "tenant": op.tenant, "operation": op.operation}
    await face.resolve(op.key, actor="ada", reason="looked", **word)
    answered.value = op.word


async def _forget(world: World, face: AsyncSemel, op: Op, answered: Answered) -> None:
    del world
    answered.value = await face.forget(op.key, actor="ada", tenant=op.tenant, operation=op.operation)


# ------------------------------------------------------------------------------------------------- their functions


def _value(op: Op, number: int) -> str:
    """Says by itself for whom and for which request it was made."""
    return f"{op.name}#{number}?{op.request}"


def _function(world: World, op: Op) -> Any:
    return partial(_in_steps if world.plan.mode == "steps" else _effect, world, op)


async def _effect(world: World, op: Op) -> str:
    run = current_run()
    world.started.add(op.name)
    world.count += 1
    value = _value(op, world.count)
    await asyncio.sleep(op.work / 2)
    if op.fails:
        raise Flaw
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
    world.started.add(op.name)

    async def charge() -> str:
        _check_step(world, run, "charge")
        world.count += 1
        made = _value(op, world.count)
        key = run.downstream_key("charge")
        await asyncio.sleep(op.work / 2)
        value, fresh = _at_peer(world, key, made)
        if fresh:
            world.happen(op, value)
        return value

    async def ship(value: str) -> str:
        _check_step(world, run, "ship")
        return value

    value: str = await run.step("charge", charge)
    await asyncio.sleep(op.work / 2)
    if op.fails:
        raise Flaw
    again: str = await run.step("ship", ship, value)
    return again


def _at_peer(world: World, key: str, value: str) -> tuple[str, bool]:
    known = world.downstream.setdefault(key, value)
    return known, known == value


def _check_step(world: World, run: Run, name: str) -> None:
    """R26: what the owner of a key had noted as done is not run again by it, nor by whoever takes over."""
    key = run.scope.hash
    grant = world.server.auditor.grants.get(key)
    if grant is not None and grant.nonce == run.ask.nonce and name in world.server.auditor.noted.get(key, ()):
        world.broken.append(f"R26: step {name} of {run.key} ran again after it was noted")


def policy_of(world: World) -> Any:
    """The world's `on_unknown`."""
    if world.plan.mode == "hold":
        return "hold"
    return partial(_probe, world) if world.plan.mode == "probe" else "retry"


async def _probe(world: World, *_: Any) -> Any:
    await asyncio.sleep(world.plan.latency)
    run = current_run()
    value = world.done_outside.get(f"{run.tenant}/{run.operation}/{run.key}")
    return NOT_FOUND if value is None else Found(value)


async def probe_record(world: World, record: Any) -> Any:
    """The probe that `reconcile` uses."""
    del record
    return await _probe(world)


register(
    Workload(
        "core",
        plan=plan_of,
        calls={
            "execute": _execute,
            "consume": _consume,
            "claim": _claim,
            "purge": _purge,
            "reconcile": _reconcile,
            "peek": _peek,
            "resolve": _resolve,
            "forget": _forget,
        },
        points=POINTS,
    )
)
