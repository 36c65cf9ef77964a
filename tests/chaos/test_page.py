"""The page can be read: no silent field, no empty column, no rounded seed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from semel import ConfigurationError, __version__
from semel.cli.commands import app
from semel.testing.chaos import Heir, Report, Result, Verdict, matrix, show_again
from semel.testing.chaos.goals import campaign
from semel.testing.chaos.page import write
from semel.testing.chaos.peers import CASES, Finding, Peer

CELLS = matrix()
SEED = 7_050_001


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page")
    runs = [{"workload": "core", "first seed": SEED, "share": 0.5}]
    (found / "simulation.json").write_text(json.dumps({"schedules": SEED, "runs": runs}))
    write(Report(), CELLS, found, "semel chaos")
    return found


def section(folder: Path, mode: str) -> str:
    page = (folder / "index.html").read_text("utf-8")
    found = re.search(rf'<h2 id="mode-{mode}">.*?(?=<h2 )', page, re.DOTALL)
    assert found is not None
    return found[0]


def test_no_field_is_empty(folder: Path) -> None:
    assert "<td></td>" not in (folder / "index.html").read_text("utf-8")


def test_what_a_store_never_meets_is_said_at_each_point(folder: Path) -> None:
    row = re.search(r'@claim\.won\'">claim\.won</th>(.*?)</tr>', section(folder, "retry"))
    assert row is not None
    fields = re.findall(r">([^<]+)</td>", row[1])
    assert fields == ["not run"] * 10 + ["n/a"] * 2, "memory has no kill"


def test_a_store_without_a_cell_has_no_column_and_its_reason_below(folder: Path) -> None:
    shown = section(folder, "inbox-nats")
    assert re.findall(r'<th scope="colgroup" colspan="2">(\w+)</th>', shown) == ["postgres"]
    assert "<li>mariadb, sqlite: a broker hands out the same: it is broken on postgres</li>" in shown
    assert "<li>redis, cluster, memory: an inbox keeps its admissions" in shown


def test_a_seed_is_told_as_it_is(folder: Path) -> None:
    for name in ("index.html", "matrix.md"):
        text = (folder / name).read_text("utf-8")
        assert f"{SEED:,}" in text
        assert "e+06" not in text


def test_code_in_a_reason_is_code(folder: Path) -> None:
    page = (folder / "index.html").read_text("utf-8")
    assert "a thread cannot be cancelled: <code>interrupt</code> is its fault" in page


# ---- a run that is over, and what it had to reach

CELL = next(cell for cell in CELLS if cell.applies)
NAMES = [cell.name for cell in CELLS if cell.applies]


def long_run(folder: Path, command: str = "semel chaos --long --report out") -> Path:
    """Of one schedule: far from every goal."""
    made = Result(
        cell=CELL.name, verdict=Verdict.ONCE, heir=Heir.RAN, agrees=True, bit=True, recovery=0.3, lease=0.2
    )
    report = Report(results=[made], seconds=1.0)
    return write(report, CELLS, folder, command, goals=campaign([made], NAMES, report.lateness))


def test_the_goals_of_a_long_run_are_on_its_page_and_so_is_that_it_missed_one(tmp_path: Path) -> None:
    page = long_run(tmp_path).read_text("utf-8")
    text = (tmp_path / "matrix.md").read_text("utf-8")
    summary = json.loads((tmp_path / "chaos.json").read_text("utf-8"))["summary"]
    missed = "store-kill: 0 (at least 100: NOT MET)"
    assert missed in summary["missed"]
    assert [each["name"] for each in summary["goals"]][:2] == ["schedules", "zombie"]
    assert f"* **missed**: {missed}" in text
    assert f"<b>{missed}</b>" in page
    assert "every cell agrees" not in page
    assert "seconds beyond the lease until recovery, p99: 0.1 (at most 1)" in page
    assert "seconds beyond the lease until recovery, p99: 0.1 (at most 1)" in text


def test_a_run_that_is_not_a_long_one_has_no_goals(folder: Path) -> None:
    assert "goals of a long run" not in (folder / "index.html").read_text("utf-8")


def test_the_page_says_when_and_by_which_commands_it_was_made(tmp_path: Path) -> None:
    finding = Finding(what=CASES[0].what, semel="another/cell", promised=Verdict.ONCE, found=[Verdict.ONCE])
    peer = Peer(name="DBOS", version="1", findings=[finding], made="2026-01-02")
    (tmp_path / "peers.json").write_bytes(msgspec.json.encode([peer]))
    page = write(Report(), CELLS, tmp_path, "semel chaos --report out").read_text("utf-8")
    text = (tmp_path / "matrix.md").read_text("utf-8")
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert f"Written by `semel chaos --report out` and `semel chaos --peers PYTHON` on {today}" in text
    assert "<code>semel chaos --report out</code>, and <code>semel chaos --peers PYTHON</code>" in page
    assert f"<dd>{today}</dd>" in page
    assert f"semel {__version__}" in page
    assert CASES[0].semel in page, "a kept run stands beside the cell that is the same case now"
    asked = write(Report(), CELLS, tmp_path, "semel chaos --peers P --report out").read_text("utf-8")
    assert "semel chaos --peers PYTHON</code>" not in asked


def test_a_page_is_written_again_from_the_json_of_its_run(tmp_path: Path) -> None:
    long_run(tmp_path / "first")
    words = ["chaos", "--from", str(tmp_path / "first" / "chaos.json"), "--report", str(tmp_path / "again")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, "it has missed its goals"
    assert "long run: store-kill: 0 (at least 100: NOT MET)" in done.output
    for name in ("index.html", "matrix.md"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes(), name
    first, again = (
        json.loads((tmp_path / name / "chaos.json").read_text("utf-8")) for name in ("first", "again")
    )
    assert again == first


def test_the_json_of_an_earlier_version_says_enough_for_a_page(tmp_path: Path) -> None:
    long_run(tmp_path / "first")
    file = tmp_path / "first" / "chaos.json"
    found = json.loads(file.read_text("utf-8"))
    goals = found["summary"]["goals"]
    for name in ("goals", "missed", "made", "hangs"):
        del found["summary"][name]
    for each in found["recovery"]:
        del each["times"]
    file.write_text(json.dumps(found))
    assert show_again(file, tmp_path / "again") == 1
    page = (tmp_path / "again" / "index.html").read_text("utf-8")
    assert "were not kept by the version that made this run" in page
    assert json.loads((tmp_path / "again" / "chaos.json").read_text("utf-8"))["summary"]["goals"] == goals


def test_a_file_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chaos.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"--from .* is not the chaos\.json of a run"):
        show_again(tmp_path / "chaos.json", tmp_path)
    done = CliRunner().invoke(app, ["chaos", "--from", str(tmp_path / "chaos.json")])
    assert isinstance(done.exception, ConfigurationError)
    assert "--report FOLDER" in str(done.exception)
