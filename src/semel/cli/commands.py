"""The commands. Thin: they read arguments, call the library and print."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from semel import __version__
from semel.cli import deciding, keys, messaging
from semel.cli.bench import bench
from semel.cli.chaos import chaos
from semel.cli.doctor import doctor
from semel.cli.http import http
from semel.cli.relay import relay
from semel.configuring import settings_from, settings_of_environment
from semel.doctor import without_password
from semel.errors import ConfigurationError
from semel.once import Semel
from semel.store import Settings, schema_sql

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look after keys that run once.")
schema = typer.Typer(no_args_is_help=True, help="The tables that SQL stores need.")
app.add_typer(schema, name="schema")
keys.add_to(app)
deciding.add_to(app)
app.command("doctor")(doctor)
app.command("chaos")(chaos)
app.command("bench")(bench)
app.add_typer(http, name="http")
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


@app.command("config")
def _config(
    file: Annotated[
        Path | None, typer.Argument(help="A TOML or JSON file; without it the environment.")
    ] = None,
    section: Annotated[str, typer.Option(help="The section of the file.")] = "semel",
    prefix: Annotated[str, typer.Option(help="What the variables begin with.")] = "SEMEL_",
) -> None:
    """Check a configuration, and print what it says. Nothing is connected to; secrets are not shown."""
    if file is not None and not file.exists():
        raise ConfigurationError(f"there is no file {str(file)!r}")
    said = settings_from(file, section) if file is not None else settings_of_environment(os.environ, prefix)
    with Semel.from_config(said):
        pass
    shown = said | ({"secret": "…"} if "secret" in said else {}) | {"url": without_password(said["url"])}
    for name, value in sorted(shown.items()):
        typer.echo(f"{name} = {value}")


@app.command(
    "demo", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def _demo(context: typer.Context) -> None:
    """Callers in several processes race on the same keys, a worker is killed, the ledger is shown. Options go to the demo."""
    run = "import sys; from semel.demo.program import main; sys.exit(main(program='semel demo'))"
    raise typer.Exit(subprocess.call([sys.executable, "-c", run, *context.args]))
