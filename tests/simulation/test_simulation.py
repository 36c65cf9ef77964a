"""The simulator: no promise is broken in many schedules, every window is reached, a seed means the same everywhere."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from semel.once import AsyncSemel
from semel.testing.mutants import story
from semel.testing.mutants.plant import recorded_seeds
from semel.testing.simulation import Op, Plan, Workload, World, register
from semel.testing.simulation.__main__ import main
from semel.testing.simulation.loop import Clock, Deadlock, Livelock, SimLoop, worker_tag
from semel.testing.simulation.plans import FAULTS, ON_ERROR, Fault, Mode, plan_of
from semel.testing.simulation.reach import class_of, shortcomings
from semel.testing.simulation.runner import Report, check, explore
from semel.testing.simulation.stories import told
from semel.testing.simulation.workloads import workload_of
from semel.testing.simulation.world import Answered
from tests.command_line import refused
from tests.pythons import VERSIONS, packages

MODE = os.environ.get("SEMEL_TEST", "full")
SCHEDULES = {
    "core": {"quick": 1_000, "full": 40_000, "long": 100_000}[MODE],
    "sync": {"quick": 200, "full": 3_000, "long": 20_000}[MODE],
    "stragglers": {"quick": 100, "full": 1_000, "long": 5_000}[MODE],
    "resets": {"quick": 100, "full": 2_000, "long": 10_000}[MODE],
    "beats": {"quick": 100, "full": 500, "long": 5_000}[MODE],
    "cancels": {"quick": 100, "full": 1_500, "long": 10_000}[MODE],
    "leads": {"quick": 100, "full": 1_000, "long": 10_000}[MODE],
}
TRACES = (
    "import hashlib, os, sys\n"
    "from semel.testing.simulation import World\n"
    "from semel.testing.simulation.workloads import workload_of, workloads\n"
    "counts = {'core': 150, 'sync': 50}\n"
    "print('%d.%d' % sys.version_info[:2])\n"
    "for name in sorted(workloads()):\n"
    "    plans = [workload_of(name).plan(seed) for seed in range(counts.get(name, 30))]\n"
    "    text = [line for plan in plans for line in World(plan).run().trace]\n"
    "    print(name, hashlib.sha256('\\n'.join(text).encode()).hexdigest(), flush=True)\n"
    "os._exit(0)\n"
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("workload", SCHEDULES)
def test_no_promise_is_broken_and_every_window_is_reached(workload: str) -> None:
    report = explore(0, SCHEDULES[workload], workload=workload)
    print(f"\n{report.schedules} schedules, {report.schedules / report.seconds:.0f} a second")
    assert not report.failures, _told(report, workload)
    # A run that reached nothing proves nothing.
    assert MODE == "quick" or not shortcomings(report, workload, wanted=SCHEDULES[workload])
    assert report.doubled.get("keyed", 0) == report.doubled.get("tx", 0) == 0


def test_a_run_that_proves_nothing_is_told_as_invalid() -> None:
    windows = workload_of("core").windows
    good = Report(
        100,
        histories=1,
        reached=dict.fromkeys(windows, 1),
        after={"value": 80, "ruled": 11, "refused": 9},
        doubled={"retry": 1, "probe": 1, "hold": 1},
        unknown={"hold": 1},
    )
    assert shortcomings(good, "core") == []

    def told(**changes: Any) -> str:
        return " ".join(shortcomings(replace(good, **changes), "core", wanted=100))

    assert told(schedules=99) == "only 99 of 100 schedules were played"
    assert told(schedules=0) == "no schedule was played"
    assert f"1 of {len(windows)} windows were never hit: late@note" in told(
        reached=dict.fromkeys(windows - {"late@note"}, 1)
    )
    # A refusal is no end: who was told to come again has nothing in his hands.
    assert "only 89.0% of the calls ended" in told(after={"value": 89, "refused": 11})
    assert "only 0.0% of the calls ended" in told(after={})
    assert "2 of 1000 histories were too long" in told(histories=1000, undecided=2)
    assert told(histories=0) == "no history was searched for an order of decisions"
    for mode in good.doubled:
        missing = {other: 1 for other in good.doubled if other != mode}
        assert f"mode {mode} never showed what it does not promise: no key was doubled" in told(
            doubled=missing
        )
    assert "mode hold never showed what it does not promise: no key was unknown" in told(unknown={"probe": 1})


def test_refusals_are_told_apart_from_ends() -> None:
    def classed(error: str, kind: str = "execute") -> str:
        answered = Answered(Op("k", 0.0, 0.0, 0.0, kind=kind), "w0.1", 0.0)
        answered.error = error
        return class_of(answered)

    assert classed("") == "value"
    assert {
        classed(error) for error in ("KeyMismatch", "PreviousFailure", "KeyExpired", "OutcomeUnknown")
    } == {"ruled"}
    assert {
        classed(error)
        for error in ("InProgress", "StoreUnavailable", "NotRecorded", "LeaseLost", "CancelledError")
    } == {"refused"}
    assert classed("ConfigurationError", "resolve") == "ruled"


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["--schedules", "40"], 3, "windows were never hit"),
        (["--schedules", "40", "--partial"], 0, ""),
        (["--campaign", "test", "--seconds", "0.2"], 3, " of 40,000 schedules were played"),
        (["--campaign", "test", "--seconds", "0.2", "--partial"], 0, ""),
        (["--seconds", "1e-9", "--partial"], 3, "no schedule was played"),
    ],
)
def test_the_command_line_refuses_a_run_that_proves_nothing(
    arguments: list[str], code: int, why: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "semel.testing.simulation", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("INVALID: " in done.stdout) == (code == 3)
    assert why in done.stdout


def _told(report: Report, workload: str) -> str:
    lines = [f"seed {seed}: {broken}" for seed, broken in report.failures[:10]]
    return "\n".join([*lines, "", told(report.failures[0][0], workload=workload)])


def test_a_seed_gives_the_same_trace_in_another_process_whatever_the_hashes_of_text_are() -> None:
    here = packages(f"{sys.version_info.major}.{sys.version_info.minor}", Path())
    version, traces = _traces(*here, hashes="1")
    assert (version, traces) == _traces(*here, hashes="4711")
    assert set(traces) == set(SCHEDULES)
    assert len(set(traces.values())) == len(SCHEDULES)


@pytest.mark.parametrize("workload", SCHEDULES)
def test_a_world_reads_no_clock_and_no_chance_but_its_own(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read from the machine would be another time, or another nonce, in the next run of the same seed."""

    def forbidden(*_: object) -> float:
        raise AssertionError("a simulated world looked at the real one")

    plans = [workload_of(workload).plan(seed) for seed in range(40)]
    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "sleep"):
        monkeypatch.setattr(time, name, forbidden)
    monkeypatch.setattr(os, "urandom", forbidden)
    for name in ("random", "getrandbits", "uniform", "choice", "randint"):
        monkeypatch.setattr(random, name, forbidden)
    broken = [(plan.seed, told) for plan in plans if (told := check(plan)[0])]
    monkeypatch.undo()
    assert not broken


