"""The report as files: a page that needs nothing but itself, JSON, and Markdown for the documentation."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

import msgspec

from semel.testing.chaos.annexes import annexes, as_html
from semel.testing.chaos.cells import Cell, Verdict
from semel.testing.chaos.goals import Figure
from semel.testing.chaos.markdown import markdown
from semel.testing.chaos.peers import CASES, Peer
from semel.testing.chaos.plots import recovery_plot
from semel.testing.chaos.report import (
    Document,
    Row,
    beside,
    document,
    made_by,
    recovered,
    replayed,
    together,
)
from semel.testing.chaos.runner import Report

__all__ = ["put", "write"]

_WORDS: Final = {
    Verdict.ONCE: "once",
    Verdict.DOUBLED: "twice",
    Verdict.UNKNOWN: "unknown",
    Verdict.LOST: "lost",
}
_MEANING: Final = {
    Verdict.ONCE: "exactly once: nothing lost, nothing doubled",
    Verdict.DOUBLED: "at least once is promised here, and it shows: the effect was made twice",
    Verdict.UNKNOWN: "at most once: the next caller is told that the outcome is unknown",
    Verdict.LOST: "an acknowledged effect is lost with the store's own writes",
}


def write(
    report: Report,
    cells: Sequence[Cell],
    folder: Path,
    command: str,
    peers: Sequence[Peer] = (),
    goals: Sequence[Figure] = (),
) -> Path:
    """`index.html`, `chaos.json` and `matrix.md` in `folder`; the page's path. What other proofs left there is shown, too,
    and a peer's last run when it was not run now."""
    folder.mkdir(parents=True, exist_ok=True)
    if peers:
        (folder / "peers.json").write_bytes(msgspec.json.format(msgspec.json.encode(peers), indent=1) + b"\n")
    return put(document(report, cells, command, peers, goals), cells, folder)


