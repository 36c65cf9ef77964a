"""The published figures: written by the commands, and current in shape."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from semel.testing.mutants import MUTANTS
from semel.testing.simulation.invariants import CHECKS
from semel.testing.simulation.published import PAGE, page, publish
from semel.testing.simulation.runner import Report
from semel.testing.simulation.workloads import workload_of

DOCS = Path(__file__).parents[2] / "docs" / "chaos"
WORKLOADS = ("core", "sync", "stragglers", "resets", "beats", "cancels", "leads")


def published(name: str) -> Any:
    return json.loads((DOCS / name).read_text("utf-8"))


def test_the_page_is_made_of_the_files_beside_it() -> None:
    assert (DOCS / PAGE).read_text("utf-8") == page(DOCS)


def test_the_published_simulations_reached_every_window_and_broke_nothing() -> None:
    told = published("simulation.json")
    runs = {run["workload"]: run for run in told["runs"]}
    assert set(runs) == set(WORKLOADS)
    assert (told["workloads"], told["checks"]) == (len(WORKLOADS), len(CHECKS)), "publish them anew"
    assert sum(run["schedules"] for run in runs.values()) == told["schedules"] >= 40_000
    assert {run["broken promises"] for run in runs.values()} == {0}
    windows = {row["window"]: row for row in told["windows"]}
    for workload in WORKLOADS:
        hit = {name for name, row in windows.items() if row.get(workload)}
        assert hit == workload_of(workload).windows, f"publish it anew: {runs[workload]['command']}"
        shown = {
            f"{each.split()[0]} {anomaly}"
            for anomaly in ("doubled", "unknown")
            for each in runs[workload][f"keys {anomaly}, by mode"].split(", ")
        }
        assert shown >= set(workload_of(workload).shows), workload


def test_every_mutant_is_published_as_caught() -> None:
    told = published("mutants.json")
    rows = {row["mutant"]: row for row in told["mutants"]}
    assert set(rows) == set(MUTANTS), f"publish them anew: {told['command']}"
    assert told["caught"] == told["planted"] == len(rows)
    assert told["checks"] == len({mutant.check for mutant in MUTANTS.values()})
    for name, row in rows.items():
        assert row["caught by"].startswith(MUTANTS[name].check), name
        assert MUTANTS[name].store or int(row["seed"]) >= 0


def test_every_run_says_when_it_was_made_and_with_which_version() -> None:
    for told in (
        published("simulation.json"),
        *published("simulation.json")["runs"],
        published("mutants.json"),
    ):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", told["made"])
        assert told["semel"] == version("semel")
        assert told["python"]


def test_a_run_published_again_keeps_nothing_of_the_one_before_and_leaves_the_others(tmp_path: Path) -> None:
    reached = dict.fromkeys(workload_of("beats").windows, 7)
    publish(tmp_path, "beats", 0, Report(schedules=5, reached=reached), command="first")
    publish(tmp_path, "stragglers", 0, Report(schedules=1, reached={"late@claim": 1}), command="other")
    file = tmp_path / "simulation.json"
    told = json.loads(file.read_text("utf-8"))
    told["windows"].append({"window": "gone", "beats": 3})
    told["runs"][0]["made"] = told["runs"][1]["made"] = "then"
    file.write_text(json.dumps(told), "utf-8")
    publish(tmp_path, "beats", 0, Report(schedules=6), command="second")
    told = json.loads(file.read_text("utf-8"))
    runs = {run["workload"]: run for run in told["runs"]}
    assert (runs["beats"]["schedules"], told["workloads"]) == (6, 2)
    assert runs["stragglers"]["made"] == "then"
    assert runs["beats"]["made"] != "then"
    windows = {row.pop("window"): row for row in told["windows"]}
    never = {name: {"stragglers": 0} for name in ("kill", "lose-reply@claim")}
    assert windows == never | {
        "late@claim": {"stragglers": 1},
        "pause": {"beats": 0},
        "renew.sent": {"beats": 0},
    }


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
