"""The run as data: what was counted, cell by cell, and as JSON. `page` and `markdown` show it."""

from __future__ import annotations

import hashlib
import platform
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from semel import __version__
from semel.testing.chaos.annexes import Annex
from semel.testing.chaos.cells import Cell, Verdict
from semel.testing.chaos.expectations import permitted
from semel.testing.chaos.goals import Figure, figures, hangs, may_hang, misfortunes, unreached, well, window
from semel.testing.chaos.harness import SETTINGS
from semel.testing.chaos.peers import APART, Finding, Peer
from semel.testing.chaos.runner import Report
from semel.testing.chaos.verdicts import Result, quantile

__all__ = [
    "Again",
    "Document",
    "Recovery",
    "Row",
    "Summary",
    "beside",
    "digest",
    "document",
    "figures_of",
    "first_problem",
    "made_by",
    "missed",
    "recovered",
    "replayed",
    "summarize",
    "together",
]


class Row(msgspec.Struct, kw_only=True):
    """One cell and what its schedules showed."""

    cell: str
    expected: str
    next_caller: str
    schedules: int
    agreed: int
    reason: str
    command: str
    """How it is run again, alone. Its point is an exact place: there is no seed."""


class Summary(msgspec.Struct, kw_only=True):
    """What the JSON file begins with."""

    command: str
    made: str = ""
    """The day of the run."""
    semel: str
    python: str
    servers: dict[str, str]
    seconds: float
    cells: int
    applicable: int
    not_applicable: int
    not_built: int
    """Cells that could be and are not; they are none of the `not_applicable`."""
    digest: str
    """Of the cells that apply, with what must come of them: two runs of one matrix have the same."""
    schedules: int
    disagreeing: int
    faults: dict[str, int]
    """Schedules by fault; `misfortunes` counts one that has struck several schedules at once as one."""
    misfortunes: dict[str, int]
    verdicts: dict[str, int]
    promised_once: int
    lost: int
    doubled: int
    recovery_over_lease_p50: float | None
    recovery_over_lease_p99: float | None
    missing: list[str]
    windows: int
    """Windows (a fault at a point) that were hit; `unreached` are those that were not."""
    unreached: list[str]
    well: int
    after: int
    invalid: list[str]
    """Why the run proves nothing, whatever its cells say: a window that was not hit, calls that did not end well, late recoveries."""
    again: int
    """Schedules that were played once more: at the first try somebody did not end in time, or it ended better than its cell says."""
    hung: int
    """Those of them in which somebody did not end in time; `hangs` counts a batch in which one did not as one."""
    hangs: int = 0
    goals: list[Figure] = []
    """What a long run must reach; none of another one."""
    missed: list[str] = []
    """Those of them that it did not."""

    @property
    def good(self) -> bool:
        """Whether it proves what it says."""
        return not (self.disagreeing or self.missing or self.invalid or self.missed)


def summarize(report: Report, cells: Sequence[Cell], command: str, goals: Sequence[Figure] = ()) -> Summary:
    """Counts; `lost` and `doubled` are those in cells for which the guarantee table promises exactly once.

    Not those of weaker modes at points where nothing can go wrong: they would make the figure look better.
    """
    promised = {cell.name for cell in cells if cell.applies and permitted(cell) == {Verdict.ONCE}}
    exact = [each for each in report.results if each.cell in promised]
    late = report.lateness
    ran = {each.cell for each in report.results}
    good, calls = well(report.results)
    return Summary(
        command=command,
        made=time.strftime("%Y-%m-%d", time.gmtime()),
        semel=__version__,
        python=platform.python_version(),
        servers=report.versions,
        seconds=round(report.seconds, 1),
        cells=len(cells),
        applicable=sum(cell.applies for cell in cells),
        not_applicable=sum(not cell.applies and not cell.unbuilt for cell in cells),
        not_built=sum(cell.unbuilt for cell in cells),
        digest=digest(cells),
        schedules=len(report.results),
        disagreeing=len(report.disagreeing),
        faults=dict(Counter(_fault(each) for each in report.results)),
        misfortunes=misfortunes(report.results),
        verdicts=dict(Counter(each.verdict.value for each in report.results)),
        promised_once=len(exact),
        lost=sum(each.verdict is Verdict.LOST for each in exact),
        doubled=sum(each.verdict is Verdict.DOUBLED for each in exact),
        recovery_over_lease_p50=round(quantile(late, 0.5), 3) if late else None,
        recovery_over_lease_p99=round(quantile(late, 0.99), 3) if late else None,
        missing=report.missing,
        windows=len({window(each.cell) for each in report.results if each.bit}),
        unreached=unreached(report.results, ran | set(report.missing)),
        well=good,
        after=calls,
        invalid=report.reach,
        again=sum(each.again for each in report.results),
        hung=sum(each.hung for each in report.results),
        hangs=hangs(report.results),
        goals=list(goals),
        missed=missed(goals),
    )


def missed(goals: Sequence[Figure]) -> list[str]:
    return [each.text for each in goals if not each.met]


