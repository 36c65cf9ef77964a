"""The coverage thresholds, and nothing else decides them.

Lines and branches in percent by path prefix below src/semel. `./test` calls this with the JSON report of `coverage json`
after every part has run; with `--tell` nothing is asked for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# The goal: 100 on model, flow and stores, 95 overall.
THRESHOLDS: dict[str, float] = {
    "model.py": 100.0,
    "flow.py": 100.0,
    "stores/": 99.4,
    "": 95.0,
}
PREFIX = "src/semel/"


def main(report: Path, *, tell: bool) -> int:
    """Print each group's coverage; 1 if one is below its threshold."""
    files: dict[str, Any] = json.loads(report.read_text("utf-8"))["files"]
    below = False
    for prefix, threshold in THRESHOLDS.items():
        group = {name: file for name, file in files.items() if name.startswith(PREFIX + prefix)}
        percent = _percent(group)
        print(
            f"coverage {prefix or 'overall':12}{percent:7.2f} %" + ("" if tell else f"  needs {threshold:g}")
        )
        if not tell and (percent < threshold or not group):
            below = True
            _name_gaps(group)
    return 1 if below else 0


def _percent(group: dict[str, Any]) -> float:
    covered = total = 0
    for file in group.values():
        summary = file["summary"]
        covered += summary["covered_lines"] + summary["covered_branches"]
        total += summary["num_statements"] + summary["num_branches"]
    return 100.0 * covered / total if total else 0.0


def _name_gaps(group: dict[str, Any]) -> None:
    for name, file in sorted(group.items()):
        lines, branches = file["missing_lines"], file["missing_branches"]
        if lines or branches:
            print(f"  {name}: lines {lines} branches {branches}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[-1]), tell="--tell" in sys.argv))
