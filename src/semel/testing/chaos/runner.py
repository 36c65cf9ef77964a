"""Many schedules at once: starts servers and drivers, hands out jobs, gathers results."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec

from semel.testing.chaos.cells import PARTS, Cell
from semel.testing.chaos.driver import Job
from semel.testing.chaos.frames import receive, send
from semel.testing.chaos.goals import AGAIN, WELL, hangs, hung_again, late, may_hang, unreached, well
from semel.testing.chaos.harness import EVERY
from semel.testing.chaos.homes import Homes, estimate
from semel.testing.chaos.places import Addresses, shared_servers
from semel.testing.chaos.preloads import compiled, no_compiler
from semel.testing.chaos.verdicts import Result
from semel.testing.services import home, machine

__all__ = ["ENDING", "Report", "explore", "jobs_for", "recovery_jobs"]

LEASE: float = EVERY.options["lease"]
LEASES = (0.06, 0.25, 0.5, 1.0)
_RECOVERED = ("retry", "kill", "run.started")
DRIVERS = 15
ENDING = 20.0  # seconds: an idle driver stops its servers in one or two
_FEW = 24  # a batch in which somebody did not end is played again as a whole, and so may be another one
TIMED_DRIVERS = 12  # they sleep for a lease most of the time


class Report(msgspec.Struct, kw_only=True):
    """A run: every result, and what the matrix was."""

    results: list[Result] = []
    seconds: float = 0.0
    cells: int = 0
    versions: dict[str, str] = {}
    timed: int = 0
    """How many recoveries were to be measured."""
    missing: list[str] = []
    """Cells that were to run and have no result: the run is invalid."""
    lost: int = 0
    """Schedules that a driver had when it died."""
    left: int | None = None
    """Somebody interrupted the run: how many schedules were not played."""

    @property
    def disagreeing(self) -> list[Result]:
        return [each for each in self.results if not each.agrees]

    @property
    def lateness(self) -> list[float]:
        """Seconds from a worker's death to the next effect, less the lease: sorted."""
        return sorted(each.recovery - each.lease for each in self.results if each.recovery is not None)

    @property
    def reach(self) -> list[str]:
        """Why this run proves nothing, even if no cell disagrees; empty when it does."""
        found = [] if self.left is None else [f"it was interrupted: {self.left} schedules were not played"]
        found += [
            f"no fault has hit {name}" for name in unreached(self.results, (*self.missing, *self._seen))
        ]
        if self.lost:
            found.append(f"a driver died, and {self.lost} schedules have no result")
        good, calls = well(self.results)
        if self.results and (not calls or good < WELL * calls):
            found.append(
                f"only {good} of {calls} calls ended well after the faults were over: {WELL:.0%} must"
            )
        found += self._played_too_often
        if slow := late(self.lateness):
            found.append(slow)
        if (measured := len(self.lateness)) < self.timed:
            found.append(f"only {measured} of {self.timed} recoveries were measured")
        return found

    @property
    def _played_too_often(self) -> list[str]:
        total = len(self.results)
        again = sum(each.again for each in self.results)
        found = []
        if again > max(_FEW, AGAIN * total):
            found.append(f"{again} of {total} schedules had no verdict at the first try: {AGAIN:.0%} may")
        if (hung := hangs(self.results)) > (most := may_hang(total)):
            found.append(
                f"{hung} times in {total} schedules somebody did not end at the first try: {most} may be"
            )
        return found + [f"somebody did not end more than once in {name}" for name in hung_again(self.results)]

    @property
    def _seen(self) -> set[str]:
        return {each.cell for each in self.results}

    @property
    def valid(self) -> bool:
        return not self.disagreeing and not self.missing and not self.reach


def jobs_for(cells: Iterable[Cell], *, repeat: int = 1) -> list[Job]:
    """Each cell `repeat` times, slow ones first in each round; a run that is cut short has seen as many cells as it can."""
    chosen = sorted((cell for cell in cells if cell.applies), key=lambda cell: -estimate(cell))
    return [Job(cell=cell, number=number, lease=LEASE) for number in range(repeat) for cell in chosen]


def recovery_jobs(cells: Iterable[Cell], *, repeat: int = 1) -> list[Job]:
    """More kills before the effect, with other leases: how long it takes until another worker makes it."""
    chosen = [cell for cell in cells if cell.applies and (cell.mode, cell.fault, cell.point) == _RECOVERED]
    return [
        Job(cell=cell, number=n, lease=lease, timed=True)
        for n in range(repeat)
        for lease in reversed(LEASES)  # the longest first: nobody waits for one in the end
        for cell in chosen
    ]