def put(found: Document, cells: Sequence[Cell], folder: Path) -> Path:
    """The files of a report, with what its folder has besides."""
    folder.mkdir(parents=True, exist_ok=True)
    found.peers = found.peers or _kept(folder / "peers.json")
    found.annexes = annexes(folder) or found.annexes
    (folder / "chaos.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    (folder / "matrix.md").write_text(markdown(found, cells), "utf-8")
    page = folder / "index.html"
    page.write_text("\n".join(_page(found, cells)), "utf-8")
    return page


def _kept(path: Path) -> list[Peer]:
    """A peer's last run, beside the cells that are the same cases now."""
    peers = msgspec.json.decode(path.read_bytes(), type=list[Peer]) if path.exists() else []
    cells = {case.what: case.semel for case in CASES}
    for finding in (each for peer in peers for each in peer.findings):
        finding.semel = cells.get(finding.what, finding.semel)
    return peers


def _page(found: Document, cells: Sequence[Cell]) -> Iterator[str]:
    rows = {row.cell: row for row in found.cells}
    modes = list(dict.fromkeys(cell.mode for cell in cells if cell.applies))
    style = Path(__file__).with_name("page.css").read_text("utf-8")
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width"><title>semel: crash matrix</title>'
    yield f"<style>{style}</style></head><body><main>"
    yield _head(found)
    yield _links(modes, found)
    yield _failures(found)
    for mode in modes:
        yield _table(mode, [cell for cell in cells if cell.mode == mode], rows)
    yield '<h2 id="recovery">Recovery</h2>'
    yield "<p>From a worker's death (SIGKILL before its effect) to the effect, made by another worker. "
    yield "Goal: at most the lease and one second, for 99 of 100.</p>"
    yield recovery_plot(found.recovery)
    yield _recovery(found)
    yield from (_peer(peer, found) for peer in found.peers)
    yield from (as_html(annex) for annex in found.annexes)
    yield _again(found)
    yield _settings(found)
    yield _reasons("unbuilt", "Cells that are not built yet", [cell for cell in cells if cell.unbuilt])
    yield _reasons(
        "not", "Cells that do not apply", [cell for cell in cells if not cell.applies and not cell.unbuilt]
    )
    yield "</main></body></html>"


def _head(found: Document) -> str:
    summary = found.summary
    good = summary.good
    word = (
        "every cell agrees"
        if good
        else f"{summary.disagreeing} schedules disagree, {len(summary.missing)} cells did not run, "
        f"{len(summary.unreached)} windows were not hit, {len(summary.missed)} goals were missed"
        + (": the run is invalid" if summary.invalid else "")
    )
    servers = ", ".join(f"{name} {version}" for name, version in sorted(summary.servers.items()))
    faults = ", ".join(f"{count:,} {name}" for name, count in sorted(summary.faults.items()))
    facts = {
        "made by": ", and ".join(f"<code>{escape(each)}</code>" for each in made_by(found)),
        "made on": summary.made,
        "versions": f"semel {summary.semel}, Python {summary.python}, {servers}",
        "cells": f"{summary.applicable:,} that apply (digest <code>{summary.digest}</code>), {summary.not_applicable:,} that do not "
        f'(<a href="#not">listed with the reason</a>), {summary.not_built:,} <a href="#unbuilt">not built yet</a>',
        "schedules": f"{summary.schedules:,} in {summary.seconds:,g} s: {faults}",
        "in batches": together(summary) or "none",
        "to repeat": "<code>semel chaos --cell 'store/colour/mode/fault@point'</code>, in the words of a field's column, section and "
        "row; a row's own is its tooltip, and the chaos.json of a run has each field's. Points are places, not times: there is no seed",
        "exactly-once cells": f"{summary.promised_once:,} schedules: <b>{summary.lost} lost, {summary.doubled} doubled</b>",
        "reach": f"{summary.windows} windows were hit, {len(summary.unreached)} were not; "
        f"{summary.well:,} of {summary.after:,} calls ended well after the faults were over",
        "recovery": recovered(summary),
        "played once more": f'<a href="#again">{replayed(summary)}</a>' if summary.again else "none",
        **({"goals of a long run": _goals(found)} if summary.goals else {}),
        **({"invalid": escape("; ".join(summary.invalid))} if summary.invalid else {}),
    }
    key = "".join(
        f'<li><span class="swatch {word}">{word}</span> {_MEANING[verdict]}</li>'
        for verdict, word in _WORDS.items()
    )
    return (
        f'<h1>Crash matrix</h1><p class="big {"good" if good else "bad"}">{word}</p><dl>'
        + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts.items())
        + "</dl><p>A row is a fault at a named point of a call; a column is a store, called by threads (sync) or an event loop "
        "(async). A field says what must come of it, <em>and did, in every schedule</em>: where less than exactly once is "
        "promised, the anomaly must show, or the fault did not bite.</p>"
        f'<ul class="key">{key}<li><span class="swatch wrong">wrong</span> it came otherwise</li>'
        '<li><span class="swatch none">n/a</span> cannot be (the reason is below)</li>'
        '<li><span class="swatch none">·</span> this store has no such place, or no such setting</li></ul>'
    )


def _goals(found: Document) -> str:
    texts = (escape(each.text) if each.met else f"<b>{escape(each.text)}</b>" for each in found.summary.goals)
    return "; ".join(texts)


def _links(modes: Sequence[str], found: Document) -> str:
    places = [(f"mode-{mode}", mode) for mode in modes] + [("recovery", "recovery")]
    places += [(f"peer-{peer.name}", f"beside {peer.name}") for peer in found.peers]
    places += [(annex.name, annex.title.lower()) for annex in found.annexes]
    places += [
        ("harness", "what the harness sets"),
        ("unbuilt", "not built yet"),
        ("not", "what does not apply"),
    ]
    return "<nav>" + " ".join(f'<a href="#{name}">{text}</a>' for name, text in places) + "</nav>"


