"""The demo as a user runs it: real processes, a real kill, a ledger outside of semel, an exit code that means something."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semel import Semel
from semel.demo import view
from semel.demo.ledger import Effect, append, read
from semel.demo.program import main
from semel.demo.race import Plan, Race
from semel.demo.summary import judge

SMALL = ("--workers", "3", "--keys", "12", "--seconds", "1", "--lease", "1.5")


def start(tmp_path: Path, *options: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """With its temporary folder in ours, so that its processes are known by their command lines."""
    command = [sys.executable, "-m", "semel.demo", *SMALL, *options]
    environment = os.environ | {"TMPDIR": str(tmp_path), "TERM": "xterm-256color", "COLUMNS": "100"}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


def workers_in(tmp_path: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "semel.demo.worker" in command and str(tmp_path) in command:
                found.append(int(entry.name))
    return found


def wait_for_no_workers(tmp_path: Path) -> None:
    until = time.monotonic() + 60
    while workers_in(tmp_path):
        assert time.monotonic() < until, "workers are left behind"
        time.sleep(0.01)


def test_every_key_has_one_effect_although_a_worker_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "--plain")
    out, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, ""), out
    assert "was killed by SIGKILL inside order-0005" in out
    assert "took order-0005 over and finished it" in out
    assert "lines for 12 of 12 keys" in out
    assert "Every key has exactly one effect" in out
    assert "killed before it made its effect" in out
    assert list(tmp_path.iterdir()) == [], "its temporary folder is gone"
    assert workers_in(tmp_path) == []


def test_on_a_terminal_the_view_is_live(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(tmp_path, stdout=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # how a pseudo-terminal says that nobody writes any more
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    _, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, ""), shown.decode()[-3000:]
    assert "taken over" in shown.decode()
    assert "12/12 keys done" in shown.decode()
    assert b"\x1b[" in shown, "it moves the cursor"


def first_line_of_progress(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if "keys done" in line:
            return
    pytest.fail("the demo ended before it began")


def test_ctrl_c_ends_it_and_its_workers(tmp_path: Path) -> None:
    process = start(tmp_path, "--plain", "--seconds", "60")
    first_line_of_progress(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (130, "stopped\n")
    assert workers_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_workers_do_not_outlive_a_demo_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "--plain", "--seconds", "60")
    first_line_of_progress(process)
    assert len(workers_in(tmp_path)) == 3
    process.kill()
    process.communicate(timeout=90)
    wait_for_no_workers(tmp_path)


@pytest.mark.parametrize(
    "options",
    [["--workers", "1"], ["--keys", "two"], ["--seconds", "0"], ["--lease", "0.1"], ["--speed", "9"]],
)
def test_wrong_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ the judgement


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Race, list[Effect], Semel]:
    """A race of one caller that went well, with a kill and a takeover told by the way."""
    race = Race(Plan(workers=2, keys=3, seconds=1.0, lease=1.0), tmp_path)
    ledger = tmp_path / "ledger.txt"
    with Semel(f"sqlite:///{tmp_path}/semel.db", operation="orders.charge") as once:
        for key in race.keys:

            def charge(key: str = key) -> str:
                append(ledger, Effect(key, f"receipt-{key}", "1", "worker-2", "downstream"))
                return f"receipt-{key}"

            race.receipts[key].add(once.execute(key, charge).value)
    race.killed_at, race.taken_over_by = 1.0, 2
    return race, read(ledger), Semel(f"sqlite:///{tmp_path}/semel.db", operation="orders.charge")


def test_a_race_that_went_well_has_no_faults(finished: tuple[Race, list[Effect], Semel]) -> None:
    race, effects, once = finished
    with once:
        assert judge(race, effects, once).faults == ()


def test_what_went_wrong_is_named(finished: tuple[Race, list[Effect], Semel]) -> None:
    race, effects, once = finished
    first, second, third = race.keys
    with once:
        doubled = judge(race, [*effects, effects[0]], once)
        assert doubled.faults == (f"{first} has 2 effects in the ledger",)
        assert f"FAILED: {first} has 2 effects" in doubled.text
        assert judge(race, effects[:2], once).faults[0] == f"{third} has 0 effects in the ledger"
        race.receipts[second].add("another")
        assert "callers got" in judge(race, effects, once).faults[0]
        race.receipts[second].discard("another")
        once.forget(second)
        assert judge(race, effects, once).faults == (f"{second} is absent in the store, not done",)
        race.taken_over_by = 0
        assert f"nobody took {race.victims_key} over" in judge(race, effects, once).faults
        race.killed_at = 0.0
        race.troubles.append("worker-2 ended by itself, with code 1")
        faults = judge(race, effects, once).faults
        assert any("no worker was killed" in fault for fault in faults)
        assert faults[0] == "worker-2 ended by itself, with code 1"


def test_an_empty_ledger_is_no_error(tmp_path: Path) -> None:
    assert read(tmp_path / "ledger.txt") == []


def test_a_demo_with_a_fault_ends_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The worker with the kill, and nobody else: each of them fails to start.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["--keys", "3", "--workers", "2", "--plain"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: worker-1 ended by itself, with code 1" in out
    assert "FAILED: order-0001 has 0 effects" in out


def test_a_demo_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(Plan(workers=2, keys=3, seconds=1.0, lease=1.0), tmp_path)
    monkeypatch.setattr(Plan, "limit", 0.0)
    with pytest.raises(TimeoutError, match="did not end"):
        view.show(race, plain=True)


def test_without_rich_the_view_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert view._rich() is None
