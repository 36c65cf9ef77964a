"""R29: a function forks, and its child comes back out of it. The run is the parent's: the child records nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .test_prefork import ASYNC, ROOT, STORES, SYNC, url_of


@pytest.mark.parametrize(
    ("leaving", "told"),
    [("exits", 3), ("raises", 4), ("returns", 5), ("steps", 5)],
    ids=lambda each: str(each),
)
@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("store", STORES)
def test_R29_a_child_that_a_function_forks_does_not_settle_its_run(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, colour: str, leaving: str, told: int
) -> None:
    url = url_of(request, store, tmp_path, SYNC if colour == "sync" else ASYNC)
    program = [sys.executable, "-W", "ignore", "-m", "tests.processes.forking", url, colour, leaving]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines() == [f"child {told}", "of the parent 1 of the parent"], ended.stderr
