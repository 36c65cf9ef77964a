"""The limit of every guarantee: a record is over, and the next caller comes later than that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from semel.testing.chaos import core, expectations
from semel.testing.chaos.cells import Cell, Heir, Part, Verdict, register
from semel.testing.chaos.driver import Stage
from semel.testing.chaos.harness import SHORT

__all__ = ["retention_cells"]

_FAULT: Final = "late-retry"
_POINT: Final = "forgotten"
_ENDS: Final = {
    "retry": Verdict.DOUBLED,
    "keyed": Verdict.ONCE,  # as long as its peer remembers
    "tx": Verdict.DOUBLED,
}
_MEMORY: Final = (
    "its records end by the same rule: tests/rulings/test_leases.py (R18), with a clock that is set"
)
_MARGIN: Final = 0.1


def retention_cells() -> Iterator[Cell]:
    for store in (*core.STORES, "memory"):
        for colour in core.COLOURS:
            for mode in core.MODES:
                yield _cell(store, colour, mode)


def _cell(store: str, colour: str, mode: str) -> Cell:
    reason = _MEMORY if store == "memory" else ""
    if mode not in _ENDS:
        reason = reason or "a record that is over has no policy and no steps: as in mode retry"
    reason = reason or expectations.not_applicable(store, colour, mode, _FAULT, _POINT)
    return Cell(
        part="retention",
        store=store,
        colour=colour,
        mode=mode,
        fault=_FAULT,
        point=_POINT,
        expected=None if reason else _ENDS[mode],
        heir=Heir.ANY if reason else Heir.RAN,
        reason=reason,
    )


def _forgotten(stage: Stage) -> None:
    """A caller is told its result; another one asks for it when the record is over, and runs it again."""
    stage.send("victim", **SHORT.plan).wait()
    told = [each.at for each in stage.ledger.answers() if each.by == "victim" and not each.error]
    if told:
        time.sleep(max(0.0, told[0] + SHORT.options["retention"] + _MARGIN - time.monotonic()))
        stage.ledger.struck("store")
        stage.bit = True
    stage.send("heir", last=True).wait()


register(
    Part(
        name="retention",
        cells=retention_cells,
        attempt=core.attempt,
        wanted=core.wanted,
        helped=True,
        schedules={_FAULT: _forgotten},
    )
)
