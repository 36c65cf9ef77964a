"""The benchmark program runs: a figure with both terms, a page and a plot. What it measures is judged by its readers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from benches.core_parts.page import Report

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benches.core", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_the_core_benchmark_measures_and_writes_its_page(tmp_path: Path) -> None:
    done = run("sqlite", "--quick", "--into", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "64 callers, first: throughput" in done.stdout
    section = msgspec.json.decode((tmp_path / "core.json").read_bytes(), type=Report).sections["sqlite"]
    assert section.command == "./bench core sqlite --quick"
    for figure in section.figures:
        assert figure.theirs is not None
        assert figure.ours.value > 0
        assert figure.theirs.value > 0
        assert figure.what in (tmp_path / "core.md").read_text("utf-8")
    assert "<svg" in (tmp_path / "core.svg").read_text("utf-8")


def test_a_section_that_does_not_exist_is_refused_by_name() -> None:
    done = run("oracle")
    assert done.returncode == 2
    assert "oracle" in done.stderr
    assert "sqlite" in done.stderr
