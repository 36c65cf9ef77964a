"""A handful of cells that need no server: these run in every mode of the suite."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from semel import ConfigurationError
from semel.cli.commands import app
from semel.testing.chaos import nemesis, program
from semel.testing.chaos.verdicts import Result

CELL = "sqlite/{}/{}/{}@{}"
FEW = [
    CELL.format("sync", "retry", "kill", "run.returned"),
    CELL.format("async", "hold", "kill", "run.returned"),
    CELL.format("sync", "tx", "zombie", "commit.sent"),
    CELL.format("async", "keyed", "cancel", "effect.made"),
    CELL.format("async", "http-opaque", "kill", "effect.made"),
    CELL.format("sync", "http-stream", "zombie", "http.responding"),
    CELL.format("async", "grpc-db", "kill", "effect.made"),
    CELL.format("sync", "hold", "stall", "claim.sent"),
    CELL.format("async", "relay-handler", "kill", "relay.published"),
]


def test_semel_chaos_runs_the_cells_that_it_is_told_and_writes_a_report(tmp_path: Path) -> None:
    words = [word for name in FEW for word in ("--cell", name)]
    done = CliRunner().invoke(app, ["chaos", *words, "--drivers", "2", "--report", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "9 cells, 9 schedules" in done.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html", "chaos.json", "matrix.md"}


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_campaign_that_is_interrupted_tells_what_it_has_and_is_not_valid(
    by: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(self: object, result: Result, done: int, total: int) -> None:
        assert total == 60
        if done == 2:
            os.kill(os.getpid(), by)

    monkeypatch.setattr(program._Bar, "show", show)
    words = ["chaos", "--cell", FEW[0], "--cell", FEW[1], "--repeat", "30", "--drivers", "2"]
    done = CliRunner().invoke(app, [*words, "--report", str(tmp_path)])
    assert done.exit_code == 1, done.output
    assert "INVALID it was interrupted: 58 schedules were not played" in done.output
    assert msgspec.json.decode((tmp_path / "chaos.json").read_bytes())["summary"]["schedules"] == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_campaign_in_the_background_ends_at_a_signal_whatever_hangs_and_leaves_nobody_behind(
    tmp_path: Path,
) -> None:
    """Started with SIGINT ignored, as by a shell's `&`; its drivers are stopped and cannot end; more signals come while it ends."""
    words = [
        "--cell",
        FEW[0],
        "--cell",
        FEW[1],
        "--repeat",
        "100000",
        "--drivers",
        "2",
        "--report",
        str(tmp_path),
    ]
    run = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from semel.testing.chaos import runner; "
        "runner.ENDING = 2.0; from semel.testing.chaos import program; from pathlib import Path; "
        f"program._Bar.show = lambda *_: Path({str(tmp_path / 'played')!r}).touch(); import semel.cli; semel.cli.main()"
    )
    with (tmp_path / "out").open("wb") as out:
        command = [sys.executable, "-c", run, "chaos", *words]
        campaign = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        zygote = _eventually(lambda: _child(campaign.pid, "semel.testing.chaos.zygote"))
        _eventually((tmp_path / "played").exists)
        os.killpg(zygote, signal.SIGSTOP)
        campaign.send_signal(signal.SIGINT)
        time.sleep(0.5)
        for by in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            campaign.send_signal(by)
        assert campaign.wait(30) == 1
    finally:
        campaign.kill()
        campaign.wait()
    told = (tmp_path / "out").read_text()
    assert "INVALID it was interrupted: " in told, told
    assert msgspec.json.decode((tmp_path / "chaos.json").read_bytes())["summary"]["schedules"] > 0
    _eventually(lambda: not _group(zygote))


def _eventually(find: Callable[[], int]) -> int:
    until = time.monotonic() + 30
    while not (found := find()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def _child(parent: int, runs: str) -> int:
    """The child that runs this module; 0 as long as there is none."""
    for name in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with suppress(FileNotFoundError):
            if runs in Path(f"/proc/{name}/cmdline").read_text():
                return int(name)
    return 0


def _group(leader: int) -> list[int]:
    """Processes of this group that live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(folder.name))
    return found


def test_semel_chaos_lists_cells_with_their_verdict_or_their_reason() -> None:
    done = CliRunner().invoke(app, ["chaos", "--list", "--only", "sqlite/sync/hold/*"])
    assert "sqlite/sync/hold/kill@run.returned               unknown" in done.output
    assert "n/a: SQLite has no network" in done.output


@pytest.mark.parametrize(
    "name, why",
    [
        (CELL.format("sync", "retry", "reset-before", "claim.sent"), "SQLite has no network"),
        ("sqlite/*/reset-*@claim.sent", "SQLite has no network"),
    ],
)
def test_a_run_that_would_play_nothing_fails_and_says_why(name: str, why: str) -> None:
    done = CliRunner().invoke(app, ["chaos", "--cell", name])
    assert done.exit_code == 1, done.output
    assert "NOTHING WAS PLAYED" in done.output
    assert why in done.output


def test_a_peer_that_is_not_there_is_told_before_anything_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "explore", lambda *_, **__: pytest.fail("it has begun to play"))
    done = CliRunner().invoke(app, ["chaos", "--cell", FEW[0], "--peers", "no-such-python"])
    assert isinstance(done.exception, ConfigurationError), done.output
    assert "no-such-python has no package dbos" in str(done.exception)


@pytest.mark.parametrize("missing", ["sqlalchemy", "redis"])
def test_without_the_libraries_of_every_matrix_the_extras_are_named(missing: str) -> None:
    run = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['semel', 'chaos', '--list']; import semel.cli; semel.cli.main()"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("semel: the crash matrix is played on ")
    assert 'pip install "semel[cli,redis,postgres,mysql,messaging]"' in done.stderr


def test_a_run_whose_cells_all_need_a_missing_compiler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemesis, "no_compiler", lambda: "no C compiler is here")
    done = CliRunner().invoke(app, ["chaos", "--cell", "sqlite/*/power-loss@acked.full"])
    assert done.exit_code == 1, done.output
    assert "no C compiler is here" in done.output
