"""Every planted bug is caught by the check that is named for it: with its recorded seed, and in the long run without."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import msgspec
import pytest

from semel import model
from semel.testing.mutants import MUTANTS, Catch, catch, hunt, planted, search
from semel.testing.mutants.__main__ import main
from semel.testing.mutants.hunt import clause_of
from semel.testing.mutants.plant import recorded_seeds
from semel.testing.simulation.invariants import CHECKS
from semel.testing.simulation.plans import plan_of
from semel.testing.simulation.runner import check, explore, names_of
from semel.testing.simulation.workloads import workload_of
from semel.testing.simulation.world import World
from tests.command_line import refused

MODE = os.environ.get("SEMEL_TEST", "full")
SIMULATED = [name for name, mutant in MUTANTS.items() if not mutant.store]
REAL = [name for name, mutant in MUTANTS.items() if mutant.store]


@pytest.fixture(scope="module")
def table() -> Iterator[list[Catch]]:
    lines: list[Catch] = []
    yield lines
    print(f"\n{'mutant':32s} {'caught by':10s} schedules  also seen by")
    for each in lines:
        print(f"{each.name:32s} {each.check[:40]:10s} {each.schedules:9d}  {' '.join(each.others)}")


@pytest.mark.parametrize("name", SIMULATED)
def test_a_planted_bug_is_caught_by_its_check(name: str, table: list[Catch]) -> None:
    caught = catch(name)
    table.append(caught)
    assert caught.caught, f"{name} survived {caught.schedules} schedules of {caught.check}"
    assert caught.stale is None, (
        f"seed {caught.stale} of {name} is stale: seed {caught.seed} catches it now. "
        f"python -m semel.testing.mutants --record {name}"
    )


@pytest.mark.services
@pytest.mark.parametrize("name", REAL)
def test_a_broken_statement_is_caught_by_its_clause(name: str, table: list[Catch]) -> None:
    caught = catch(name)
    table.append(caught)
    assert caught.caught, f"{name} survived {caught.check}"
    assert not clause_of(MUTANTS[name], plant=False).caught, "the clause fails without the bug too"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SIMULATED)
def test_a_planted_bug_is_found_without_its_seed(name: str, table: list[Catch]) -> None:
    # Seeds that were never looked at when the mutants were recorded.
    caught = search(name, first=1_000_000, most=20_000)
    table.append(caught)
    assert caught.caught, f"{name} survived {caught.schedules} schedules"


def test_the_recorded_seeds_break_nothing_in_the_product_itself() -> None:
    for workload, seed in sorted({(MUTANTS[name].workload, seed) for name, seed in recorded_seeds().items()}):
        assert not explore(seed, 1, workload=workload).failures


def test_a_stale_seed_is_told_and_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tombstone-unseen"
    blind = next(seed for seed in range(100) if not plan_of(seed).tombstone)
    monkeypatch.setattr(hunt, "recorded_seeds", lambda: {name: blind})
    caught = catch(name)
    assert (caught.stale, caught.caught) == (blind, True)
    assert caught.seed != blind


def test_there_are_twenty_mutants_and_each_names_a_check_that_exists() -> None:
    assert len(MUTANTS) >= 20
    assert set(recorded_seeds()) == set(SIMULATED)
    assert {MUTANTS[name].check for name in SIMULATED} <= set(CHECKS)
    assert all(mutant.what for mutant in MUTANTS.values())


def test_a_mutant_is_gone_when_its_block_ends() -> None:
    before = model.settle
    with planted("settle-unfenced"):
        assert model.settle is not before
    assert model.settle is before


def test_a_lease_by_the_worker_s_clock_is_seen_because_clocks_are_off() -> None:
    name = "lease-by-the-worker-s-clock"
    plan = plan_of(recorded_seeds()[name])
    assert plan.clocks
    with planted(name):
        assert "I4" in names_of(check(plan)[0])
        # The history still tells the moment of the request from that of the decision (H1); the lease is not broken.
        assert "I4" not in names_of(check(msgspec.structs.replace(plan, clocks=()))[0])


def told(name: str) -> list[str]:
    """What its recorded seed shows of a mutant."""
    with planted(name) as mutant:
        return check(workload_of(mutant.workload).plan(recorded_seeds()[name]))[0]


def test_R9_says_of_a_wrong_word_and_of_a_wrong_delay_what_differs() -> None:
    r9 = re.compile(r"R9: on_error said (\w+) after (\S+) s, the key is (\w+) after (\S+) s")
    word, delay = (
        [told_of.groups() for line in told(name) if (told_of := r9.match(line))]
        for name in ("on-error-unheard", "release-at-once")
    )
    assert any(said != was for said, _, was, _ in word)
    assert delay
    assert all(said == was and after != then for said, after, was, then in delay)


def test_R31_alone_stands_between_a_caller_and_a_leader_that_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = "cancelled-leader-is-followed"
    assert MUTANTS[followed].check == "R31"
    assert "R31" in names_of(told(followed))
    monkeypatch.setattr(World, "_check_followed", lambda *_: None)
    assert "R31" not in names_of(told(followed))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nonsense"], "no mutant 'nonsense'; --list names them all"),
        (["--plan", "{}"], "--plan shows one mutant: name it"),
        (["settle-unfenced", "--plan", "{"], "this is no plan"),
        (
            ["settle-unfenced", "--report", "/dev/null/x"],
            "--report /dev/null/x: nothing can be written there",
        ),
    ],
)
def test_the_command_line_says_what_is_wrong_with_its_arguments(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mutants", *arguments])
    assert told in refused(main, capsys)
