"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

__all__ = ["counted", "moment", "printable", "say", "show", "span"]

_WIDE: Final = 10_000
_LEAST: Final = 10  # characters that are left of a text, however narrow the terminal is
_NOTHING: Final = "–"


def say(data: Any, *, indent: int | None = None) -> None:
    """Data for programs, on one line unless it is indented."""
    # ASCII: whatever the output can spell, a program reads it.
    separators = (",", ":") if indent is None else None
    typer.echo(json.dumps(msgspec.to_builtins(data), indent=indent, separators=separators))


def show(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str, whole: str = "", cut: str = ""
) -> None:
    """A table, or the sentence for none. The column `whole` is never folded: people copy it; `cut` is shortened first."""
    if not rows:
        typer.echo(empty)
        return
    shown = [[printable(cell) for cell in row] for row in rows]
    out = Console()
    if not out.is_terminal:
        out = Console(width=_WIDE)  # for a pipe nothing is cut
    elif _width(names, shown) > out.width:
        names, shown = _narrowed(names, shown, out.width, cut)
    least = [_least(name, column, whole) for name, *column in zip(names, *shown, strict=True)]
    widths = _shared(_widths(names, shown), least, out.width - 2 * len(names))
    grid = Grid(box=None, header_style="bold")
    for name, wide in zip(names, widths, strict=True):
        grid.add_column(name, overflow="fold", width=wide)
    for row in shown:
        grid.add_row(*(Text(cell) for cell in row))
    # Beyond that the terminal breaks lines, which loses nothing.
    Console(width=max(out.width, sum(widths) + 2 * len(names))).print(grid)


def _least(name: str, column: Sequence[str], whole: str) -> int:
    """The width of a column that breaks neither its head nor its short words."""
    if name == whole:
        return max(map(cell_len, (name, *column)))
    words = (cell_len(word) for cell in column for word in cell.split())
    return max(cell_len(name), min(_LEAST, max(words, default=0)))


def _shared(wanted: list[int], least: list[int], room: int) -> list[int]:
    """Widths that fit in, if they can: whoever has most to spare gives first. (Rich would break short words first.)"""
    widths = list(wanted)
    while sum(widths) > room:
        spare = [has - needs for has, needs in zip(widths, least, strict=True)]
        if max(spare) <= 0:
            break
        widths[spare.index(max(spare))] -= 1
    return widths


def _widths(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]


def _width(names: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(_widths(names, rows)) + 2 * len(names)  # a space on either side


def _narrowed(
    names: Sequence[str], rows: Sequence[Sequence[str]], room: int, cut: str
) -> tuple[Sequence[str], list[list[str]]]:
    """Without the columns that say nothing, and with what may be cut as long as there is room for it."""
    kept = [at for at in range(len(names)) if any(row[at] != _NOTHING for row in rows)]
    names, shown = [names[at] for at in kept], [[row[at] for at in kept] for row in rows]
    if cut in names:
        at = names.index(cut)
        left = max(_LEAST, room - _width(names, shown) + _widths(names, shown)[at])
        for row in shown:
            row[at] = (
                row[at] if cell_len(row[at]) <= left else set_cell_size(row[at], left - 1).rstrip() + "…"
            )
    return names, shown


def printable(said: str) -> str:
    """What somebody else wrote, without what would move the cursor of whoever reads it."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in said)


def counted(number: int, one: str, more: str) -> str:
    """1 body, 2 bodies."""
    return f"{number} {one if number == 1 else more}"


def moment(at: float | None) -> str | None:
    """A time of the store, in ISO 8601 with its zone; None for never."""
    if at is None or not math.isfinite(at):
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


_UNITS: Final[Mapping[str, int]] = {"d": 86_400, "h": 3_600, "min": 60}


def span(seconds: float) -> str:
    """So many seconds for people: 12 s, 3.5 min, 2.0 h, 9.1 d."""
    for unit, size in _UNITS.items():
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
