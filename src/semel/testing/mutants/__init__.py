"""Planted bugs: each one switched on by name, in memory, and caught by a named check. One that survives is a hole in the proof.

    python -m semel.testing.mutants                  # all of them, with their recorded seeds
    python -m semel.testing.mutants settle-unfenced  # one of them
    python -m semel.testing.mutants --search         # without the recorded seeds

A mutant is planted in forked processes only. A later part of the product adds its own with `@mutant`.
"""

from __future__ import annotations

from semel.testing.mutants import flows, models, statements
from semel.testing.mutants.hunt import Catch, catch, search
from semel.testing.mutants.plant import MUTANTS, Mutant, mutant, planted

__all__ = [
    "MUTANTS",
    "Catch",
    "Mutant",
    "catch",
    "flows",
    "models",
    "mutant",
    "planted",
    "search",
    "statements",
]