def _region(name: str, table: str) -> str:
    """Wide tables scroll inside of the page; the keyboard reaches them."""
    return f'<div class="scroll" role="region" aria-label="{escape(name)}" tabindex="0">{table}</div>'


def _table(mode: str, cells: Sequence[Cell], rows: dict[str, Row]) -> str:
    stores = list(dict.fromkeys(cell.store for cell in cells if cell.applies))
    columns = [(store, colour) for store in stores for colour in ("sync", "async")]
    found = {(cell.store, cell.colour, cell.fault, cell.point): cell for cell in cells}
    points: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        if cell.applies and cell.point not in points[cell.fault]:
            points[cell.fault].append(cell.point)
    body = []
    for fault, names in points.items():
        for place, point in enumerate(names):
            again = f"semel chaos --cell '*/{mode}/{fault}@{point}'"
            group = (
                f'<th scope="rowgroup" rowspan="{len(names)}"><span>{fault}</span></th>' if not place else ""
            )
            fields = "".join(_field(_at(found, *column, fault, point), rows) for column in columns)
            body.append(
                f'<tr{"" if place else " class=first"}>{group}<th scope="row" title="{again}">{point}</th>{fields}</tr>'
            )
    top = "".join(f'<th scope="colgroup" colspan="2">{store}</th>' for store in stores)
    below = "".join(f'<th scope="col">{colour}</th>' for _, colour in columns)
    table = (
        f'<table class="matrix"><thead><tr><th rowspan="2">fault</th><th rowspan="2">at</th>{top}</tr><tr>{below}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )
    return f'<h2 id="mode-{mode}">Mode {mode}</h2>{_region(f"cells of mode {mode}", table)}{_without(cells, stores)}'


def _at(
    found: dict[tuple[str, str, str, str], Cell], store: str, colour: str, fault: str, point: str
) -> Cell | None:
    """The cell there, or the one that says for all of its points why there is none."""
    places = ((fault, point), (fault, "any"), ("any", "any"))
    return next((found[store, colour, *place] for place in places if (store, colour, *place) in found), None)


def _without(cells: Sequence[Cell], stores: Sequence[str]) -> str:
    """Stores that have no column, each with its reasons."""
    left: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        if cell.store not in stores and cell.store not in left[cell.reason]:
            left[cell.reason].append(cell.store)
    lines = "".join(f"<li>{', '.join(names)}: {_prose(reason)}</li>" for reason, names in left.items())
    return f'<ul class="without">{lines}</ul>' if lines else ""


def _prose(text: str) -> str:
    """What stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _field(cell: Cell | None, rows: dict[str, Row]) -> str:
    if cell is None:
        return '<td class="none">·</td>'
    row = rows[cell.name]
    if cell.expected is None:
        return '<td class="none">n/a</td>'
    if not row.schedules:
        return '<td class="idle">not run</td>'
    if row.agreed < row.schedules:
        return f'<td class="wrong">{row.schedules - row.agreed} wrong</td>'
    word = _WORDS[cell.expected]
    times = f" ×{row.schedules}" if row.schedules > 1 else ""
    return f'<td class="{word}">{word}{times}</td>'


def _recovery(found: Document) -> str:
    if not found.recovery:
        return ""
    lines = "".join(
        f"<tr><th scope=row>{each.store}</th><td>{each.lease:g}</td><td>{each.kills}</td><td>{each.p50:.3f}</td>"
        f'<td class="{"once" if each.p99 <= each.lease + 1 else "wrong"}">{each.p99:.3f}</td><td>{each.worst:.3f}</td></tr>'
        for each in found.recovery
    )
    head = "".join(
        f"<th scope=col>{name}</th>"
        for name in ("store", "lease, s", "kills", "median, s", "p99, s", "worst, s")
    )
    table = _region("recovery times", f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>")
    return f"<details><summary>The same as a table</summary>{table}</details>"


def _peer(peer: Peer, found: Document) -> str:
    lines = "".join(
        f"<tr><th scope=row>{escape(each.what)}</th>{_verdict(beside(found, each))}"
        f"{_verdict(', '.join(dict.fromkeys(each.found)) or each.problem)}<td>{each.promised}</td>"
        f"<td><code>{escape(each.semel)}</code></td></tr>"
        for each in peer.findings
    )
    apart = "".join(f"<dt>{escape(what)}</dt><dd>{escape(why)}</dd>" for what, why in found.apart.items())
    head = "".join(
        f"<th scope=col>{name}</th>"
        for name in ("case", "semel", peer.name, f"{peer.name} promises", "semel's cell")
    )
    table = _region(
        f"semel beside {peer.name}", f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    )
    return (
        f'<h2 id="peer-{peer.name}">Beside {peer.name} {peer.version}</h2><p>The cases that apply to it, in its own words: the '
        "workflow id is the key, an effect is a step or a datasource transaction, a killed process is followed by the next one of "
        f"the same executor, on PostgreSQL. {peer.name} was run on {peer.made or 'the same day'}.</p>{table}<h3>What is not compared</h3><dl>{apart}</dl>"
    )


def _verdict(text: str) -> str:
    word = {verdict.value: word for verdict, word in _WORDS.items()}.get(text, "idle")
    return f'<td class="{word}">{escape(text)}</td>'


def _failures(found: Document) -> str:
    if not found.wrong and not found.summary.missing:
        return ""
    parts = ["<h2>What disagrees</h2>"]
    for each in found.wrong[:50]:
        story = escape("\n".join([each.problem, *each.story]))
        parts.append(
            f"<details><summary><code>{escape(each.cell)}</code></summary><pre>{story}\n\n"
            f"semel chaos --cell '{escape(each.cell)}'</pre></details>"
        )
    if found.summary.missing:
        parts.append(f"<p>Without a result: <code>{escape(', '.join(found.summary.missing))}</code></p>")
    return "\n".join(parts)


def _again(found: Document) -> str:
    if not found.again:
        return ""
    lines = "".join(
        f"<tr><th scope=row><code>{escape(each.cell)}</code></th><td>{each.times}</td><td>{escape(each.first)}</td></tr>"
        for each in found.again
    )
    head = "".join(f"<th scope=col>{name}</th>" for name in ("field", "times", "at the first try"))
    table = f'<table class="prose"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
    return (
        '<h2 id="again">Played once more</h2><p>Nothing that is worse than its field says is ever played again, nor any breach '
        f"of a fence.</p>{_region('what was played once more', table)}"
    )


def _settings(found: Document) -> str:
    lines = "".join(
        f"<tr><th scope=row>{escape(where)}</th><td>{escape(text)}</td></tr>"
        for where, text in found.harness.items()
    )
    return (
        '<h2 id="harness">What the harness sets</h2><p>In seconds; everything else is the default.</p>'
        + _region("settings of the harness", f'<table class="prose"><tbody>{lines}</tbody></table>')
    )


def _reasons(name: str, title: str, cells: Sequence[Cell]) -> str:
    by_reason: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_reason[cell.reason].append(cell)
    items = "".join(
        f"<details><summary>{len(mine)}: {_prose(reason)}</summary><p><code>{escape('; '.join(_where(mine)))}</code></p></details>"
        for reason, mine in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    )
    return f'<h2 id="{name}">{title}</h2>{items or "<p>None.</p>"}'


def _where(cells: Sequence[Cell]) -> Iterator[str]:
    """Each fault at a point once, with the stores; a store's colour where it is only one."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        found[f"{cell.mode}/{cell.fault}@{cell.point}"][cell.store].append(cell.colour)
    for what, stores in found.items():
        names = (store if len(colours) > 1 else f"{store}/{colours[0]}" for store, colours in stores.items())
        yield f"{what}: {', '.join(names)}"
