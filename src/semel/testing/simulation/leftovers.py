"""I15: what a living worker still holds of its calls when all of them have ended. It must be nothing, or it grows for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from semel.flow import Engine
from semel.layers.batch import Batch
from semel.layers.coalesce import Coalesce
from semel.testing.simulation.world import World

__all__ = ["leftovers"]


def leftovers(world: World) -> list[str]:
    """In words: runs that are kept alive, waiters, flights and batches that nobody is in any more."""
    found = [
        f"I15: worker {tag} has ended its calls and keeps {what}"
        for tag, face in world.faces.items()
        if not world.loop.is_dead(tag)
        for engine in _engines(face)
        for what in _held(engine)
    ]
    # A subscription that arrives after its caller left, or died, is the network's; an outcome that is cached keeps its own.
    plan = world.plan
    if not plan.faults and plan.latency <= 0.01 and not plan.cache and world.server._watchers:
        found.append(f"I15: {len(world.server._watchers)} keys are watched by nobody")
    return found


def _engines(face: Any) -> list[Engine]:
    made = getattr(face, "_made", None)
    return [made] if made is not None else list(getattr(face, "_engines", {}).values())


def _held(engine: Engine) -> Iterator[str]:
    if engine.debts._owed:
        return  # what the store has not taken yet is offered on, run, lead and place with it (R16)
    if count := engine.heart.count:
        yield f"{count} runs alive"
    if waiting := engine.bench._waiting:
        yield f"seats for {sum(waiting.values())} waiters"
    layer: Any = engine.store
    while layer is not None:
        if isinstance(layer, Coalesce) and layer._flights:
            yield f"{len(layer._flights)} keys that nobody leads"
        if isinstance(layer, Batch) and any(
            queue._items or queue._flying for queue in (layer._claims, layer._ends)
        ):
            yield "places in batches"
        layer = getattr(layer, "inner", None)
