"""Commands that change keys: resolve, release, forget, purge."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import typer

from semel.cli.durations import lasting
from semel.cli.keys import ByScope, Key, Operation, Prefix, Table, Tenant, Url
from semel.cli.places import Place
from semel.errors import ConfigurationError, SemelError
from semel.model import Record, State
from semel.options import count, seconds
from semel.seals import is_sealed

__all__ = ["add_to", "forget", "purge", "release", "resolve"]

Actor = Annotated[str | None, typer.Option(help="Who decides; your user name unless given.")]
Reason = Annotated[str, typer.Option(help="Why; kept in the audit trail.")]
Retention = Annotated[
    float,
    lasting(
        "How long to keep it, as 7d: the retention= that the program uses. A number is seconds; inf: for ever."
    ),
]


def resolve(
    url: Url,
    key: Key,
    value: Annotated[str | None, typer.Option(help="It happened: the result, as JSON.")] = None,
    error: Annotated[str | None, typer.Option(help="It failed: what callers are told.")] = None,
    release: Annotated[
        bool, typer.Option("--release", help="It did not happen: the next caller runs it.")
    ] = False,
    correct: Annotated[
        bool,
        typer.Option(
            "--correct",
            help="Replace an outcome that a person gave before by mistake, or the program cannot read.",
        ),
    ] = False,
    by_scope: ByScope = False,
    tenant: Tenant = None,
    operation: Operation = None,
    actor: Actor = None,
    reason: Reason = "",
    retention: Retention = 86_400.0,
    tombstone: Annotated[
        float, lasting("How long late retries are refused after that: the program's tombstone=.")
    ] = 0.0,
    table: Table = "semel",
    prefix: Prefix = "semel",
) -> None:
    """Decide about an unknown or failed key, or a run whose lease is over: exactly one of --value, --error and --release."""
    word: dict[str, Any] = {} if value is None else {"value": _json(value)}
    word |= {"error": error} if error is not None else {}
    word |= {"release": True} if release else {}
    if len(word) != 1:
        raise ConfigurationError("say exactly one of --value JSON, --error TEXT and --release")
    word |= {"retention": retention, "tombstone": tombstone, "correct": correct}
    place = Place(url, table, prefix, key, by_scope, tenant, operation)
    _decide(place, word | {"actor": actor or _me(), "reason": reason})


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as problem:
        raise ConfigurationError(
            f"--value must be JSON, which {text!r} is not ({problem}); a text is written '\"text\"'"
        ) from problem


def _me() -> str:
    """Who is at the keyboard, for the audit trail."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without users
        return "anonymous"


def release(
    url: Url,
    key: Key,
    by_scope: ByScope = False,
    tenant: Tenant = None,
    operation: Operation = None,
    actor: Actor = None,
    reason: Reason = "",
    retention: Retention = 86_400.0,
    table: Table = "semel",
    prefix: Prefix = "semel",
) -> None:
    """Let an unknown or failed key, or a run whose lease is over, run again: the next caller does. Only if the effect did not happen."""
    place = Place(url, table, prefix, key, by_scope, tenant, operation)
    _decide(place, {"release": True, "actor": actor or _me(), "reason": reason, "retention": retention})


def _decide(place: Place, word: dict[str, Any]) -> None:
    for option in {"retention", "tombstone"} & word.keys():
        seconds(f"--{option}", word[option])
    with place.opened() as once:
        name = place.name(once)
        place = place.of(name)
        try:
            once.resolve(name, **word)
        except ConfigurationError as error:
            record = None
            with suppress(SemelError):
                record = once.peek(name)
            if record is None or not (why := _too_late(record, place, word)):
                raise
            raise ConfigurationError(why) from error
    typer.echo(f"{place.key}: {'released' if 'release' in word else 'failed' if 'error' in word else 'done'}")


def _too_late(record: Record, place: Place, word: Mapping[str, Any]) -> str:
    """Why nobody can decide about a record in this state, in the words of the command; "" if its state is not why."""
    scope, state = record.scope, record.state
    is_open = state in (State.RUNNING, State.UNKNOWN, State.FAILED) and not record.resolved
    if scope is None or is_open or is_sealed(record) or word.get("correct"):
        return ""
    said = f"{place.key} [{scope.hex[:8]}] of {scope.tenant}/{scope.operation} is {state.value}"
    if state is State.RELEASED:
        return f"{said} already: the next caller runs it"
    if not record.resolved or state is State.EXPIRED:
        said += ", and only unknown or failed keys, and runs whose lease is over, can be decided about"
    else:
        said += ", as a person said, and is decided about once"
        said += "" if "release" in word else ". If that was a mistake, add --correct"
    return f"{said}. To let the key run anew: {place.command('forget')}"


def forget(
    url: Url,
    key: Key,
    by_scope: ByScope = False,
    tenant: Tenant = None,
    operation: Operation = None,
    actor: Actor = None,
    reason: Reason = "",
    table: Table = "semel",
    prefix: Prefix = "semel",
) -> None:
    """Remove a key's record: whoever comes next runs it as if it were new. Leaves with 1 if there is none."""
    place = Place(url, table, prefix, key, by_scope, tenant, operation)
    with place.opened() as once:
        name = place.name(once)
        gone = once.forget(name, actor=actor or _me(), reason=reason)
    typer.echo(f"{place.of(name).key}: {'forgotten' if gone else 'there is no record'}")
    raise typer.Exit(0 if gone else 1)


def purge(
    url: Url,
    limit: Annotated[int | None, typer.Option(help="At most so many.")] = None,
    table: Table = "semel",
    prefix: Prefix = "semel",
) -> None:
    """Remove what has expired, in batches."""
    if limit is not None:
        count("--limit", limit, least=1)
    with Place(url, table, prefix).opened() as once:
        typer.echo(f"{once.purge(limit=limit)} removed")


def add_to(app: typer.Typer) -> None:
    """Give the command line these commands."""
    for command in (resolve, release, forget, purge):
        app.command()(command)