def digest(cells: Sequence[Cell]) -> str:
    """The same for the same cells with the same expectations."""
    lines = sorted(f"{cell.name} {cell.expected} {cell.heir}" for cell in cells if cell.applies)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def recovered(summary: Summary) -> str:
    """In words; of a run that has killed nobody for it, too."""
    if summary.recovery_over_lease_p50 is None:
        return "not measured in this run"
    return f"lease + {summary.recovery_over_lease_p50:g} s (median), lease + {summary.recovery_over_lease_p99:g} s (p99)"


def together(summary: Summary) -> str:
    """Which misfortunes of servers have struck several schedules at once."""
    shared = {name: times for name, times in summary.misfortunes.items() if times < summary.faults[name]}
    return ", ".join(
        f"{summary.faults[name]} {name} by {times} misfortunes" for name, times in sorted(shared.items())
    )


def _fault(result: Result) -> str:
    return result.cell.rpartition("/")[2].partition("@")[0]


class Recovery(msgspec.Struct, kw_only=True):
    """Seconds from a worker's death to its effect, made by another one: one store, one lease."""

    store: str
    lease: float
    kills: int
    p50: float
    p99: float
    worst: float
    times: list[float] = []
    """Each of them, sorted."""


class Again(msgspec.Struct, kw_only=True):
    """Schedules of one cell that were played once more for the same reason: what was wrong at the first try."""

    cell: str
    times: int
    first: str


class Document(msgspec.Struct, kw_only=True):
    """What a report shows, in each of its forms."""

    summary: Summary
    cells: list[Row]
    recovery: list[Recovery]
    wrong: list[Result]
    again: list[Again] = []
    peers: list[Peer] = []
    apart: dict[str, str]
    harness: dict[str, str]
    annexes: list[Annex] = []


def document(
    report: Report,
    cells: Sequence[Cell],
    command: str,
    peers: Sequence[Peer] = (),
    goals: Sequence[Figure] = (),
) -> Document:
    return Document(
        summary=summarize(report, cells, command, goals),
        cells=_rows(report, cells),
        recovery=_recovery(report.results),
        wrong=report.disagreeing,
        again=_again(report.results),
        peers=list(peers),
        apart=APART,
        harness={each.where: f"{each.text} ({each.why})" for each in SETTINGS},
    )


def figures_of(found: Document) -> list[Figure]:
    """What a long run must reach, of a report that does not say it itself."""
    summary = found.summary
    return figures(
        schedules=summary.schedules,
        struck=summary.misfortunes,
        fewest=min((row.schedules for row in found.cells if not row.reason), default=0),
        late=summary.recovery_over_lease_p99,
        measured=sum(each.kills for each in found.recovery),
    )


def made_by(found: Document) -> list[str]:
    """The commands that made a report: its own, and that of a peer's run which it has kept from before."""
    summary = found.summary
    kept = [] if "--peers" in summary.command else [each.command for each in found.peers]
    return [summary.command, *kept]


def beside(found: Document, finding: Finding) -> str:
    """What semel's cell for the same case showed."""
    row = next((each for each in found.cells if each.cell == finding.semel), None)
    if row is None or not row.schedules:
        return "not run"
    return row.expected if row.agreed == row.schedules else "disagrees"


def _again(results: Sequence[Result]) -> list[Again]:
    found = Counter((each.cell, first_problem(each)) for each in results if each.again)
    return [Again(cell=cell, times=times, first=first) for (cell, first), times in sorted(found.items())]


def first_problem(result: Result) -> str:
    """Why a schedule was played once more, in a line."""
    return result.first.partition("\n")[0] or "beside another one of its batch"


def replayed(summary: Summary) -> str:
    """How many schedules were played once more, in words."""
    return (
        f"{summary.again}: in {summary.hung} somebody did not end in time ({summary.hangs} times, batches counted once: "
        f"{may_hang(summary.schedules)} may be), the others ended better than their fields say, or beside them"
    )


def _recovery(results: Sequence[Result]) -> list[Recovery]:
    groups: dict[tuple[str, float], list[float]] = defaultdict(list)
    for each in results:
        if each.recovery is not None:
            groups[each.store, each.lease].append(each.recovery)
    return [
        Recovery(
            store=store,
            lease=lease,
            kills=len(times),
            p50=round(quantile(sorted(times), 0.5), 3),
            p99=round(quantile(sorted(times), 0.99), 3),
            worst=round(max(times), 3),
            times=[round(each, 3) for each in sorted(times)],
        )
        for (store, lease), times in sorted(groups.items())
    ]


def _rows(report: Report, cells: Sequence[Cell]) -> list[Row]:
    seen: dict[str, list[Result]] = defaultdict(list)
    for result in report.results:
        seen[result.cell].append(result)
    return [
        Row(
            cell=cell.name,
            expected=cell.expected.value if cell.expected else "",
            next_caller=cell.heir.value,
            schedules=len(seen[cell.name]),
            agreed=sum(each.agrees for each in seen[cell.name]),
            reason=cell.reason,
            command=f"semel chaos --cell {shlex.quote(cell.name)}" if cell.applies else "",
        )
        for cell in cells
    ]
