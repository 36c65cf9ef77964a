"""What a mutant is, and how it is put into the product and taken out again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import msgspec

__all__ = ["MUTANTS", "Mutant", "Patch", "mutant", "planted", "recorded_seeds"]

Patch = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and what is put there instead."""


class Mutant(msgspec.Struct, frozen=True):
    name: str
    what: str
    check: str
    """The invariant of the simulator, or the clause of the contract suite, that must catch it."""
    patches: Callable[[], Sequence[Patch]]
    store: str = ""
    """The real store on which the contract's clause is run; empty for the simulator."""
    workload: str = "core"
    """The simulator's workload whose schedules catch it."""


MUTANTS: dict[str, Mutant] = {}


def mutant(
    name: str, *, check: str, store: str = "", workload: str = "core"
) -> Callable[[Callable[[], Sequence[Patch]]], Callable[[], Sequence[Patch]]]:
    """Register a function that returns patches; its docstring says what is wrong in the product then."""

    def add(patches: Callable[[], Sequence[Patch]]) -> Callable[[], Sequence[Patch]]:
        if name in MUTANTS:
            raise ValueError(f"there is a mutant {name!r} already")
        MUTANTS[name] = Mutant(name, (patches.__doc__ or "").strip(), check, patches, store, workload)
        return patches

    return add


@contextmanager
def planted(name: str) -> Iterator[Mutant]:
    """The product with this bug in it, as long as the block lasts."""
    planted_mutant = MUTANTS[name]
    before: list[Patch] = []
    try:
        for owner, attribute, value in planted_mutant.patches():
            before.append((owner, attribute, vars(owner)[attribute]))
            setattr(owner, attribute, value)
        yield planted_mutant
    finally:
        for owner, attribute, value in reversed(before):
            setattr(owner, attribute, value)


def recorded_seeds() -> dict[str, int]:
    """The seed that catches each simulated mutant quickly (`--record` writes them)."""
    seeds: dict[str, int] = json.loads(
        files("semel.testing.mutants").joinpath("seeds.json").read_text("utf-8")
    )
    return seeds
