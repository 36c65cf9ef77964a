"""The run as a page that needs nothing but itself, and as JSON."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec

from semel import __version__
from semel.testing.chaos.cells import Cell, Verdict
from semel.testing.chaos.plots import recovery_plot
from semel.testing.chaos.runner import Report
from semel.testing.chaos.verdicts import Result

__all__ = ["Row", "Summary", "quantile", "summarize", "write"]


class Row(msgspec.Struct, kw_only=True):
    """One cell and what its schedules showed."""

    cell: str
    expected: str
    next_caller: str
    schedules: int
    agreed: int
    reason: str


class Summary(msgspec.Struct, kw_only=True):
    """What the JSON file begins with."""

    command: str
    semel: str
    python: str
    servers: dict[str, str]
    seconds: float
    cells: int
    applicable: int
    not_applicable: int
    schedules: int
    disagreeing: int
    faults: dict[str, int]
    verdicts: dict[str, int]
    promised_once: int
    lost: int
    doubled: int
    recovery_over_lease_p50: float
    recovery_over_lease_p99: float
    missing: list[str]


def summarize(report: Report, cells: Sequence[Cell], command: str) -> Summary:
    """Counts; `lost` and `doubled` are those in cells that promise exactly once."""
    expected = {cell.name: cell.expected for cell in cells}
    exact = [each for each in report.results if expected[each.cell] is Verdict.ONCE]
    late = report.lateness
    return Summary(
        command=command,
        semel=__version__,
        python=platform.python_version(),
        servers=report.versions,
        seconds=round(report.seconds, 1),
        cells=len(cells),
        applicable=sum(cell.applies for cell in cells),
        not_applicable=sum(not cell.applies for cell in cells),
        schedules=len(report.results),
        disagreeing=len(report.disagreeing),
        faults=dict(Counter(_fault(each) for each in report.results)),
        verdicts=dict(Counter(each.verdict.value for each in report.results)),
        promised_once=len(exact),
        lost=sum(each.verdict is Verdict.LOST for each in exact),
        doubled=sum(each.verdict is Verdict.DOUBLED for each in exact),
        recovery_over_lease_p50=round(quantile(late, 0.5), 3),
        recovery_over_lease_p99=round(quantile(late, 0.99), 3),
        missing=report.missing,
    )


def quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def _fault(result: Result) -> str:
    return result.cell.rpartition("/")[2].partition("@")[0]


def write(report: Report, cells: Sequence[Cell], folder: Path, command: str) -> Path:
    """`chaos.json` and `index.html` in `folder`; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarize(report, cells, command)
    rows = _rows(report, cells)
    document = {"summary": summary, "cells": rows, "results": report.results}
    (folder / "chaos.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    page = folder / "index.html"
    page.write_text(_page(report, cells, rows, summary), "utf-8")
    return page


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
        )
        for cell in cells
    ]


# ------------------------------------------------------------------------------------------------------ the page

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --once: #2e9d5b; --doubled: #d99a17; --unknown: #4f7fd9; --lost: #a45bc4;
  --wrong: #d33; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { margin-bottom: 0 } h2 { margin-top: 2.2rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; } dt { opacity: .7 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
