"""Commands about keys: find them, look at them. Those that decide about them are in `deciding`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Final

import typer

from semel.cli.durations import lasting
from semel.cli.meanings import explained
from semel.cli.places import Place
from semel.cli.records import COLUMNS, as_data, event_data, lines, row, trail
from semel.cli.tables import printable, say, show, span
from semel.errors import ConfigurationError
from semel.model import Record, State

__all__ = ["add_to", "explain", "ls", "stats", "watch"]

Url = Annotated[str, typer.Argument(help="The store URL that the program uses.")]
Key = Annotated[str, typer.Argument(help="The key, as the program gave it.")]
ByScope = Annotated[
    bool,
    typer.Option(
        "--scope",
        help="KEY is a scope in hex, as ls --json has it: for keys that are masked. Its first 8 digits, as messages have them, "
        "are enough for a key that needs attention; in SQL for others, too, if there are not too many.",
    ),
]
Tenant = Annotated[str | None, typer.Option(help="The tenant= of the key; default unless given.")]
Operation = Annotated[str | None, typer.Option(help="The operation= of the key; default unless given.")]
AnyTenant = Annotated[str | None, typer.Option(help="Only this tenant.")]
AnyOperation = Annotated[str | None, typer.Option(help="Only this operation.")]
Table = Annotated[str, typer.Option(help="The table= that the program uses (SQL).")]
Prefix = Annotated[str, typer.Option(help="The prefix= that the program uses.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data instead of a page.")]

_ENDED: Final = frozenset(State) - {State.RUNNING}


def ls(
    url: Url,
    state: Annotated[
        list[str] | None, typer.Option(help="Only these states; without it running, unknown and failed.")
    ] = None,
    tenant: AnyTenant = None,
    operation: AnyOperation = None,
    ref: Annotated[str | None, typer.Option(help="Only records with this ref.")] = None,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Only runs whose worker has not renewed its lease.")
    ] = False,
    limit: Annotated[int, typer.Option(help="How many.")] = 100,
    table: Table = "semel",
    prefix: Prefix = "semel",
    as_json: AsJson = False,
) -> None:
    """Keys that need attention: running, unknown, failed. Changes nothing."""
    with Place(url, table, prefix).opened() as once:
        found = once.find(
            states=state or (), tenant=tenant, operation=operation, ref=ref, abandoned=abandoned, limit=limit
        )
        lists_all = once._engine().store.capabilities.lists_all  # noqa: SLF001 - our own face
    if as_json:
        say([as_data(record) for record in found])
        return
    none = "nothing needs attention" if state is None and ref is None else "no such records"
    if ref is not None and not lists_all:
        none += (
            ": only those that a program with index={'ref'} has settled are found by their ref; ask by key"
        )
    show(COLUMNS, [row(record) for record in found], empty=none, whole="key", cut="error")
    if len(found) == limit:
        typer.echo(f"the first {limit}: --limit shows more", err=True)


def _show_key(
    url: Url,
    key: Key,
    by_scope: ByScope = False,
    tenant: Tenant = None,
    operation: Operation = None,
    table: Table = "semel",
    prefix: Prefix = "semel",
    as_json: AsJson = False,
) -> None:
    """One key: its record, its steps, and who changed it by hand. Leaves with 1 if there is no record."""
    place = Place(url, table, prefix, key, by_scope, tenant, operation)
    with place.opened() as once:
        name = place.name(once)
        record, events = once.peek(name), once.history(name)
        hints = place.elsewhere(once) if record is None and not as_json else []
    if as_json:
        data = None if record is None else as_data(record)
        say({"record": data, "history": [event_data(event) for event in events]})
    elif record is not None:
        _print(lines(record, events))
    else:
        typer.echo("\n".join([place.missing(), *hints]), err=True)
        _print(trail(events))
    raise typer.Exit(0 if record is not None else 1)


def _print(said: list[tuple[str, str]]) -> None:
    shown = [(printable(name), printable(value)) for name, value in said]
    wide = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        typer.echo(f"{name:<{wide}}  {value}")


def explain(
    url: Url,
    key: Key,
    by_scope: ByScope = False,
    tenant: Tenant = None,
    operation: Operation = None,
    table: Table = "semel",
    prefix: Prefix = "semel",
) -> None:
    """What the state of a key means, what the next caller gets, and what you can do about it."""
    place = Place(url, table, prefix, key, by_scope, tenant, operation)
    with place.opened() as once:
        name = place.name(once)
        record = once.peek(name)
        said = [f"{record.state.value}: {key}"] if record else [place.missing(), *place.elsewhere(once)]
    typer.echo("\n".join([*said, explained(record, place.of(name))]))


def watch(
    url: Url,
    key: Key,
    by_scope: ByScope = False,
    tenant: Tenant = None,
    operation: Operation = None,
    timeout: Annotated[float | None, lasting("Give up after so long, and leave with 1.")] = None,
    every: Annotated[float, lasting("Time between two looks.")] = 0.5,
    table: Table = "semel",
    prefix: Prefix = "semel",
    as_json: AsJson = False,
) -> None:
    """Follow a key until its run has ended: a line for every change."""
    if not every > 0:
        raise ConfigurationError(f"--every must be above 0 seconds, not {every:g}")
    if timeout is not None and not timeout >= 0:
        raise ConfigurationError(f"--timeout must be 0 seconds or more, not {timeout:g}")
    end = None if timeout is None else time.monotonic() + timeout
    seen: object = ()
    warned: object = ()
    place = Place(url, table, prefix, key, by_scope, tenant, operation)
    with place.opened() as once:
        name = place.name(once)
        while True:
            record = once.peek(name)
            now = None if record is None else (record.state, record.attempts, record.token)
            if now != seen:
                seen = now
                _tell(record, as_json=as_json)
            if record is not None and _is_lost(record, time.time()) and now != warned:
                warned = now
                again = place.of(name).command("explain")
                typer.echo(f"its lease is over: nobody runs it; see {again}", err=True)
            if record is not None and record.state in _ENDED:
                return
            left = every if end is None else min(every, end - time.monotonic())
            if left <= 0:
                raise typer.Exit(1)
            time.sleep(left)


def _is_lost(record: Record, now: float) -> bool:
    return record.state is State.RUNNING and record.lease_until <= now


def _tell(record: Record | None, *, as_json: bool) -> None:
    if as_json:
        say(None if record is None else as_data(record))
    elif record is None:
        typer.echo("no record yet")
    else:
        typer.echo("  ".join(printable(part) for part in row(record) if part != "–"))


def stats(
    url: Url,
    tenant: AnyTenant = None,
    operation: AnyOperation = None,
    limit: Annotated[int, typer.Option(help="Count at most so many records.")] = 100_000,
    table: Table = "semel",
    prefix: Prefix = "semel",
    as_json: AsJson = False,
) -> None:
    """How many keys need attention, by operation and state, and how old the oldest is. Changes nothing."""
    with Place(url, table, prefix).opened() as once:
        found = once.find(tenant=tenant, operation=operation, limit=limit)
    now = time.time()  # once: a lease that ends meanwhile would move its record between groups
    times: dict[tuple[str, str, str], list[float]] = {}
    for record in found:
        times.setdefault(_group(record, now), []).append(record.updated)
    names = ("tenant", "operation", "state", "keys", "oldest")
    rows = [(*group, len(each), max(0.0, now - min(each))) for group, each in sorted(times.items())]
    if as_json:
        say([dict(zip(names, each, strict=True)) for each in rows])
    else:
        show(
            names,
            [(*each[:3], str(each[3]), f"{span(each[4])} ago") for each in rows],
            empty="nothing needs attention",
        )
    if len(found) == limit:
        typer.echo(f"the first {limit} records only: --limit counts more", err=True)


def _group(record: Record, now: float) -> tuple[str, str, str]:
    scope = record.scope
    return (
        scope.tenant if scope else "–",
        scope.operation if scope else "–",
        "abandoned" if _is_lost(record, now) else record.state.value,
    )


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "ls": ls,
    "show": _show_key,
    "explain": explain,
    "watch": watch,
    "stats": stats,
}


def add_to(app: typer.Typer) -> None:
    """Give the command line these commands."""
    for name, command in _COMMANDS.items():
        app.command(name)(command)
