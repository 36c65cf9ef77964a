"""`semel chaos`: run the crash matrix on private servers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from semel.errors import ConfigurationError

__all__ = ["chaos"]


def chaos(
    cell: Annotated[
        list[str] | None, typer.Option("--cell", "--only", help="Run these cells; * and ? match.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Schedules per cell: 1, or 20 with --long.")
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="A campaign: fails unless its figures are reached (about an hour).")
    ] = False,
    drivers: Annotated[int, typer.Option(min=1, help="Schedules at a time.")] = 15,
    seconds: Annotated[float | None, typer.Option(help="Begin nothing new after so many seconds.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write index.html, matrix.md and chaos.json into this folder.")
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="Run DBOS beside it, with this Python, which has the package dbos (minutes)."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--from", help="Play nothing: write --report again from the chaos.json of a run."),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Print the cells, with what must come of them.")
    ] = False,
) -> None:
    """Kill, stop, cancel and cut real workers on real servers, and compare what comes of it with the guarantee table."""
    try:  # its servers and drivers are for this command only
        from semel.testing.chaos import run_matrix, show_again
        from semel.testing.chaos.cells import load
        from semel.testing.folders import see_to

        load()
    except (ImportError, ConfigurationError) as missing:
        raise ConfigurationError(
            "the crash matrix is played on every store, and with messaging: pip install "
            f'"semel[cli,redis,postgres,mysql,messaging]" ({missing})'
        ) from missing
    if report is not None and not listing:
        see_to(report)
    if file is not None:
        if report is None:
            raise ConfigurationError("--from FILE needs --report FOLDER: where the page is written")
        if listing or cell:
            raise ConfigurationError("--from FILE plays and lists nothing: leave --list and --cell out")
        raise typer.Exit(show_again(file, report))
    command = shlex.join(["semel", *sys.argv[1:]])
    code = run_matrix(
        only=cell or (),
        repeat=repeat,
        long=long,
        drivers=drivers,
        seconds=seconds,
        folder=report,
        listing=listing,
        peers=peers,
        command=command,
    )
    raise typer.Exit(code)