th, td { border: 1px solid var(--line); padding: .15rem .45rem; text-align: center; white-space: nowrap }
th:first-child { text-align: left; font-weight: 500; font-family: ui-monospace, monospace }
td.once { background: color-mix(in srgb, var(--once) 35%, transparent) }
td.doubled { background: color-mix(in srgb, var(--doubled) 40%, transparent) }
td.unknown { background: color-mix(in srgb, var(--unknown) 35%, transparent) }
td.lost { background: color-mix(in srgb, var(--lost) 35%, transparent) }
td.wrong { background: var(--wrong); color: white; font-weight: 700 }
td.none { opacity: .35 } td.idle { opacity: .6 }
.key span { padding: .1rem .5rem; margin-right: .6rem; border-radius: 3px }
.good { color: var(--once) } .bad { color: var(--wrong) } .big { font-size: 1.15rem; font-weight: 600 }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line) } details { margin: .4rem 0 }
svg { max-width: 100%; height: auto }
"""
_WORDS = {Verdict.ONCE: "once", Verdict.DOUBLED: "twice", Verdict.UNKNOWN: "unknown", Verdict.LOST: "lost"}
_CLASSES = {
    Verdict.ONCE: "once",
    Verdict.DOUBLED: "doubled",
    Verdict.UNKNOWN: "unknown",
    Verdict.LOST: "lost",
}


def _page(report: Report, cells: Sequence[Cell], rows: Sequence[Row], summary: Summary) -> str:
    by_name = {row.cell: row for row in rows}
    modes = list(dict.fromkeys(cell.mode for cell in cells))
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width"><title>semel: crash matrix</title>',
            f"<style>{_STYLE}</style></head><body>",
            _head(summary),
            _failures(report),
            *(_table(mode, [cell for cell in cells if cell.mode == mode], by_name) for mode in modes),
            "<h2>Recovery: from a worker's death to the effect, made by another one</h2>",
            recovery_plot(report.results),
            _reasons(cells),
            "</body></html>",
        )
    )


def _head(summary: Summary) -> str:
    good = not summary.disagreeing and not summary.missing
    word = (
        "every cell agrees"
        if good
        else f"{summary.disagreeing} schedules disagree, {len(summary.missing)} cells did not run"
    )
    facts = {
        "made by": f"<code>{escape(summary.command)}</code>",
        "versions": f"semel {summary.semel}, Python {summary.python}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(summary.servers.items())),
        "cells": f"{summary.applicable} that apply, {summary.not_applicable} that do not (listed below, with the reason)",
        "schedules": f"{summary.schedules} in {summary.seconds:g} s: "
        + ", ".join(f"{count} {name}" for name, count in sorted(summary.faults.items())),
        "exactly-once cells": f"{summary.promised_once} schedules: {summary.lost} lost, {summary.doubled} doubled",
        "recovery": f"lease + {summary.recovery_over_lease_p50:g} s (median), lease + {summary.recovery_over_lease_p99:g} s (p99)",
    }
    return (
        f'<h1>Crash matrix</h1><p class="big {"good" if good else "bad"}">{word}</p><dl>'
        + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts.items())
        + '</dl><p class="key">What must come of a cell, and did: '
        + "".join(
            f'<span style="background:color-mix(in srgb,var(--{_CLASSES[verdict]}) 38%,transparent)">{text}</span>'
            for verdict, text in (
                (Verdict.ONCE, "exactly once"),
                (Verdict.DOUBLED, "at least once, and it shows: twice"),
                (Verdict.UNKNOWN, "at most once: the next caller is told that the outcome is unknown"),
                (Verdict.LOST, "an acknowledged effect is lost with the store's writes"),
            )
        )
        + "</p>"
    )


def _table(mode: str, cells: Sequence[Cell], rows: dict[str, Row]) -> str:
    columns = list(dict.fromkeys((cell.store, cell.colour) for cell in cells))
    lines = list(dict.fromkeys((cell.fault, cell.point) for cell in cells))
    found = {(cell.store, cell.colour, cell.fault, cell.point): cell for cell in cells}
    head = "".join(f"<th>{store}<br>{colour}</th>" for store, colour in columns)
    body = []
    for fault, point in lines:
        fields = (found.get((store, colour, fault, point)) for store, colour in columns)
        if all(cell is None or not cell.applies for cell in fields):
            continue
        tds = "".join(_field(found.get((store, colour, fault, point)), rows) for store, colour in columns)
        body.append(f"<tr><th>{fault} @ {point}</th>{tds}</tr>")
    return (
        f'<h2>Mode {mode}</h2><div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _field(cell: Cell | None, rows: dict[str, Row]) -> str:
    if cell is None:
        return "<td></td>"
    row = rows[cell.name]
    if cell.expected is None:
        return f'<td class="none" title="{escape(cell.reason)}">n/a</td>'
    title = escape(
        f"{cell.name}: {row.agreed} of {row.schedules} schedules; the next caller: {row.next_caller}"
    )
    if not row.schedules:
        return f'<td class="idle" title="{title}">not run</td>'
    if row.agreed < row.schedules:
        return f'<td class="wrong" title="{title}">{row.schedules - row.agreed} wrong</td>'
    times = f" ×{row.schedules}" if row.schedules > 1 else ""
    return f'<td class="{_CLASSES[cell.expected]}" title="{title}">{_WORDS[cell.expected]}{times}</td>'


def _failures(report: Report) -> str:
    if not report.disagreeing and not report.missing:
        return ""
    parts = ["<h2>What disagrees</h2>"]
    for each in report.disagreeing[:50]:
        story = escape("\n".join([each.problem, *each.story]))
        parts.append(
            f"<details><summary><code>{escape(each.cell)}</code></summary><pre>{story}\n\n"
            f"semel chaos --cell '{escape(each.cell)}'</pre></details>"
        )
    if report.missing:
        parts.append(f"<p>Without a result: <code>{escape(', '.join(report.missing))}</code></p>")
    return "\n".join(parts)


def _reasons(cells: Sequence[Cell]) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        if not cell.applies:
            by_reason[cell.reason].append(cell.name)
    items = "".join(
        f"<details><summary>{len(names)}: {escape(reason)}</summary><p><code>{escape(', '.join(names))}</code></p></details>"
        for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    )
    return f"<h2>Cells that do not apply</h2>{items}"
