"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

__all__ = ["counted", "moment", "printable", "say", "show", "span"]

_WIDE: Final = 10_000


def say(data: Any) -> None:
    """Data for programs, on one line."""
    typer.echo(msgspec.json.encode(data).decode())


def show(names: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str, whole: str = "") -> None:
    """A table, or the sentence for none. The column `whole` is never folded: people copy it."""
    if not rows:
        typer.echo(empty)
        return
    out = Console()
    if not out.is_terminal:
        out = Console(width=_WIDE)  # for a pipe nothing is cut
    grid = Grid(box=None, header_style="bold")
    for name in names:
        grid.add_column(name, overflow="fold", no_wrap=name == whole)
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    out.print(grid)


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
