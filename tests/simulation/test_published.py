"""The published figures: written by the commands, and current in shape."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from semel.testing.mutants import MUTANTS
from semel.testing.simulation.published import PAGE, page
from semel.testing.simulation.workloads import workload_of

DOCS = Path(__file__).parents[2] / "docs" / "chaos"
WORKLOADS = ("core", "sync", "stragglers", "resets", "beats", "cancels")


def published(name: str) -> Any:
    return json.loads((DOCS / name).read_text("utf-8"))


def test_the_page_is_made_of_the_files_beside_it() -> None:
    assert (DOCS / PAGE).read_text("utf-8") == page(DOCS)


def test_the_published_simulations_reached_every_window_and_broke_nothing() -> None:
    told = published("simulation.json")
    runs = {run["workload"]: run for run in told["runs"]}
    assert set(runs) >= set(WORKLOADS)
    assert sum(run["schedules"] for run in runs.values()) == told["schedules"] >= 40_000
    assert {run["broken promises"] for run in runs.values()} == {0}
    windows = {row["window"]: row for row in told["windows"]}
    for workload in WORKLOADS:
        missed = [name for name in workload_of(workload).windows if not windows.get(name, {}).get(workload)]
        assert not missed, f"publish it anew: {runs[workload]['command']}"


def test_every_mutant_is_published_as_caught() -> None:
    told = published("mutants.json")
    rows = {row["mutant"]: row for row in told["mutants"]}
    assert set(rows) == set(MUTANTS), f"publish them anew: {told['command']}"
    assert told["caught"] == told["planted"] == len(rows)
    for name, row in rows.items():
        assert row["caught by"].startswith(MUTANTS[name].check), name
        assert MUTANTS[name].store or int(row["seed"]) >= 0


@pytest.mark.parametrize(
    ("module", "arguments", "file"),
    [
        ("simulation", ["--schedules", "20", "--partial", "--workload", "stragglers"], "simulation.json"),
        ("mutants", ["settle-unfenced", "tenant-left-out"], "mutants.json"),
    ],
)
def test_the_commands_write_their_figures(
    module: str, arguments: list[str], file: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"semel.testing.{module}", *arguments, "--report", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / file).read_text("utf-8"))
    assert set(published(file)) == set(told)
    table = "runs" if module == "simulation" else "mutants"
    assert list(told[table][0]) == list(published(file)[table][0])
    assert (tmp_path / PAGE).read_text("utf-8") == page(tmp_path)
