"""The crash matrix on real servers: real worker processes, broken at named places, and a verdict for each cell.

`semel chaos` runs it. A part of the product adds its own rows::

    from semel.testing.chaos import Cell, Part, Verdict, register

    register(Part(name="outbox", cells=my_cells, attempt=my_attempt))

See docs/reference/chaos.md.
"""

from __future__ import annotations

from semel.testing.chaos.cells import PARTS, Cell, Heir, Part, Plan, Verdict, matrix, register
from semel.testing.chaos.program import choose, run_matrix, show_again
from semel.testing.chaos.runner import Report, explore, jobs_for, recovery_jobs
from semel.testing.chaos.verdicts import Result

__all__ = [
    "PARTS",
    "Cell",
    "Heir",
    "Part",
    "Plan",
    "Report",
    "Result",
    "Verdict",
    "choose",
    "explore",
    "jobs_for",
    "matrix",
    "recovery_jobs",
    "register",
    "run_matrix",
    "show_again",
]
