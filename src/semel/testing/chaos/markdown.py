"""The report as Markdown: what the documentation shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from semel.testing.chaos.annexes import as_markdown
from semel.testing.chaos.cells import Cell
from semel.testing.chaos.peers import Peer
from semel.testing.chaos.report import Document, Row, beside, made_by, recovered, replayed, together

__all__ = ["markdown"]


def markdown(found: Document, cells: Sequence[Cell]) -> str:
    return "\n".join(_lines(found, cells)) + "\n"


def _lines(found: Document, cells: Sequence[Cell]) -> Iterator[str]:
    summary = found.summary
    yield "# The crash matrix, as it was run"
    yield ""
    commands = " and ".join(f"`{each}`" for each in made_by(found))
    yield f"Written by {commands} on {summary.made}; do not edit. What the words mean: [the crash matrix](../reference/chaos.md)."
    yield "The same with every field, as a page for a browser: [index.html](index.html)."
    yield ""
    servers = ", ".join(f"{name} {version}" for name, version in sorted(summary.servers.items()))
    yield f"* semel {summary.semel}, Python {summary.python}, {servers}"
    yield (
        f"* {summary.applicable} cells that apply (digest `{summary.digest}`), {summary.not_applicable} that do not, "
        f"{summary.not_built} not built yet (with reasons at the end)"
    )
    yield (
        f"* {summary.schedules} schedules in {summary.seconds:g} s: "
        f"{summary.disagreeing} disagree, {len(summary.missing)} cells had none"
    )
    yield f"* faults: {', '.join(f'{count} {name}' for name, count in sorted(summary.faults.items()))}"
    if shared := together(summary):
        yield f"* played in batches: {shared}"
    yield f"* where exactly once is promised: **{summary.lost} lost, {summary.doubled} doubled** in {summary.promised_once} schedules"
    yield (
        f"* reach: {summary.windows} windows hit, {len(summary.unreached)} not; {summary.well} of {summary.after} calls ended "
        "well after the faults were over"
    )
    for reason in summary.invalid:
        yield f"* **invalid**: {reason}"
    if summary.goals:
        yield f"* goals of a long run: {'; '.join(each.text for each in summary.goals)}"
    for text in summary.missed:
        yield f"* **missed**: {text}"
    if summary.again:
        yield f"* played once more (listed [below](#played-once-more)): {replayed(summary)}"
    yield f"* recovery after a kill: {recovered(summary)}"
    yield "* a field is run again by `semel chaos --cell 'store/colour/mode/fault@point'`; points are places, so there is no seed"
    rows = {row.cell: row for row in found.cells}
    for mode in dict.fromkeys(cell.mode for cell in cells if cell.applies):
        yield ""
        yield from _table(mode, [cell for cell in cells if cell.mode == mode], rows)
    for peer in found.peers:
        yield ""
        yield from _peer(peer, found)
    for annex in found.annexes:
        yield ""
        yield from as_markdown(annex)
    if found.again:
        yield ""
        yield from _again(found)
    yield ""
    yield from _settings(found)
    for title, chosen in (
        ("Cells that are not built yet", [cell for cell in cells if cell.unbuilt]),
        ("Cells that do not apply", [cell for cell in cells if not cell.applies and not cell.unbuilt]),
    ):
        yield ""
        yield from _reasons(title, chosen)


def _again(found: Document) -> Iterator[str]:
    yield "## Played once more"
    yield ""
    yield "Nothing that is worse than its field says is ever played again, nor any breach of a fence."
    yield ""
    yield "| field | times | at the first try |"
    yield "|---|---|---|"
    for each in found.again:
        yield f"| {each.cell} | {each.times} | {_escaped(each.first)} |"


def _settings(found: Document) -> Iterator[str]:
    yield "## What the harness sets"
    yield ""
    yield "In seconds; everything else is the default. Leases of the recovery plot are their own."
    yield ""
    yield "| where | options (why) |"
    yield "|---|---|"
    for where, options in found.harness.items():
        yield f"| {where} | {options} |"


def _table(mode: str, cells: Sequence[Cell], rows: dict[str, Row]) -> Iterator[str]:
    """One line per fault and point; sync and async in one field, both named where they differ."""
    stores = list(dict.fromkeys(cell.store for cell in cells))
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for cell in cells:
        words = found.setdefault((cell.fault, cell.point), defaultdict(list))[cell.store]
        if cell.applies:
            words.append(_word(rows[cell.name]))
    yield f"## Mode {mode}"
    yield ""
    yield "| fault @ point | " + " | ".join(stores) + " |"
    yield "|---" * (1 + len(stores)) + "|"
    faults = list(dict.fromkeys(fault for fault, _ in found))
    for (fault, point), fields in sorted(found.items(), key=lambda item: faults.index(item[0][0])):
        if any(fields.values()):
            line = (" / ".join(dict.fromkeys(fields[store])) or "–" for store in stores)
            yield f"| {fault} @ {point} | " + " | ".join(line) + " |"


def _word(row: Row) -> str:
    if not row.schedules:
        return "not run"
    return row.expected if row.agreed == row.schedules else "**wrong**"


def _peer(peer: Peer, found: Document) -> Iterator[str]:
    yield f"## Beside {peer.name} {peer.version}"
    yield ""
    yield "The cases that apply to it, on PostgreSQL, in its own words: the workflow id is the key, an effect is a step or a"
    yield (
        "datasource transaction, a killed process is followed by the next one of the same executor. "
        f"{peer.name} was run on {peer.made or 'the same day'}, each case {_times(peer)}, by `{peer.command}`."
    )
    yield ""
    yield f"| case | semel | {peer.name} | {peer.name} promises |"
    yield "|---|---|---|---|"
    for each in peer.findings:
        said = ", ".join(dict.fromkeys(each.found)) or each.problem
        yield f"| {each.what} | {beside(found, each)} | {said} | {each.promised} |"
    if peer.shortest is not None:
        yield ""
        yield (
            f"From a kill to the effect, made by {peer.name}'s next process: {peer.shortest:.1f}-{peer.longest:.1f} s, its start included "
            "(semel's figure above has no start in it: its heirs are processes that run already, and open a connection)."
        )
    yield ""
    yield "Not compared:"
    yield ""
    for what, why in found.apart.items():
        yield f"* {what}: {why}"


def _times(peer: Peer) -> str:
    fewest = min((len(each.found) for each in peer.findings), default=0)
    return "once" if fewest == 1 else f"{fewest} times"


def _reasons(title: str, cells: Sequence[Cell]) -> Iterator[str]:
    count: dict[str, int] = defaultdict(int)
    for cell in cells:
        count[cell.reason] += 1
    yield f"## {title}"
    yield ""
    yield "| cells | why |"
    yield "|---|---|"
    for reason, number in sorted(count.items(), key=lambda item: -item[1]):
        yield f"| {number} | {_escaped(reason)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
