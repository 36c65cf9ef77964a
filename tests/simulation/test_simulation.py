"""The simulator: no promise is broken in many schedules, every window is reached, a seed means the same everywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel.once import AsyncSemel
from semel.testing.simulation import Op, Plan, Workload, World, register
from semel.testing.simulation.loop import Deadlock, SimLoop
from semel.testing.simulation.plans import FAULTS, NETWORK, POINTS, plan_of
from semel.testing.simulation.runner import explore
from semel.testing.simulation.world import Answered

MODE = os.environ.get("SEMEL_TEST", "full")
SCHEDULES = {"quick": 1_000, "full": 40_000, "long": 100_000}[MODE]
TRACES = (
    "import hashlib, os\n"
    "from semel.testing.simulation import World, plan_of\n"
    "text = [line for seed in range(150) for line in World(plan_of(seed)).run().trace]\n"
    "print(hashlib.sha256('\\n'.join(text).encode()).hexdigest(), flush=True)\n"
    "os._exit(0)\n"
)


@pytest.mark.timeout(600)
def test_no_promise_is_broken_and_every_window_is_reached() -> None:
    report = explore(0, SCHEDULES)
    print(f"\n{report.schedules} schedules, {report.schedules / report.seconds:.0f} a second")
    replays = [
        f"python -m semel.testing.simulation --seed {seed} --shrink --trace: {broken}"
        for seed, broken in report.failures
    ]
    assert not replays, "\n".join(replays[:10])
    # A run that reached nothing proves nothing.
    missed = sorted(windows() - report.reached.keys())
    assert MODE == "quick" or not missed, missed
    assert report.answered_well / report.answered > 0.9
    # Modes that promise less show it, or the faults did not bite.
    assert report.doubled["retry"] > 0
    assert (
        report.doubled.get("keyed", 0) == report.doubled.get("tx", 0) == report.doubled.get("steps", 0) == 0
    )


def windows() -> set[str]:
    """Every fault at every point of the core, and every trouble of the network at every verb."""
    at_points = {f"{kind}-at-point@{point}" for kind in ("kill", "pause", "cancel") for point in POINTS}
    on_the_way = {f"{kind}@{verb}" for kind in NETWORK for verb in ("claim", "settle", "renew", "note")}
    return (
        at_points
        | on_the_way
        | {"kill", "pause", "cancel", "cancel-at-await", "store-down", "failover", "clock"}
    )


def test_a_seed_gives_the_same_trace_twice() -> None:
    assert _traces(sys.executable) == _traces(sys.executable)


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_seed_gives_the_same_trace_on_every_python(version: str) -> None:
    python = _python(version)
    assert _traces(python) == _traces(sys.executable)


def test_plans_use_every_fault() -> None:
    used = {fault.kind for seed in range(2_000) for fault in plan_of(seed).faults}
    assert used == set(FAULTS)


def test_a_part_of_the_product_registers_its_own_workload() -> None:
    async def ring(world: World, face: AsyncSemel, op: Op, answered: Answered) -> None:
        world.happen(op, "rung")
        answered.value = (await face.execute(op.key, _same, op.key)).value

    def plan(seed: int) -> Plan:
        return Plan(seed, "retry", 1.0, 0.01, ((Op("k", 0.0, 0.0, 0.0, kind="ring"),),), (), workload="bells")

    def rung(world: World) -> list[str]:
        return [f"B1: {len(world.effects)} rings"] if len(world.effects) != 2 else []

    register(Workload("bells", plan=plan, calls={"ring": ring, "execute": ring}, checks=(rung,)))
    report = explore(0, 1, workload="bells")
    assert not [line for _, broken in report.failures for line in broken if line.startswith("B1")]
    with pytest.raises(ValueError, match="bells"):
        register(Workload("bells", plan=plan, calls={}))
    assert "I2" in str(report.failures), "the core's own checks see this workload too"


async def _same(value: str) -> str:
    return value


def test_a_world_in_which_everybody_waits_is_a_deadlock() -> None:
    loop = SimLoop()
    with pytest.raises(Deadlock):
        loop.run_until_complete(loop.create_future())
    SimLoop.graveyard.append(loop)


def _traces(python: str) -> str:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(
        [str(root / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
    )
    done = subprocess.run(
        [python, "-c", TRACES],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == hashlib.sha256().digest_size * 2
    return done.stdout.strip()


def _python(version: str) -> str:
    for folder in (
        *os.environ["PATH"].split(os.pathsep),
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin")),
    ):
        candidate = Path(folder) / f"python{version}"
        if (
            candidate.exists()
            and subprocess.run([candidate, "-c", "import msgspec"], check=False).returncode == 0
        ):
            return str(candidate)
    pytest.skip(f"SERVER MISSING: no Python {version} with msgspec on this machine")
