"""`semel doctor`: reads arguments, calls `semel.doctor`, prints, and turns the verdict into an exit code."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import typer

from semel.cli.durations import lasting
from semel.cli.tables import say
from semel.doctor import Checkup, Requirement, Verdict, examine, judge
from semel.doctor.page import show
from semel.errors import ConfigurationError, SemelError
from semel.store import Settings

__all__ = ["doctor"]


def doctor(
    url: Annotated[str, typer.Argument(help="The store URL that the program uses.")],
    require: Annotated[
        Literal["exactly-once", "durable"] | None,
        typer.Option(help="Leave with 1 unless this holds: exactly-once or durable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print data instead of a page.")] = False,
    table: Annotated[str, typer.Option(help="The table= that the program uses.")] = "semel",
    prefix: Annotated[str, typer.Option(help="The prefix= that the program uses.")] = "semel",
    acks: Annotated[int, typer.Option(help="The acks= that the program uses (Redis).")] = 0,
    timeout: Annotated[float, lasting("How long to wait for each answer.")] = 5.0,
) -> None:
    """Read a store's live settings: which guarantees hold, what weakens them, what to set. Changes nothing.

    Exit codes: 0 fine, 1 weaker than --require asks for, 2 cannot be told: unreachable, unreadable or misconfigured.
    """
    if not timeout > 0:
        raise ConfigurationError(f"--timeout must be above 0 seconds, not {timeout:g}")
    settings = Settings(prefix=prefix, table=table, timeout=timeout, acks=acks)
    requirement: Requirement | None = require
    try:
        checkup = examine(url, settings)
    except SemelError as error:
        _complain(error, json=json)
        raise typer.Exit(2) from error
    verdict = judge(checkup, requirement)
    if json:
        say(_data(checkup, verdict), indent=2)
    else:
        show(checkup, verdict)
    raise typer.Exit(verdict.code)


def _complain(error: SemelError, *, json: bool) -> None:
    if json:
        say({"verdict": {"code": 2, "text": str(error)}})
    else:
        typer.echo(f"semel: {error}", err=True)


def _data(checkup: Checkup, verdict: Verdict) -> dict[str, Any]:
    return {"verdict": msgspec.to_builtins(verdict), **msgspec.to_builtins(checkup)}
