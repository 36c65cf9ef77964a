"""What `semel chaos` does: choose cells, run them with a progress bar, print what came of it, write the report."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

import msgspec

from semel.errors import ConfigurationError
from semel.testing.chaos.cells import Cell, Heir, Verdict, matrix
from semel.testing.chaos.goals import LONG_REPEAT, campaign
from semel.testing.chaos.page import put, write
from semel.testing.chaos.peers import cells_beside, peer_version, run_peer
from semel.testing.chaos.report import (
    Document,
    Row,
    figures_of,
    first_problem,
    missed,
    recovered,
    replayed,
    summarize,
    together,
)
from semel.testing.chaos.runner import DRIVERS, ENDING, Report, explore, jobs_for, recovery_jobs
from semel.testing.chaos.verdicts import Result

__all__ = ["choose", "run_matrix", "show_again"]

_EVERY = 60.0
_ENDS = (signal.SIGINT, signal.SIGTERM)
_PEER_REPEAT = 3  # a process of a peer's takes seconds to start


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
    repeat: int | None = None,
    long: bool = False,
    drivers: int = DRIVERS,
    seconds: float | None = None,
    folder: Path | None = None,
    listing: bool = False,
    peers: Path | None = None,
    command: str = "semel chaos",
) -> int:
    """The exit code: 0 when every schedule agrees with its cell, every chosen cell ran and the run's rules are met, else 1."""
    chosen = choose(only)
    if peers is not None and only:
        chosen += [cell for cell in choose(sorted(cells_beside())) if cell not in chosen]
    if listing:
        for cell in chosen:
            print(f"{cell.name:48} {cell.expected.value if cell.expected else 'n/a: ' + cell.reason}")
        return 0
    applicable = [cell for cell in chosen if cell.applies]
    if not applicable:
        _tell_nothing(chosen)
        return 1
    if peers is not None:
        peer_version(peers)  # before minutes of work
    times = repeat or (LONG_REPEAT if long else 1)
    jobs = jobs_for(applicable, repeat=times) + (recovery_jobs(applicable, repeat=times) if not only else [])
    bar = _Bar()
    with _ended_by_a_signal():
        report = explore(jobs, drivers=min(drivers, len(jobs)), seconds=seconds, progress=bar.show)
    bar.end()
    _tell(report, chosen, command, verbose=len(jobs) <= 20)
    figures = campaign(report.results, [cell.name for cell in applicable], report.lateness) if long else []
    for figure in figures:
        print(f"long run: {figure.text}")
    if folder is not None:
        print(f"report: {write(report, chosen, folder, command, goals=figures)}")
    if peers is not None and report.left is None:  # minutes more: what is known without it is written already
        found = run_peer(peers, repeat=min(times, _PEER_REPEAT))
        found.command = command
        if folder is not None:
            write(report, chosen, folder, command, [found], figures)
    return 0 if report.valid and all(figure.met for figure in figures) else 1


def _tell_nothing(chosen: Sequence[Cell]) -> None:
    """Why: a run that plays nothing proves nothing."""
    print(f"NOTHING WAS PLAYED: none of the {len(chosen)} chosen cells applies")
    for reason in dict.fromkeys(cell.reason for cell in chosen):
        names = [cell.name for cell in chosen if cell.reason == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"{names[0]}{more} does not apply: {reason}")


