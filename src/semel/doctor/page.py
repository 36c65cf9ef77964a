"""The checkup for people: a table where `rich` is installed, plain lines otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from semel.doctor import Checkup, Verdict
from semel.guarantees import FAULTS

__all__ = ["lines", "show"]

_NEVER = "cannot happen with these settings"
# As the guarantee table of the documentation has them.
_HEADS = {
    "crash": "worker killed, request or reply lost, store killed",
    "zombie": "worker paused beyond its lease",
    "loss": "store loses writes it had acknowledged",
}


def show(checkup: Checkup, verdict: Verdict) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join(lines(checkup, verdict)))  # noqa: T201 - it is a page for a terminal
        return
    console = Console(soft_wrap=False, highlight=False)
    console.print(_title(checkup), markup=False, soft_wrap=True)
    table = Table("mode", *(_HEADS[fault] for fault in FAULTS), box=box.SIMPLE_HEAD, pad_edge=False)
    for mode, *cells in _rows(checkup):
        table.add_row(mode, *cells)
    console.print(table)
    for line in _findings(checkup, verdict):
        console.print(line, markup=False, soft_wrap=True)


def lines(checkup: Checkup, verdict: Verdict) -> Iterator[str]:
    """The same without `rich`."""
    yield _title(checkup)
    yield ""
    for mode, *cells in _rows(checkup):
        told = "; ".join(f"{fault}: {cell}" for fault, cell in zip(FAULTS, cells, strict=True))
        yield f"  {mode:<6} {told}"
    yield ""
    yield from _findings(checkup, verdict)


def _title(checkup: Checkup) -> str:
    guarantee = checkup.guarantee
    return f"{checkup.url}: {guarantee.store} {guarantee.version}".rstrip()


def _rows(checkup: Checkup) -> Iterator[list[str]]:
    exposed, absent = checkup.guarantee.exposed, checkup.guarantee.absent
    for mode, promises in checkup.guarantee.rows.items():
        if mode in absent:
            continue
        yield [mode, *(promises[fault] if fault in exposed else _NEVER for fault in FAULTS)]


def _findings(checkup: Checkup, verdict: Verdict) -> Iterator[str]:
    for mode, condition in checkup.guarantee.conditions.items():
        yield f"{mode}: exactly once {condition}"
    settings = checkup.guarantee.settings
    if settings:
        yield "settings: " + ", ".join(f"{name}={value or '-'}" for name, value in settings.items())
    absent = checkup.guarantee.absent
    yield from _marked("not here", (f"{mode}: {why}" for mode, why in absent.items()))
    yield from _marked("stops semel", checkup.problems)
    yield from _marked("weakens", (*checkup.guarantee.warnings, *checkup.messaging.doubts))
    yield from _marked("note", checkup.advice)
    if checkup.schema.state != "none" and checkup.schema.usable:
        yield f"schema: {checkup.schema.text}"
    if checkup.messaging.state != "none" and checkup.messaging.text not in checkup.problems:
        yield f"messaging: {checkup.messaging.text}"
    yield f"records: {_attention(checkup)}"
    yield f"verdict: {verdict.text}"


def _marked(word: str, texts: Iterable[str]) -> Iterator[str]:
    return (f"{word}: {text}" for text in texts)


def _attention(checkup: Checkup) -> str:
    found = checkup.attention
    if not found.read:
        return "not counted"
    more = "at least " if found.more else ""
    if not found.total:
        return f"none needs attention, {more}{found.running} running"
    return (
        f"{more}{found.total} need attention ({found.unknown} unknown, {found.failed} failed, "
        f"{found.abandoned} abandoned), {found.running} running"
    )
