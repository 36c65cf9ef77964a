"""The commands. Thin: they read arguments, call the library and print."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from semel import __version__
from semel.cli.chaos import chaos
from semel.cli.doctor import doctor
from semel.errors import ConfigurationError
from semel.store import Settings, schema_sql

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look after keys that run once.")
schema = typer.Typer(no_args_is_help=True, help="The tables that SQL stores need.")
app.add_typer(schema, name="schema")
app.command("doctor")(doctor)
app.command("chaos")(chaos)
with contextlib.suppress(
    ConfigurationError
):  # messaging needs SQLAlchemy: without it there are no such commands
    from semel.cli import messaging
    from semel.cli.relay import relay

    app.command("relay")(relay)
    app.add_typer(messaging.outbox, name="outbox")
    app.add_typer(messaging.inbox, name="inbox")

Url = Annotated[str, typer.Argument(help="A store URL, such as postgresql://host/db or sqlite:///semel.db")]
Table = Annotated[str, typer.Option(help="The table= that the program uses.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    del context


@schema.command("sql")
def _print_schema(url: Url, table: Table = "semel") -> None:
    """Print the statements that create the tables, for people who may not let a program do it."""
    typer.echo(schema_sql(url, Settings(table=table)))
    with contextlib.suppress(ConfigurationError):
        from semel.messaging.database import Database

        typer.echo("\n-- messaging: outbox and inbox\n")
        typer.echo(Database(url, table=table).ddl())
