"""A handful of cells that need no server: these run in every mode of the suite."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from semel.cli.commands import app

CELL = "sqlite/{}/{}/{}@{}"
FEW = [
    CELL.format("sync", "retry", "kill", "run.returned"),
    CELL.format("async", "hold", "kill", "run.returned"),
    CELL.format("sync", "tx", "zombie", "commit.sent"),
    CELL.format("async", "keyed", "cancel", "effect.made"),
    CELL.format("async", "http-opaque", "kill", "effect.made"),
    CELL.format("sync", "http-stream", "zombie", "http.responding"),
    CELL.format("async", "relay-handler", "kill", "relay.published"),
]


def test_semel_chaos_runs_the_cells_that_it_is_told_and_writes_a_report(tmp_path: Path) -> None:
    words = [word for name in FEW for word in ("--cell", name)]
    done = CliRunner().invoke(app, ["chaos", *words, "--drivers", "2", "--report", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "7 cells, 7 schedules" in done.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html", "chaos.json", "matrix.md"}


def test_semel_chaos_lists_cells_with_their_verdict_or_their_reason() -> None:
    done = CliRunner().invoke(app, ["chaos", "--list", "--only", "sqlite/sync/hold/*"])
    assert "sqlite/sync/hold/kill@run.returned               unknown" in done.output
    assert "n/a: SQLite has no network" in done.output