def test_a_world_in_which_somebody_spins_is_a_livelock() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    loop = SimLoop()
    with pytest.raises(Livelock):
        loop.run_until_complete(spin())
    SimLoop.graveyard.append(loop)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_seed_gives_the_same_trace_on_every_python(tmp_path: Path) -> None:
    hashes = {
        version: _traces(*packages(version, tmp_path, "msgspec>=0.20", "greenlet")) for version in VERSIONS
    }
    assert [seen for seen, _ in hashes.values()] == list(VERSIONS)
    differing = [name for name in SCHEDULES if len({traces[name] for _, traces in hashes.values()}) != 1]
    assert not differing, hashes


def test_a_key_that_was_had_after_a_probes_word_and_given_back_may_be_anothers() -> None:
    """Its owner's clock was set back, and so it acts after its lease; the next one was granted the key after a probe had found nothing,
    was not answered, and has freed it."""
    plan = workload_of("core").plan(9_245_516)
    assert "worker-clock" in plan.kinds
    assert check(plan)[0] == []


def test_an_id_whose_note_a_failover_has_lost_was_known_to_its_run_all_the_same() -> None:
    """The answer was on its way when the note was lost, and the record is still there: its next owner is given another id."""
    plan = workload_of("core").plan(9_404_219)
    assert plan.lossy
    assert check(plan)[0] == []


