"""Planted bugs: each one switched on by name, in memory, and caught by a named check. One that survives is a hole in the proof.

    python -m semel.testing.mutants                  # all of them, with their recorded seeds
    python -m semel.testing.mutants settle-unfenced  # one of them
    python -m semel.testing.mutants --search         # without the recorded seeds
    python -m semel.testing.mutants --record         # look for seeds that are stale or missing, and write them down
    python -m semel.testing.mutants --story scope-joined   # what it does, in the smallest plan that shows it

A mutant is planted in forked processes only. A later part of the product adds its own with `@mutant`.
"""

from __future__ import annotations

from semel.testing.mutants import flows, layers, models, statements, telling
from semel.testing.mutants.hunt import Catch, catch, search, story
from semel.testing.mutants.plant import MUTANTS, Mutant, mutant, planted

__all__ = [
    "MUTANTS",
    "Catch",
    "Mutant",
    "catch",
    "flows",
    "layers",
    "models",
    "mutant",
    "planted",
    "search",
    "statements",
    "story",
    "telling",
]
