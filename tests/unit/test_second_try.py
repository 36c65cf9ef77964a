"""A complete run of `./test` gives a few tests that failed a second try, alone, and says so; never in a part that proves a promise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / "scripts" / "check.py"
DRIVER = "import sys; sys.path.insert(0, 'scripts'); import check; check.LINTERS = {}; check.ASIDE = (); sys.exit(check.main())"
STEADY = "def test_steady(): pass\n"
# Fails for the first time in a folder, and passes from then on.
ONCE = "import pathlib\n\ndef test_{0}():\n    was = pathlib.Path({0!r}).exists()\n    pathlib.Path({0!r}).touch()\n    assert was\n"

# What a module left open is an error at the end of its last test, and gone when it runs again.
LEFT_OPEN = """
import pathlib, pytest

@pytest.fixture(scope="module", autouse=True)
def collected():
    yield
    was = pathlib.Path("left").exists()
    pathlib.Path("left").touch()
    assert was

def test_innocent(): pass
"""
# Another process plays the test of one that died again, and then it passes.
DIED = """
import os, pathlib

def test_gone():
    if not pathlib.Path("gone").exists():
        pathlib.Path("gone").touch()
        os._exit(1)
"""
SKIPPED = """
import pathlib, pytest

def test_late():
    if pathlib.Path("late").exists():
        pytest.skip("not today")
    pathlib.Path("late").touch()
    assert False
"""


def _run(tmp_path: Path, *words: str, **parts: str) -> tuple[int, str]:
    (tmp_path / "scripts").mkdir()
    shutil.copy(CHECK, tmp_path / "scripts")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    for part, text in parts.items():
        folder = tmp_path / "tests" / part
        folder.mkdir(parents=True)
        (folder / f"test_{part}.py").write_text(text, "utf-8")
    command = [sys.executable, "-c", DRIVER, *(words if "-n" in words else ["-n", "1", *words])]
    alone = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p xdist",
    }  # seconds of imports, for nothing
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=alone,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_failed_and_passes_alone_is_named_and_counts(tmp_path: Path) -> None:
    code, said = _run(tmp_path, ops=STEADY + ONCE.format("late"))
    assert "1 failed, 1 passed" in said
    assert (
        "UNSTEADY, it failed among the others and passed without them; to be repaired: tests/ops/test_ops.py::test_late"
        in said
    )
    assert "2 passed, 0 failed, 0 skipped" in said
    assert code == 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((), {"ops": "def test_wrong(): assert False\n"}),
        ((), {"ops": "".join(ONCE.format(name) for name in ("a", "b", "c", "d"))}),
        ((), {"races": ONCE.format("raced")}),
        (("ops",), {"ops": ONCE.format("named")}),
        ((), {"ops": LEFT_OPEN}),
        ((), {"ops": SKIPPED}),
        ((), {"ops": ONCE.format("late") + DIED}),
        (("-n", "2"), {"ops": ONCE.format("late") + DIED}),
    ],
    ids=[
        "fails-again",
        "many",
        "a-promise",
        "asked-for-by-name",
        "an-error",
        "skipped-later",
        "a-process-died",
        "a-worker-died",
    ],
)
def test_what_counts_at_once(tmp_path: Path, words: tuple[str, ...], parts: dict[str, str]) -> None:
    code, said = _run(tmp_path, *words, **parts)
    assert code == 1, said
    assert "UNSTEADY" not in said


def test_few_are_few_in_all_parts_together(tmp_path: Path) -> None:
    two = {"ops": ONCE.format("a") + ONCE.format("b"), "http": ONCE.format("c") + ONCE.format("d")}
    code, said = _run(tmp_path, **two)
    assert code == 1
    assert "FAILED: 4 tests are unsteady, 3 may be" in said