def explore(
    jobs: Sequence[Job],
    *,
    drivers: int = DRIVERS,
    seconds: float | None = None,
    progress: Callable[[Result, int, int], None] | None = None,
    mutants: Sequence[str] = (),
) -> Report:
    """Run the jobs; after `seconds` no new one is begun. `mutants` names bugs that every worker has (`planted`).

    KeyboardInterrupt ends it early: what was played until then is reported, as a run that is not valid.
    """
    began = time.monotonic()
    report = Report(cells=len({job.cell.name for job in jobs}), timed=sum(job.timed for job in jobs))
    needed = {job.cell.store for job in jobs if not job.cell.lane}
    needed |= {name for job in jobs for name in job.cell.needs}
    with (
        machine.under(os.environ.get(machine.FOLDER) or machine.in_memory()),
        _folder() as folder,
        # It imports everything while the servers start.
        _Zygote(drivers, mutants, sorted({job.cell.part for job in jobs}), folder) as zygote,
        shared_servers(needed, folder) as addresses,
        zygote.driving(addresses) as lines,
    ):
        report.versions = addresses.versions
        run = _Run(report, len(jobs), began, seconds, progress)
        try:
            run.play([job for job in jobs if not job.timed], lines)
            run.play([job for job in jobs if job.timed], lines[:TIMED_DRIVERS])
        except KeyboardInterrupt:
            report.left = len(jobs) - len(report.results)
    seen = {each.cell for each in report.results}
    report.missing = sorted({job.cell.name for job in jobs} - seen)
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def _folder() -> Iterator[Path]:
    folder = home.new_folder("chaos")
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Zygote:
    """The process whose forks are the drivers."""

    def __init__(self, count: int, mutants: Sequence[str], parts: Sequence[str], folder: Path) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        numbers = [theirs.fileno() for _, theirs in pairs]
        facts = [msgspec.json.encode(each).decode() for each in (PARTS, list(mutants), list(parts))]
        self._lines = [ours for ours, _ in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "semel.testing.chaos.zygote", *facts, *map(str, numbers)],
            stdin=subprocess.PIPE,
            pass_fds=numbers,
            env=_environment(folder),
            start_new_session=True,  # Ctrl-C is for the runner alone; and they can be killed as a whole
        )
        for _, theirs in pairs:
            theirs.close()

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def driving(self, addresses: Addresses) -> Iterator[list[socket.socket]]:
        """Tell it where the servers are; a line to each driver. Servers end after the drivers."""
        assert self._process.stdin is not None
        # If it died, its drivers' lines are closed, and nobody waits for them.
        with suppress(BrokenPipeError), self._process.stdin as words:
            words.write(msgspec.json.encode(addresses) + b"\n")
        try:
            yield self._lines
        finally:
            self._end()

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """Drivers end when their sockets are closed, with what they play at the time. A watchdog of each server ends what they leave."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        for line in self._lines:
            line.close()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _environment(folder: Path) -> dict[str, str]:
    # Coverage would write a file for each of thousands of forked workers.
    found = {name: text for name, text in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
    found |= machine.few_authorities(folder)
    if not no_compiler():
        # For SQLite: it is the workers who write its disk and read its clock.
        found["LD_PRELOAD"] = f"{compiled('power')} {compiled('clock')}"
    return found


class _Run:
    """Hands out jobs until there are none, and gathers what comes back."""

    def __init__(
        self,
        report: Report,
        total: int,
        began: float,
        seconds: float | None,
        progress: Callable[[Result, int, int], None] | None,
    ) -> None:
        self._report = report
        self._total = total
        self._until = began + (float("inf") if seconds is None else seconds)
        self._progress = progress

    def play(self, jobs: Sequence[Job], lines: Sequence[socket.socket]) -> None:
        homes = Homes(jobs)
        busy = {line: given for line in lines if (given := self._feed(line, homes))}
        while busy:
            ready, _, _ = select.select(list(busy), [], [])
            for line in ready:
                given, text = busy.pop(line), receive(line)
                if text is None:
                    self._report.lost += given
                    continue
                for result in msgspec.json.decode(text, type=list[Result]):
                    self._got(result)
                if given := self._feed(line, homes):
                    busy[line] = given

    def _feed(self, line: socket.socket, homes: Homes) -> int:
        """How many schedules it was given to play."""
        batch = homes.next(line) if time.monotonic() <= self._until else None
        if batch is None:
            return 0
        send(line, msgspec.json.encode(batch))
        return len(batch)

    def _got(self, result: Result) -> None:
        self._report.results.append(result)
        if self._progress is not None:
            self._progress(result, len(self._report.results), self._total)