def show_again(file: Path, folder: Path) -> int:
    """The page of a run that is over, from its `chaos.json`; the exit code of that run."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Document)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"--from {file} is not the chaos.json of a run ({error}): name the file that `semel chaos --report` wrote"
        ) from error
    summary = found.summary
    summary.made = summary.made or time.strftime("%Y-%m-%d", time.gmtime(file.stat().st_mtime))
    summary.hangs = summary.hangs or summary.hung
    if not summary.goals and "--long" in summary.command.split():
        summary.goals = figures_of(found)
        summary.missed = missed(summary.goals)
    print(f"report: {put(found, [_cell(row) for row in found.cells], folder)}")
    for text in summary.missed:
        print(f"long run: {text}")
    return 0 if summary.good else 1


def _cell(row: Row) -> Cell:
    """As far as a page shows it."""
    store, colour, mode, what = row.cell.split("/")
    fault, _, point = what.partition("@")
    return Cell(
        part="",
        store=store,
        colour=colour,
        mode=mode,
        fault=fault,
        point=point,
        expected=Verdict(row.expected) if row.expected else None,
        heir=Heir(row.next_caller),
        reason=row.reason,
    )


@contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """Ctrl-C and SIGTERM end a run, also one that a shell has started in the background: an hour's results are told, not thrown
    away. Another one that comes while it ends changes nothing: the end takes a bounded time."""
    before = {number: signal.getsignal(number) for number in _ENDS}
    for number in _ENDS:
        signal.signal(number, _interrupted)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(*_: object) -> NoReturn:
    for number in _ENDS:
        signal.signal(number, signal.SIG_IGN)
    print(f"\ninterrupted: what runs now is given {ENDING:g} s to end, then it is killed", flush=True)
    raise KeyboardInterrupt


class _Bar:
    """One line that is written over, on a terminal; elsewhere a line a minute, and one for each schedule that disagrees."""

    def __init__(self) -> None:
        self._shown = sys.stdout.isatty()
        self._wrong = 0
        self._next = time.monotonic() + _EVERY

    def show(self, result: Result, done: int, total: int) -> None:
        self._wrong += not result.agrees
        wrong = f"  {self._wrong} disagree" if self._wrong else ""
        if self._shown:
            filled = int(30 * done / total)
            text = f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total}{wrong}  {result.cell}"
            print(f"{text:<110}"[:110], end="", flush=True)
        elif time.monotonic() >= self._next or not result.agrees:
            self._next = time.monotonic() + _EVERY
            print(
                f"{done}/{total}{wrong}  {result.cell}  {result.problem.partition(chr(10))[0]}".rstrip(),
                flush=True,
            )

    def end(self) -> None:
        if self._shown:
            print()


def _tell(report: Report, chosen: Sequence[Cell], command: str, *, verbose: bool) -> None:
    summary = summarize(report, chosen, command)
    print(
        f"{summary.applicable} cells, {summary.schedules} schedules in {summary.seconds:g} s, "
        f"{summary.schedules / max(summary.seconds, 0.1):.1f} per second ({summary.not_applicable} cells do not apply, "
        f"{summary.not_built} are not built yet)"
    )
    print("faults: " + ", ".join(f"{count} {name}" for name, count in sorted(summary.faults.items())))
    if summary.again:
        print(f"played once more: {replayed(summary)}")
        for each in [each for each in report.results if each.again][:20]:
            print(f"    {each.cell}: {first_problem(each)}")
    if shared := together(summary):
        print(f"in batches: {shared}")
    print("verdicts: " + ", ".join(f"{count} {name}" for name, count in sorted(summary.verdicts.items())))
    print(
        f"where exactly once is promised: {summary.lost} lost, {summary.doubled} doubled in {summary.promised_once} schedules"
    )
    print(
        f"reach: {summary.windows} of {summary.windows + len(summary.unreached)} windows were hit; "
        f"{summary.well} of {summary.after} calls ended well after the faults"
    )
    if report.lateness:
        print(f"recovery after a kill: {recovered(summary)}")
    if verbose:
        for each in report.results:
            print(f"{each.cell}: {each.verdict}; the next caller: {each.heir}")
    for each in report.disagreeing[:20]:
        print(f"DISAGREES {each.cell}: {each.problem}")
        print("\n".join(f"    {line}" for line in each.story))
        print(f"    semel chaos --cell '{each.cell}'")
    for name in report.missing[:20]:
        print(f"NO RESULT {name}")
    for reason in report.reach[:20]:
        print(f"INVALID {reason}")
