"""The rows of `claim()` and `consume()`: other ways to say what `execute` says, on the stores where they are quickly told.

They claim, renew and settle by the same engine. What is their own is a block that ends by an exception, or by its worker's death,
between its claim and its `complete`, and an outcome without a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from semel.run import Outcome
from semel.testing.chaos import core, expectations
from semel.testing.chaos.cells import Cell, Part, register
from semel.testing.chaos.transactions import wait

__all__ = ["by_hand_cells"]

_STORES: Final = ("sqlite", "redis")
_BLOCK: Final = ("claim.sent", "claim.won", "effect.made", "settle.sent", "settle.stored", "renew.sent")
_POINTS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "claim": dict.fromkeys(("kill", "zombie", "cancel", "interrupt"), _BLOCK),
    "consume": {"kill": ("effect.made", "settle.sent", "settle.stored"), "zombie": ("run.returned",)},
}
_SAME_ENGINE: Final = "it claims, renews and settles as execute does: as in mode retry"
_SAME_VERBS: Final = f"{_SAME_ENGINE}, which tells the stores apart"


def by_hand_cells() -> Iterator[Cell]:
    for mode, faults in _POINTS.items():
        for store in (*core.STORES, "memory"):
            for colour in core.COLOURS:
                if store not in _STORES:
                    yield _cell(store, colour, mode, "any", "any", _SAME_VERBS)
                    continue
                yield _cell(store, colour, mode, "any", "any", _SAME_ENGINE)
                for fault, points in faults.items():
                    for point in points:
                        reason = expectations.not_applicable(store, colour, "retry", fault, point)
                        yield _cell(store, colour, mode, fault, point, reason)


def _cell(store: str, colour: str, mode: str, fault: str, point: str, reason: str) -> Cell:
    cell = Cell(
        part="by hand", store=store, colour=colour, mode="retry", fault=fault, point=point, reason=reason
    )
    return msgspec.structs.replace(cell if reason else expectations.filled(cell), mode=mode)


class _Block(core.Worker):
    """`with once.claim(key)`, the same work inside of it, and `complete`."""

    async def _execute(self, once: Any, patience: float | None) -> Any:
        claim = once.claim(self.plan.key, wait=self.plan.wait if patience is None else patience)
        if self.cell.colour == "sync":
            with claim:
                if claim.won:
                    claim.complete(self._work_sync())
        else:
            async with claim:
                if claim.won:
                    await claim.complete(await self._work_async())
        return claim


class _Consumer(core.Worker):
    """`once.consume`: it is told whether it ran, and no result."""

    async def _execute(self, once: Any, patience: float | None) -> Any:
        work = getattr(self, f"_work_{self.cell.colour}")
        patience = self.plan.wait if patience is None else patience
        ran = await wait(once.consume(self.plan.key, work, wait=patience))
        return Outcome(None, not ran, None, 0)


core.WORKERS.update(claim=_Block, consume=_Consumer)
register(Part(name="by hand", cells=by_hand_cells, attempt=core.attempt, wanted=core.wanted, helped=True))
