"""What is shown while the race goes on: a live table on a terminal that can, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from semel.demo.race import Race

__all__ = ["show"]

COLUMNS = ("executed", "replayed", "waited", "taken_over")


def show(race: Race, *, plain: bool) -> None:
    """Show the race until it is over, or raise TimeoutError when it does not end."""
    live = None if plain or not sys.stdout.isatty() else _rich()
    if live is None:
        _show_plain(race)
    else:
        live(race)


def _step(race: Race, seconds: float, until: float) -> None:
    race.step(seconds)
    if time.monotonic() > until:
        raise TimeoutError(f"the demo did not end within {race.plan.limit:.0f} s")


def _show_plain(race: Race) -> None:
    until, told, last, due = time.monotonic() + race.plan.limit, 0, "", 0.0
    while not race.over:
        _step(race, 0.1, until)
        for line in race.news[told:]:
            print(f"  * {line}", flush=True)
        told = len(race.news)
        sums = ", ".join(f"{name.replace('_', ' ')} {_sum(race, name)}" for name in COLUMNS)
        line = f"  {len(race.done):4}/{race.plan.keys} keys done: {sums}"
        if line != last and race.began and (time.monotonic() >= due or race.over):
            last, due = line, time.monotonic() + 1.0
            print(line, flush=True)


def _sum(race: Race, name: str) -> int:
    return sum(getattr(tally, name) for tally in race.tallies)


def _rich() -> Callable[[Race], None] | None:
    try:
        from rich.live import Live
    except ImportError:
        return None

    def live(race: Race) -> None:
        until = time.monotonic() + race.plan.limit
        with Live(_screen(race), refresh_per_second=10) as screen:
            while not race.over:
                _step(race, 0.1, until)
                screen.update(_screen(race))

    return live


def _screen(race: Race) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None, expand=False)
    for name in ("worker", "pid", "state"):
        table.add_column(name)
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    for number, tally in enumerate(race.tallies, 1):
        style = "red" if tally.state == "killed" else "green" if tally.state == "finished" else ""
        numbers = [str(getattr(tally, name)) for name in COLUMNS]
        table.add_row(f"worker-{number}", str(tally.pid), tally.state, *numbers, style=style)
    table.add_section()
    table.add_row("all", "", "", *(str(_sum(race, name)) for name in COLUMNS), style="bold")
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=race.plan.keys, completed=len(race.done), width=50),
        Text(f"{len(race.done)}/{race.plan.keys} keys done"),
    )
    return Group(table, bar, *(Text(f"* {line}") for line in race.news[-4:]))
