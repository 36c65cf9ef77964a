"""Many schedules at once: starts servers and drivers, hands out jobs, gathers results."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from semel.testing.chaos.cells import PARTS, Cell
from semel.testing.chaos.driver import Job
from semel.testing.chaos.frames import receive, send
from semel.testing.chaos.places import Addresses, shared_servers
from semel.testing.chaos.verdicts import Result
from semel.testing.services import home

__all__ = ["Report", "explore", "jobs_for", "recovery_jobs"]

LEASE = 0.12
LEASES = (0.06, 0.25, 0.5, 1.0)
_RECOVERED = ("retry", "kill", "run.started")
DRIVERS = 10


class Report(msgspec.Struct, kw_only=True):
    """A run: every result, and what the matrix was."""

    results: list[Result] = []
    seconds: float = 0.0
    cells: int = 0
    versions: dict[str, str] = {}
    missing: list[str] = []
    """Cells that were to run and have no result: the run is invalid."""

    @property
    def disagreeing(self) -> list[Result]:
        return [each for each in self.results if not each.agrees]

    @property
    def lateness(self) -> list[float]:
        """Seconds from a worker's death to the next effect, less the lease: sorted."""
        return sorted(each.recovery - each.lease for each in self.results if each.recovery is not None)

    @property
    def valid(self) -> bool:
        return not self.disagreeing and not self.missing


def jobs_for(cells: Iterable[Cell], *, repeat: int = 1) -> list[Job]:
    """Each cell `repeat` times, slow ones first in each round; a run that is cut short has seen as many cells as it can."""
    chosen = sorted((cell for cell in cells if cell.applies), key=lambda cell: (cell.fault != "stall", _mixed(cell)))
    return [Job(cell=cell, number=number, lease=LEASE) for number in range(repeat) for cell in chosen]


def recovery_jobs(cells: Iterable[Cell], *, repeat: int = 1) -> list[Job]:
    """More kills before the effect, with other leases: how long it takes until another worker makes it."""
    chosen = [cell for cell in cells if cell.applies and (cell.mode, cell.fault, cell.point) == _RECOVERED]
    return [Job(cell=cell, number=n, lease=lease) for n in range(repeat) for lease in LEASES for cell in chosen]


def _mixed(cell: Cell) -> str:
    """Neighbours in time use different stores: none of them is asked by all drivers at once."""
    return f"{cell.mode}{cell.fault}{cell.point}{cell.store}"


def explore(
    jobs: Sequence[Job],
    *,
    drivers: int = DRIVERS,
    seconds: float | None = None,
    progress: Callable[[Result, int, int], None] | None = None,
) -> Report:
    """Run the jobs; after `seconds` no new one is begun."""
    began = time.monotonic()
    folder = home.new_folder("chaos")
    folder.chmod(0o711)
    report = Report(cells=len({job.cell.name for job in jobs}))
    try:
        with shared_servers({job.cell.store for job in jobs if not job.cell.lane}, folder) as addresses:
            report.versions = addresses.versions
            lanes = {job.cell.lane for job in jobs if job.cell.lane}
            with _drivers(addresses, drivers + len(lanes)) as lines:
                _hand_out(_Queues(jobs, lines, drivers, sorted(lanes)), report, began, seconds, progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seen = {each.cell for each in report.results}
    report.missing = sorted({job.cell.name for job in jobs} - seen)
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def _drivers(addresses: Addresses, count: int) -> Iterator[list[socket.socket]]:
    pairs = [socket.socketpair() for _ in range(count)]
    numbers = [theirs.fileno() for _, theirs in pairs]
    words = [msgspec.json.encode(addresses).decode(), msgspec.json.encode(PARTS).decode(), *map(str, numbers)]
    # Coverage would write a file for each of thousands of forked workers.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
    zygote = subprocess.Popen(
        [sys.executable, "-m", "semel.testing.chaos.zygote", *words], pass_fds=numbers, env=environment
    )
    for _, theirs in pairs:
        theirs.close()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for ours, _ in pairs:
            ours.close()
        zygote.wait()


class _Queues:
    """Which job a driver gets next: its lane's, or the common ones."""

    def __init__(self, jobs: Sequence[Job], lines: Sequence[socket.socket], drivers: int, lanes: Sequence[str]) -> None:
        self.total = len(jobs)
        self.lines = lines
        self._common = deque(job for job in jobs if not job.cell.lane)
        self._lanes = {lane: deque(job for job in jobs if job.cell.lane == lane) for lane in lanes}
        self._of = {line: self._common for line in lines[:drivers]}
        self._of |= {line: self._lanes[lane] for line, lane in zip(lines[drivers:], lanes, strict=True)}

    def next(self, line: socket.socket) -> Job | None:
        queue = self._of[line]
        return queue.popleft() if queue else None


def _hand_out(
    queues: _Queues,
    report: Report,
    began: float,
    seconds: float | None,
    progress: Callable[[Result, int, int], None] | None,
) -> None:
    busy: set[socket.socket] = set()

    def feed(line: socket.socket) -> None:
        late = seconds is not None and time.monotonic() - began > seconds
        job = None if late else queues.next(line)
        if job is not None:
            send(line, msgspec.json.encode(job))
            busy.add(line)

    for line in queues.lines:
        feed(line)
    while busy:
        ready, _, _ = select.select(list(busy), [], [])
        for line in ready:
            busy.discard(line)
            text = receive(line)
            if text is None:
                continue  # a driver died: its cells end up in `missing`
            result = msgspec.json.decode(text, type=Result)
            report.results.append(result)
            if progress is not None:
                progress(result, len(report.results), queues.total)
            feed(line)