def test_a_failing_seed_is_told_small_with_the_command_that_shows_it_again() -> None:
    seed = recorded_seeds()["settle-unfenced"]
    text = story("settle-unfenced", seed)
    assert f"seed {seed} of core: mode " in text
    assert "I5: a fenced owner changed the record by settle" in text
    assert text.count("  worker ") <= 4, text
    command = text.splitlines()[-1].strip()
    assert command.startswith("python -m semel.testing.mutants settle-unfenced --plan ")
    again = _run(*shlex.split(command)[1:])
    assert again.returncode == 1, again.stdout + again.stderr
    assert text.splitlines()[: text.splitlines().index("the same again:") - 2][-1] in again.stdout
    assert "I5: a fenced owner changed the record by settle" in again.stdout
    # The product itself, in that very plan, breaks nothing.
    plan = shlex.split(command)[-1]
    sound = _run("-m", "semel.testing.simulation", "--trace", "--plan", plan)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "nothing was broken" in sound.stdout
    assert " call " in sound.stdout


def test_a_failing_plan_is_made_smaller_and_printed_as_a_command_that_fails_again(tmp_path: Path) -> None:
    """A workload whose client lies: told by the command line, in a process that has to be told where the workload is."""
    (tmp_path / "liars.py").write_text(LIARS, "utf-8")
    words = ("-m", "semel.testing.simulation", "--load", "liars", "--workload", "liars")
    done = _run(*words, "--schedules", "3", "--partial", path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "python -m semel.testing.simulation --seed 0 --shrink --trace --workload liars --load liars"
        in done.stdout
    )
    command = done.stdout.splitlines()[-1].strip()
    again = _run(*shlex.split(command)[1:], path=tmp_path)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "L1: a lie was told" in again.stdout
    smaller = _run(*shlex.split(command)[1:], "--shrink", path=tmp_path)
    assert smaller.returncode == 1
    assert smaller.stdout.splitlines()[-1].strip() == command, "there is nothing left to make smaller"


