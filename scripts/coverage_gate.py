"""The coverage thresholds, and nothing else decides them.

Lines and branches in percent by path prefix below src/semel. `./test` calls this with the JSON report of `coverage json`
after every part has run; with `--tell` nothing is asked for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Where a wrong line runs somebody's effect twice every line and branch is run; elsewhere nearly all.
THRESHOLDS: dict[str, float] = {
    "model.py": 100.0,
    "flow.py": 100.0,
    "stores/": 100.0,
    "": 95.0,
}
PREFIX = "src/semel/"
WORST = 25
"""Files, and gaps of one file, that are named at most: of the whole package nearly every file has a gap."""


def main(report: Path, *, tell: bool) -> int:
    """Print each group's coverage; 1 if one is below its threshold, with its gaps."""
    files: dict[str, Any] = json.loads(report.read_text("utf-8"))["files"]
    below = False
    for prefix, threshold in THRESHOLDS.items():
        group = {name: file for name, file in files.items() if name.startswith(PREFIX + prefix)}
        covered, total = _counted(group.values())
        percent = 100.0 * covered / total if total else 0.0
        # Cut, not rounded: one gap among thousands must not read as 100.
        line = f"coverage {prefix or 'overall':12}{int(percent * 100) / 100:7.2f} %"
        print(line if tell else f"{line}  needs {threshold:g}")
        if not tell and percent < threshold:
            below = True
            _name_gaps(group)
    return 1 if below else 0


def _counted(files: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """What was run, and what there is, in lines and branches."""
    covered = total = 0
    for file in files:
        summary = file["summary"]
        covered += summary["covered_lines"] + summary["covered_branches"]
        total += summary["num_statements"] + summary["num_branches"]
    return covered, total


def _name_gaps(group: dict[str, Any]) -> None:
    if not group:
        print("  no file of it was measured")
    gaps = {name: _gaps(file) for name, file in group.items()}
    worst = sorted((name for name in gaps if gaps[name]), key=lambda name: (-len(gaps[name]), name))
    for name in worst[:WORST]:
        more = len(gaps[name]) - WORST
        print(f"  {name}: not run: {', '.join(gaps[name][:WORST])}{f' and {more} more' if more > 0 else ''}")
    if worst[WORST:]:
        print(f"  and {len(worst) - WORST} files with fewer gaps each")


def _gaps(file: dict[str, Any]) -> list[str]:
    """Lines, and the ways between two lines; a way to a line that is named already says nothing new."""
    lines: list[int] = file["missing_lines"]
    ways: list[tuple[int, int]] = file["missing_branches"]
    return [str(line) for line in lines] + [
        f"{start}->{'exit' if end < 0 else end}"
        for start, end in ways
        if start not in lines and end not in lines
    ]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[-1]), tell="--tell" in sys.argv))
