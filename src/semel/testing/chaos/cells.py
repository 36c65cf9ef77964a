"""The matrix as data: what is broken where, and what must come of it.

A cell is one fault at one place of one part's life on one store, with the verdict that must come out. It is compared in
both directions: a cell that promises exactly once shows nothing lost and nothing doubled, and a cell that promises less
shows its anomaly, or the fault did not bite. A cell that cannot be is listed with the reason.

A part of the product (the core, HTTP, gRPC, messaging; later streams) adds its rows with `register(Part(...))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from importlib import import_module
from typing import Any

import msgspec

from semel.testing.chaos.harness import EVERY
from semel.testing.chaos.ledger import Story

__all__ = [
    "NOT_BUILT",
    "PARTS",
    "Cell",
    "Heir",
    "Part",
    "Plan",
    "Verdict",
    "load",
    "matrix",
    "part_named",
    "part_of",
    "register",
]


class Verdict(StrEnum):
    """What the ledger says about one key when everything is over."""

    ONCE = "exactly once"
    DOUBLED = "doubled"
    UNKNOWN = "unknown"  # at most one effect, and somebody was told that the outcome is not known
    LOST = "lost"  # a caller was told that it happened, and it did not (or no longer)
    TORN = "torn"  # two callers were told different results
    REORDERED = "reordered"  # messages of one key have arrived out of order
    STUCK = "stuck"  # nobody could bring it to an end


class Heir(StrEnum):
    """What the next caller after the fault met: it shows that the fault struck where it should."""

    RAN = "ran"
    REPLAYED = "replayed"
    UNKNOWN = "unknown"
    BUSY = "busy"
    ANY = "any"


NOT_BUILT = "not built yet"
"""How the reason of a cell begins that could be and is not."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the matrix. `reason` is set where it does not apply."""

    part: str
    store: str
    colour: str
    mode: str
    fault: str
    point: str
    expected: Verdict | None = None
    heir: Heir = Heir.ANY
    reason: str = ""
    lane: str = ""
    """Cells of one lane run one after another, in a process that owns the servers it breaks."""
    needs: tuple[str, ...] = ()
    """Servers that it shares with others, besides its store; `outbox` are messaging's tables."""
    batch: bool = False
    """Cells of its lane are played together: their server fails once, and all of them are struck by it."""

    @property
    def name(self) -> str:
        return f"{self.store}/{self.colour}/{self.mode}/{self.fault}@{self.point}"

    @property
    def applies(self) -> bool:
        return not self.reason

    @property
    def unbuilt(self) -> bool:
        """It could be, and is not: not the same as a cell that cannot be, or is shown by another one."""
        return self.reason.startswith(NOT_BUILT)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt in a process of its own: everything a forked worker needs to know. Written before it runs."""

    cell: Cell
    key: str
    url: str
    folder: str
    lease: float
    role: str = "victim"
    """`victim` meets the fault, `heir` is the next caller, `judge` looks at the end, `owner` holds the key meanwhile."""
    last: bool = False
    """Nobody comes after this heir: it looks at the end as well."""
    wait: float = EVERY.options["wait"]
    padding: int = 0
    """How many bytes its result is longer."""
    settings: dict[str, Any] = {}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a part of the product brings: its cells, and how one attempt at one of them is made.

    `attempt(plan)` runs in a forked worker. It arms the fault (`traps.arm`), does the work once, and writes what happened
    into the ledger: the worker's `plan.role` says who it is.
    """

    name: str
    cells: Callable[[], Iterable[Cell]]
    attempt: Callable[[Plan], None]
    drivers: tuple[str, ...] = ()
    """Modules that its workers would import, each for itself: they are forked from a process that has them."""
    helped: bool = False
    """Whether one process may be the heir, the judge and the person of many schedules; victims are always forked."""
    wanted: Callable[[Cell], tuple[str, ...]] = lambda _: ("effect",)
    """The names of the effects that each key of a cell must have, each of them once."""
    judged: Callable[[Cell, Story], tuple[Verdict, str]] | None = None
    """The verdict, and what is wrong besides, of a part whose ledger says other things than that callers were told results."""
    certain: Callable[[Cell, Story], str] | None = None
    """Of what is wrong besides, that which holds of a story without an end, too: with `judged`."""
    schedules: dict[str, Callable[..., Any]] = {}
    """By fault: a function of a `driver.Stage`, for another order of events than victim, heir, judge; of a list of them for
    cells that are played in a batch."""


# Modules that register a part when they are imported. `semel chaos` loads all of them.
PARTS: list[str] = [
    "semel.testing.chaos.core",
    "semel.testing.chaos.by_hand",
    "semel.testing.chaos.retention",
    "semel.testing.chaos.nemesis",
    "semel.testing.chaos.astray",
    "semel.testing.chaos.memory",
    "semel.testing.chaos.http_cells",
    "semel.testing.chaos.grpc_cells",
    "semel.testing.chaos.messaging_cells",
]

_parts: dict[str, Part] = {}


def register(part: Part) -> None:
    """Add a part's rows to the matrix. Registering a name again replaces it."""
    _parts[part.name] = part


def load() -> None:
    for module in PARTS:
        import_module(module)


def part_of(cell: Cell) -> Part:
    return _parts[cell.part]


def part_named(name: str) -> Part:
    return _parts[name]


def matrix() -> list[Cell]:
    """The whole matrix, in a stable order, each name once."""
    load()
    found: dict[str, Cell] = {}
    for part in _parts.values():
        for cell in part.cells():
            if cell.name in found:
                raise ValueError(f"two cells are called {cell.name}")
            found[cell.name] = cell
    return list(found.values())
