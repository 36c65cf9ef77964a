"""A simulator: the real flow over simulated stores and workers, in virtual time, from one seed.

python -m semel.testing.simulation --seed 4711 --trace
"""

from __future__ import annotations

from semel.testing.simulation.invariants import violations
from semel.testing.simulation.plans import Fault, Op, Plan, plan_of
from semel.testing.simulation.workloads import Workload, register
from semel.testing.simulation.world import World

__all__ = ["Fault", "Op", "Plan", "Workload", "World", "plan_of", "register", "violations"]
