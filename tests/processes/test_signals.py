"""A signal's handler may raise anywhere (Ctrl-C, SystemExit, soft time limits): nothing is left locked behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("what", ["heart", "young hearts", "seat", "flag", "file"])
def test_R29_a_storm_of_signals_that_raise_leaves_nobody_waiting(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.processes.stormed", what, str(tmp_path)]
    # Whatever measures coverage in there would be struck as well, and has locks of its own.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=110
    )
    assert (done.returncode, done.stdout.strip()) == (0, "calm"), done.stderr
