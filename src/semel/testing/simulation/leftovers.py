"""I15: what a living worker still holds of its calls when all of them have ended. It must be nothing, or it grows for ever."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from semel.debts import Debt
from semel.flow import Engine
from semel.layers.batch import Batch
from semel.layers.coalesce import Coalesce
from semel.testing.simulation.loop import worker_tag
from semel.testing.simulation.world import World

__all__ = ["leftovers"]

_LONG = 5.0
"""Seconds: two pauses between offers, and what a store that answers may take for each of them."""


def leftovers(world: World) -> list[str]:
    """In words: debts, claims and runs, waiters, flights and batches that nobody is in any more."""
    found = [
        f"I15: worker {tag} has ended its calls and keeps {what}"
        for tag, face in world.faces.items()
        if not world.loop.is_dead(tag)
        for engine in _engines(face)
        for what in _held(engine, _open_debts(world, tag, engine))
    ]
    # A subscription that arrives after its caller left, or died, is the network's; an outcome that is cached keeps its own.
    plan = world.plan
    if not plan.faults and plan.latency <= 0.01 and not plan.cache and world.server._watchers:
        found.append(f"I15: {len(world.server._watchers)} keys are watched by nobody")
    return found


def _engines(face: Any) -> list[Engine]:
    made = getattr(face, "_made", None)
    return [made] if made is not None else list(getattr(face, "_engines", {}).values())


def _open_debts(world: World, tag: str, engine: Engine) -> dict[bytes, Debt]:
    """What the store has not taken yet, or may still be asked for: it is offered on, run, lead and place with it (R16)."""
    owed = engine.debts._owed
    if world.loop.now - world.calm_at <= _LONG:
        return dict(owed)
    token = worker_tag.set(tag)
    now = world.loop.time()
    worker_tag.reset(token)
    return {nonce: debt for nonce, debt in owed.items() if not _is_over(world, debt, now)}


def _is_over(world: World, debt: Debt, now: float) -> bool:
    """Nobody offers it, though it is due (at the end of its time at the latest), or the store has had its outcome for long."""
    if now - debt.due > _LONG:
        return True
    ended_at = world.server.auditor.ended_at.get(debt.end.nonce)
    return debt.run is not None and ended_at is not None and world.server._time() - ended_at > _LONG


def _held(engine: Engine, owed: Mapping[bytes, Debt]) -> Iterator[str]:
    debts, heart = engine.debts, engine.heart
    if over := debts._owed.keys() - owed.keys():
        yield f"{len(over)} debts that are paid, or nobody's any more"
    if unwritten := debts.unwritten.keys() - {debt.end.scope.hash for debt in debts._owed.values()}:
        yield f"{len(unwritten)} keys that wait for an outcome to be written that is not owed"
    if strays := debts.strays.keys() - owed.keys():
        yield f"{len(strays)} claims that were sent again"
    if heart.expected:
        yield f"{len(heart.expected)} claims on their way"
    if alive := [run for run in heart._alive() if run.ask.nonce not in owed]:
        yield f"{len(alive)} runs alive"
    if waiting := engine.bench._waiting:
        yield f"seats for {sum(waiting.values())} waiters"
    yield from _held_by_layers(engine.store, {debt.end.scope.hash for debt in owed.values()})


def _held_by_layers(store: Any, owed: Collection[bytes]) -> Iterator[str]:
    layer = store
    while layer is not None:
        if isinstance(layer, Coalesce) and (flights := layer._flights.keys() - owed):
            yield f"{len(flights)} keys that nobody leads"
        if isinstance(layer, Batch) and any(_is_left(queue, owed) for queue in (layer._claims, layer._ends)):
            yield "places in batches"
        layer = getattr(layer, "inner", None)


def _is_left(queue: Any, owed: Collection[bytes]) -> bool:
    """What waits is told by its key; what is on its way is a number only, and may be that of a debt."""
    return any(waiter.item.scope.hash not in owed for waiter in queue._waiters) or (
        queue._flying and not owed
    )
