"""What `./test --coverage` asks for: every line and branch of the model, the flow and the stores, and nearly all of the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GATE = Path(__file__).resolve().parents[2] / "scripts" / "coverage_gate.py"


def _file(lines: int = 90, missing: tuple[int, ...] = (), branches: tuple[tuple[int, int], ...] = ()) -> Any:
    """As `coverage json` tells of one file with `lines` lines and ten branches."""
    return {
        "missing_lines": missing,
        "missing_branches": branches,
        "summary": {
            "num_statements": lines,
            "covered_lines": lines - len(missing),
            "num_branches": 10,
            "covered_branches": 10 - len(branches),
        },
    }


def _asked(tmp_path: Path, *words: str, **changed: Any) -> tuple[int, str]:
    files = {"model.py": _file(), "flow.py": _file(), "stores/memory.py": _file(), "cli/app.py": _file()}
    files |= {name.replace("__", "/") + ".py": file for name, file in changed.items()}
    report = tmp_path / "coverage.json"
    told = {f"src/semel/{name}": file for name, file in files.items() if file is not None}
    report.write_text(json.dumps({"files": told}), "utf-8")
    done = subprocess.run([sys.executable, GATE, *words, report], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_what_is_run_whole_passes_and_tells_its_figures(tmp_path: Path) -> None:
    code, told = _asked(tmp_path)
    assert code == 0
    assert told.count("100.00 %") == 4
    assert "not run" not in told


@pytest.mark.parametrize(
    ("name", "file", "gap"),
    [
        ("model", _file(missing=(41,), branches=((40, 41),)), "src/semel/model.py: not run: 41\n"),
        ("flow", _file(branches=((87, 85),)), "src/semel/flow.py: not run: 87->85"),
        ("stores__redis__loops", _file(9_999_990, branches=((7, -3),)), "redis/loops.py: not run: 7->exit"),
    ],
)
def test_one_line_or_branch_of_the_core_is_too_many_and_is_named(
    tmp_path: Path, name: str, file: Any, gap: str
) -> None:
    code, told = _asked(tmp_path, **{name: file})
    assert code == 1
    assert gap in told
    assert told.count("100.00 %") == 2


def test_the_rest_may_have_gaps_but_not_many(tmp_path: Path) -> None:
    few, many = (_file(missing=tuple(range(number))) for number in (20, 21))
    assert _asked(tmp_path, cli__app=few)[0] == 0
    code, told = _asked(tmp_path, cli__app=many)
    assert code == 1
    assert "overall       94.75 %  needs 95" in told
    assert "cli/app.py: not run: 0, 1, 2," in told


def test_a_long_list_of_gaps_is_cut(tmp_path: Path) -> None:
    files = {f"cli__app{number}": _file(missing=tuple(range(60 - number))) for number in range(30)}
    told = _asked(tmp_path, **files)[1]
    assert "cli/app0.py: not run: 0, 1," in told
    assert "24 and 35 more\n" in told
    assert "and 5 files with fewer gaps each" in told


def test_a_core_that_was_not_measured_at_all_does_not_pass(tmp_path: Path) -> None:
    code, told = _asked(tmp_path, flow=None)
    assert code == 1
    assert "no file of it was measured" in told


def test_of_a_part_alone_nothing_is_asked(tmp_path: Path) -> None:
    code, told = _asked(tmp_path, "--tell", model=_file(missing=(1,)), flow=None)
    assert code == 0
    assert "needs" not in told
