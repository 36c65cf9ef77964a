"""R27 across processes: a killed caller leaves both or neither, and racing callers make one row per key."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.within.lab import Lab

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = ("sqlite3", "session-pysqlite", "psycopg", "session-asyncpg", "pymysql", "asyncmy")


def start(lab: Lab, what: str, detail: str, seed: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.within.worker", what, lab.driver, lab.place, detail, str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "when, left", [("inside", (0, [])), ("before-commit", (0, [])), ("after-commit", (1, ["done"]))]
)
def test_R27_kill_9_leaves_both_or_neither(make: Any, driver: str, when: str, left: Any) -> None:
    lab: Lab = make(driver)
    process = start(lab, "crash", when)
    _, said = process.communicate(timeout=100)
    assert process.returncode == -9, said
    assert (lab.orders("k1"), lab.records("k1")) == left


@pytest.mark.parametrize("driver", [*DRIVERS, "asyncpg"])
def test_R27_racing_processes_make_one_row_per_key(make: Any, driver: str) -> None:
    lab: Lab = make(driver)
    with ExitStack() as stack:
        racers = [
            stack.enter_context(start(lab, "race", "12", seed)) for seed in range(2)
        ]  # four callers each
        for racer in racers:
            _, said = racer.communicate(timeout=100)
            assert racer.returncode == 0, said
    assert {f"key-{number}": lab.orders(f"key-{number}") for number in range(12)} == {
        f"key-{number}": 1 for number in range(12)
    }
    assert all(lab.records(f"key-{number}") == ["done"] for number in range(12))
