"""Commands for the HTTP edge."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from semel.http.spill import Spill

__all__ = ["http"]

http = typer.Typer(no_args_is_help=True, help="What the HTTP middlewares leave behind.")

Where = Annotated[
    str,
    typer.Argument(
        help="The spill= of the routes: file:///folder, s3://bucket/prefix or the URL of a database."
    ),
]


@http.callback()
def _group() -> None:
    """With one command only it would have no name."""


@http.command("sweep")
def _sweep(
    where: Where,
    grace: Annotated[
        float, typer.Option(help="Keep bodies for so many seconds more than their retention.")
    ] = 3600.0,
) -> None:
    """Remove long responses whose records are over. Once a day is enough."""
    with closing(Spill(where, grace=grace)) as spill:
        count = spill.sweep()
    typer.echo(f"{count} {'body' if count == 1 else 'bodies'} removed")
