"""Commands for the HTTP edge."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import typer

from semel.bodies.files import FileBodies
from semel.cli.durations import lasting
from semel.cli.tables import counted
from semel.errors import ConfigurationError
from semel.hosts import scheme_of
from semel.http.spill import Spill

__all__ = ["http"]

http = typer.Typer(no_args_is_help=True, help="What the HTTP middlewares leave behind.")

Where = Annotated[
    str,
    typer.Argument(
        help="The spill= of the routes: file:///folder, s3://bucket/prefix or the URL of a database."
    ),
]

_MADE: Final = "The first response that is too long for a record makes it"


@http.callback()
def _group() -> None:
    """With one command only it would have no name."""


@http.command("sweep")
def _sweep(
    where: Where,
    grace: Annotated[float, lasting("Keep bodies for so long beyond their retention.")] = 3600.0,
) -> None:
    """Remove long responses whose records are over. Once a day is enough."""
    with closing(Spill(where, grace=grace)) as spill:
        _see_to(where, spill)
        count = spill.sweep()
    typer.echo(counted(count, "body removed", "bodies removed"))


def _see_to(where: str, spill: Spill) -> None:
    """A wrong place is not an empty one, and nothing is made there."""
    if isinstance(spill.store, FileBodies) and not spill.store.folder.is_dir():
        raise ConfigurationError(f"there is no folder {str(spill.store.folder)!r}: correct the URL. {_MADE}")
    if scheme_of(where).partition("+")[0] == "sqlite":
        from sqlalchemy import make_url

        path = make_url(where).database or ""
        if not path.startswith("file:") and not Path(path).is_file():
            raise ConfigurationError(f"there is no file {path!r}: correct the URL. {_MADE}")
