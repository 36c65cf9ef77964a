"""What `semel chaos` does: choose cells, run them with a progress bar, print what came of it, write the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from semel.errors import ConfigurationError
from semel.testing.chaos.cells import Cell, matrix
from semel.testing.chaos.report import summarize, write
from semel.testing.chaos.runner import DRIVERS, Report, explore, jobs_for, recovery_jobs
from semel.testing.chaos.verdicts import Result

__all__ = ["choose", "run_matrix"]


def choose(names: Sequence[str]) -> list[Cell]:
    """The cells with these names; `*` and `?` match as in file names. Nothing chosen is an error, not an empty run."""
    everything = matrix()
    chosen = [cell for cell in everything if not names or any(fnmatchcase(cell.name, name) for name in names)]
    if not chosen:
        raise ConfigurationError(
            f"no cell is called {', '.join(names)}; cells are called store/colour/mode/fault@point, such as "
            f"{everything[0].name}; `semel chaos --list` prints them all"
        )
    return chosen


def run_matrix(
    *,
    only: Sequence[str] = (),
    repeat: int = 1,
    drivers: int = DRIVERS,
    seconds: float | None = None,
    folder: Path | None = None,
    listing: bool = False,
    command: str = "semel chaos",
) -> int:
    """The exit code: 0 when every schedule agrees with its cell and every chosen cell ran, else 1."""
    chosen = choose(only)
    if listing:
        for cell in chosen:
            print(f"{cell.name:48} {cell.expected.value if cell.expected else 'n/a: ' + cell.reason}")
        return 0
    applicable = [cell for cell in chosen if cell.applies]
    if not applicable:
        for cell in chosen:
            print(f"{cell.name} does not apply: {cell.reason}")
        return 0
    jobs = jobs_for(applicable, repeat=repeat) + (
        recovery_jobs(applicable, repeat=repeat) if not only else []
    )
    bar = _Bar()
    report = explore(jobs, drivers=min(drivers, len(jobs)), seconds=seconds, progress=bar.show)
    bar.end()
    _tell(report, chosen, command, verbose=len(jobs) <= 20)
    if folder is not None:
        print(f"report: {write(report, chosen, folder, command)}")
    return 0 if report.valid else 1


class _Bar:
    """One line that is written over, on a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = sys.stdout.isatty()
        self._wrong = 0

    def show(self, result: Result, done: int, total: int) -> None:
        self._wrong += not result.agrees
        if self._shown:
            filled = int(30 * done / total)
            wrong = f"  {self._wrong} disagree" if self._wrong else ""
            text = f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total}{wrong}  {result.cell}"
            print(f"{text:<110}"[:110], end="", flush=True)

    def end(self) -> None:
        if self._shown:
            print()


def _tell(report: Report, chosen: Sequence[Cell], command: str, *, verbose: bool) -> None:
    summary = summarize(report, chosen, command)
    print(
        f"{summary.applicable} cells, {summary.schedules} schedules in {summary.seconds:g} s "
        f"({summary.not_applicable} cells do not apply)"
    )
    print("faults: " + ", ".join(f"{count} {name}" for name, count in sorted(summary.faults.items())))
    print("verdicts: " + ", ".join(f"{count} {name}" for name, count in sorted(summary.verdicts.items())))
    print(
        f"where exactly once is promised: {summary.lost} lost, {summary.doubled} doubled in {summary.promised_once} schedules"
    )
    if report.lateness:
        print(
            f"recovery after a kill: lease + {summary.recovery_over_lease_p50:g} s (median), "
            f"lease + {summary.recovery_over_lease_p99:g} s (p99)"
        )
    if verbose:
        for each in report.results:
            print(f"{each.cell}: {each.verdict}; the next caller: {each.heir}")
    for each in report.disagreeing[:20]:
        print(f"DISAGREES {each.cell}: {each.problem}")
        print("\n".join(f"    {line}" for line in each.story))
        print(f"    semel chaos --cell '{each.cell}'")
    for name in report.missing[:20]:
        print(f"NO RESULT {name}")
