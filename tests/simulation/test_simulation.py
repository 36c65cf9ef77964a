"""The simulator: no promise is broken in many schedules, every window is reached, a seed means the same everywhere."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from semel.once import AsyncSemel
from semel.testing.mutants import story
from semel.testing.mutants.plant import recorded_seeds
from semel.testing.simulation import Op, Plan, Workload, World, register
from semel.testing.simulation.loop import Deadlock, SimLoop
from semel.testing.simulation.plans import FAULTS, NETWORK, ON_ERROR, POINTS, plan_of
from semel.testing.simulation.runner import Report, explore
from semel.testing.simulation.stories import told
from semel.testing.simulation.world import Answered

MODE = os.environ.get("SEMEL_TEST", "full")
SCHEDULES = {
    "core": {"quick": 1_000, "full": 40_000, "long": 100_000}[MODE],
    "sync": {"quick": 200, "full": 3_000, "long": 20_000}[MODE],
    "stragglers": {"quick": 100, "full": 1_000, "long": 5_000}[MODE],
}
VERBS = ("claim", "settle", "renew", "note", "peek", "watch", "scan", "purge")
VERSIONS = ("3.11", "3.12", "3.13")
TRACES = (
    "import hashlib, os, sys\n"
    "from semel.testing.simulation import World\n"
    "from semel.testing.simulation.workloads import workload_of\n"
    "plans = [workload_of(name).plan(seed) for name, count in (('core', 150), ('sync', 50)) for seed in range(count)]\n"
    "text = [line for plan in plans for line in World(plan).run().trace]\n"
    "print(hashlib.sha256('\\n'.join(text).encode()).hexdigest(), '%d.%d' % sys.version_info[:2], flush=True)\n"
    "os._exit(0)\n"
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("workload", SCHEDULES)
def test_no_promise_is_broken_and_every_window_is_reached(workload: str) -> None:
    report = explore(0, SCHEDULES[workload], workload=workload)
    print(f"\n{report.schedules} schedules, {report.schedules / report.seconds:.0f} a second")
    assert not report.failures, _told(report, workload)
    # A run that reached nothing proves nothing.
    missed = sorted(windows(workload) - report.reached.keys())
    assert MODE == "quick" or not missed, missed
    if workload == "stragglers":
        return
    assert report.answered_well / report.answered > 0.9
    # Modes that promise less show it, or the faults did not bite.
    assert report.doubled["retry"] > 0
    assert report.doubled.get("keyed", 0) == report.doubled.get("tx", 0) == 0


def windows(workload: str) -> set[str]:
    """Every fault at every point of the core, and every trouble of the network at every verb."""
    if workload == "stragglers":
        return {"late@claim"}
    kinds = ("kill", "pause", "cancel") if workload == "core" else ("kill", "pause")
    at_points = {f"{kind}-at-point@{point}" for kind in kinds for point in POINTS}
    on_the_way = {f"{kind}@{verb}" for kind in NETWORK for verb in VERBS}
    others = {"kill", "pause", "store-down", "failover", "clock", "lose-wake"}
    if workload == "core":
        return at_points | on_the_way | others | {"cancel", "cancel-at-await"}
    # A tenth of the schedules: the rare verbs are left to the core's.
    return (
        at_points
        | {window for window in on_the_way if window.endswith(("claim", "settle", "renew"))}
        | others
    )


def _told(report: Report, workload: str) -> str:
    lines = [f"seed {seed}: {broken}" for seed, broken in report.failures[:10]]
    return "\n".join([*lines, "", told(report.failures[0][0], workload=workload)])


def test_a_seed_gives_the_same_trace_twice() -> None:
    assert _traces(sys.executable, _site_packages()) == _traces(sys.executable, _site_packages())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_seed_gives_the_same_trace_on_every_python(tmp_path: Path) -> None:
    hashes = {version: _traces(*_python(version, tmp_path)) for version in VERSIONS}
    assert [seen for _, seen in hashes.values()] == list(VERSIONS)
    assert len({digest for digest, _ in hashes.values()}) == 1, hashes


def test_a_failing_seed_is_told_small_with_the_command_that_shows_it_again() -> None:
    seed = recorded_seeds()["settle-unfenced"]
    text = story("settle-unfenced", seed)
    assert f"seed {seed} of core: mode " in text
    assert "I5: a fenced owner changed the record by settle" in text
    assert text.count("  worker ") <= 4, text
    command = text.splitlines()[-1].strip()
    assert command.startswith("python -m semel.testing.simulation --trace --plan ")
    # The product itself, in that very plan, breaks nothing: the command says so.
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was broken" in done.stdout
    assert " call " in done.stdout


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_a_world_that_never_comes_to_rest_is_told_as_such(colour: Literal["async", "sync"]) -> None:
    async def stuck(world: World, face: object, op: Op, answered: Answered) -> None:
        del world, face, op, answered
        while True:
            await asyncio.sleep(10)

    ops = ((Op("k", 0.0, 0.0, 0.0, kind="stuck"),),)
    name = f"stuck-{colour}"
    register(
        Workload(
            name,
            plan=lambda seed: Plan(seed, "retry", 1.0, 0.01, ops, (), colour=colour, workload=name),
            calls={"stuck": stuck, "execute": stuck},
        )
    )
    assert "I9: the world never came to rest" in str(explore(0, 1, workload=name).failures)


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


def test_plans_use_every_option() -> None:
    plans = [plan_of(seed) for seed in range(2_000)]
    ops = [op for plan in plans for ops in plan.workers for op in ops]
    assert {op.on_error for op in ops if op.fails} == set(ON_ERROR)
    assert {op.labels for op in ops} == {"", "red", "blue"}
    assert {plan.step for plan in plans} == {"", "hold", "probe"}
    for option in ("tombstone", "purge_every", "retention", "ids", "doubts", "warns", "batches", "cache"):
        assert {bool(getattr(plan, option)) for plan in plans} == {True, False}, option


def _traces(python: str, packages: str) -> list[str]:
    """The digest of many traces, and the version that made it."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [python, "-c", TRACES],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), packages])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _site_packages() -> str:
    return os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))


def _python(version: str, folder: Path) -> tuple[str, str]:
    """An interpreter of this version, and a folder with what the simulator needs, built for it."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable, _site_packages()
    python = _interpreter(version)
    if python is None:
        pytest.skip(f"SERVER MISSING: no Python {version} on this machine; put python{version} on PATH")
    packages = folder / version
    made = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--target", packages, "msgspec>=0.20", "greenlet"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"SERVER MISSING: msgspec and greenlet cannot be had for {python}: {made.stderr[-300:]}")
    return python, str(packages)


def _interpreter(version: str) -> str | None:
    """One that runs: a shim on PATH may only say that it would."""
    folders = [
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin")),
        *os.environ["PATH"].split(os.pathsep),
    ]
    for folder in folders:
        python = shutil.which(f"python{version}", path=folder)
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None