LIARS = """
from semel.testing.simulation import Op, Plan, Workload, register

async def lie(world, face, op, answered):
    answered.value = "a lie"

async def tell(world, face, op, answered):
    answered.value = f"{op.name}#1?0"
    world.happen(op, answered.value)

def plan(seed):
    ops = tuple(Op("k", 0.1 * at, 0.0, 0.0, kind="lie") for at in range(3))
    return Plan(seed, "retry", 1.0, 0.01, (ops, ops), (), workload="liars")

def lies(world):
    return ["L1: a lie was told"] if any(each.op.kind == "lie" for each in world.answers) else []

register(Workload("liars", plan=plan, calls={"lie": lie, "execute": tell}, checks=(lies,)))
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--workload", "nonsense"], "no workload 'nonsense'; there are core, "),
        (["--schedules", "0"], "'0' is not a number of schedules"),
        (["--schedules", "-3"], "'-3' is not a number of schedules"),
        (["--seconds", "0"], "'0' is not a time in seconds"),
        (["--seconds", "-1"], "'-1' is not a time in seconds"),
        (["--seconds", "nan"], "'nan' is not a time in seconds"),
        (["--seconds", "soon"], "'soon' is not a time in seconds"),
        (["--report", "/dev/null/x"], "--report /dev/null/x: nothing can be written there"),
        (["--plan", "{"], "this is no plan"),
        (["--plan", '{"seed": 1}'], "this is no plan"),
        (["--plan", "{}", "--seed", "1"], "not allowed with"),
        (["--shrink"], "name it with --seed or --plan"),
        (["--trace"], "name it with --seed or --plan"),
        (["--load", "no.such.module"], "--load no.such.module: No module named"),
    ],
)
def test_the_command_line_says_what_is_wrong_with_its_arguments(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulation", *arguments])
    assert told in refused(main, capsys)


def _run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=env, cwd=path
    )


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


def _lines(plan: Plan) -> list[str]:
    """What happened in a world, without its times."""
    broken, world = check(plan)
    assert not broken
    return [line.partition(" ")[2] for line in world.trace]


def test_R20_workers_whose_clocks_are_hours_off_behave_as_if_they_were_right() -> None:
    compared = 0
    for seed in range(120):
        plan = plan_of(seed)
        if "worker-clock" in plan.kinds:
            continue
        right = replace(plan, clocks=((0.0, 1.0),) * len(plan.workers))
        hours_off = replace(plan, clocks=tuple((3600.0 * (-1) ** n, 1.0) for n in range(len(plan.workers))))
        assert _lines(hours_off) == _lines(right), seed
        compared += 1
    assert compared > 100


def test_a_worker_s_clock_is_its_own_and_moves_its_own_timers_only() -> None:
    loop = SimLoop()
    seen: list[tuple[str, float, float]] = []

    async def work(tag: str) -> None:
        worker_tag.set(tag)
        before = loop.time()
        await asyncio.sleep(8.0)
        seen.append((tag, loop.now, loop.time() - before))

    async def main() -> None:
        loop.set_clock("fast", Clock(-100.0, 2.0))
        loop.set_clock("jumps", Clock(50.0))
        tasks = [loop.create_task(work(tag)) for tag in ("right", "fast", "jumps")]
        await asyncio.sleep(1.0)
        loop.jump("jumps", 5.0)
        await asyncio.gather(*tasks)

    loop.run_until_complete(main())
    SimLoop.graveyard.append(loop)
    assert seen == [("jumps", 3.0, 8.0), ("fast", 4.0, 8.0), ("right", 8.0, 8.0)]


def test_a_zombie_that_acts_after_a_probe_found_nothing_is_the_known_window_of_probe() -> None:
    """Its key was released, so the next caller may have another request (R14): two requests ran, no promise is broken."""
    workers = (
        (Op("k0", 5.1, 0.0, 20.0, kind="reconcile"),),
        (Op("k1", 0.0, 3.0, 0.0, request=1),),
    )
    paused = Fault("pause-at-point", 1, span=5.6, nth=2, point="renew.sent")
    broken, world = check(Plan(5006534, "probe", 2.0, 0.001, workers, (paused,)))
    assert {effect.request for effect in world.effects if effect.name.endswith("k1")} == {0, 1}
    assert not broken


@pytest.mark.parametrize(("mode", "effects"), [("retry", 2), ("hold", 1), ("tx", 1)])
def test_a_lease_too_short_for_its_network_lapses_without_a_fault(mode: Mode, effects: int) -> None:
    """Seed 242 draws a renewal that takes most of its lease. What promises once keeps it, what retries does not."""
    workers = ((Op("k0", 0.0, 0.75, 0.0),), (Op("k0", 0.1, 0.01, 5.0),))
    broken, world = check(Plan(242, mode, 0.5, 0.05, workers, ()))
    assert world.server.auditor.lapsed or mode == "hold"
    made = world.server.effects if mode == "tx" else world.effects
    assert len(made) == effects
    assert not broken


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


STRANGERS = """
from semel.testing.simulation import Workload, plan_of, register

def never(world):
    return ["S1: this is checked"]

async def publish(world, face, op, answered): ...

register(Workload("strangers", plan=plan_of, calls={"publish": publish}, checks=(never,)))
"""


@pytest.mark.parametrize("which", [["--schedules", "3", "--partial"], ["--seed", "1"]])
def test_plans_of_another_workload_are_refused_and_not_played_without_its_checks(
    tmp_path: Path, which: list[str]
) -> None:
    (tmp_path / "strangers.py").write_text(STRANGERS, "utf-8")
    words = ("-m", "semel.testing.simulation", "--load", "strangers", "--workload", "strangers")
    done = _run(*words, *which, path=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "workload='core'" in done.stderr
    assert "workload='strangers'" in done.stderr


def test_plans_of_another_workload_are_refused_by_the_runner_and_the_story() -> None:
    register(Workload("guests", plan=plan_of, calls={}))
    with pytest.raises(ValueError, match="workload='guests'"):
        explore(0, 3, workload="guests")
    with pytest.raises(ValueError, match="workload='guests'"):
        told(0, workload="guests")


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
    for option in (
        "tombstone",
        "purge_every",
        "retention",
        "ids",
        "doubts",
        "warns",
        "batches",
        "cache",
        "clocks",
    ):
        assert {bool(getattr(plan, option)) for plan in plans} == {True, False}, option


def _traces(python: str, packages: str, hashes: str = "0") -> tuple[str, dict[str, str]]:
    """The version of a Python, and by workload the digest of its traces there."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [python, "-c", TRACES],
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(root / "src"), packages]), "PYTHONHASHSEED": hashes},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    version, *traces = done.stdout.splitlines()
    return version, dict(line.split() for line in traces)
