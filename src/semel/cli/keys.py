"""Commands about keys: find them, look at them, decide about them."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import typer

from semel import keeping
from semel.cli.records import COLUMNS, as_data, event_data, explained, lines, row
from semel.cli.tables import printable, say, show, span
from semel.errors import ConfigurationError
from semel.hosts import scheme_of
from semel.keys import Scope
from semel.model import Record, State
from semel.once import Semel
from semel.runtime import run_sync

__all__ = ["add_to", "explain", "forget", "ls", "purge", "release", "resolve", "stats", "watch"]

Url = Annotated[str, typer.Argument(help="The store URL that the program uses.")]
Key = Annotated[str, typer.Argument(help="The key, as the program gave it.")]
ByScope = Annotated[
    bool,
    typer.Option(
        "--scope",
        help="KEY is a scope in hex, as ls --json has it: for keys that are masked. Its first 8 digits, as messages have them, "
        "are enough for a key that needs attention.",
    ),
]
Tenant = Annotated[str | None, typer.Option(help="The tenant= of the key; default unless given.")]
Operation = Annotated[str | None, typer.Option(help="The operation= of the key; default unless given.")]
AnyTenant = Annotated[str | None, typer.Option(help="Only this tenant.")]
AnyOperation = Annotated[str | None, typer.Option(help="Only this operation.")]
Table = Annotated[str, typer.Option(help="The table= that the program uses (SQL).")]
Prefix = Annotated[str, typer.Option(help="The prefix= that the program uses.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data instead of a page.")]
Actor = Annotated[str | None, typer.Option(help="Who decides; your user name unless given.")]
Reason = Annotated[str, typer.Option(help="Why; kept in the audit trail.")]
Retention = Annotated[
    float, typer.Option(help="Seconds to keep it: the retention= that the program uses. inf: for ever.")
]

_HASH: Final = 32
_LEAST: Final = 8  # digits, as messages have them
_DIGITS: Final = frozenset("0123456789abcdef")
_MOST: Final = 10_000  # records that are looked through for those
_ENDED: Final = frozenset(State) - {State.RUNNING}


def _opened(
    url: str,
    table: str,
    prefix: str,
    tenant: str | None = None,
    operation: str | None = None,
    *,
    by_scope: bool = False,
) -> Semel:
    if scheme_of(url) == "memory":
        raise ConfigurationError(
            f"{url} lives in the process of the program that opened it: nobody else can look into it; ask the program "
            "(once.find(), once.peek(key)), or give it another store"
        )
    if by_scope and (tenant is not None or operation is not None):
        raise ConfigurationError(
            "a scope has its own tenant and operation: leave --tenant and --operation out"
        )
    return Semel(
        url,
        tenant=_or_default(tenant),
        operation=_or_default(operation),
        table=table,
        prefix=prefix,
        create=False,
    )


def _or_default(name: str | None) -> str:
    return "default" if name is None else name


def _place(tenant: str | None, operation: str | None, *, by_scope: bool) -> str:
    """Where a key was looked for; a scope says it by itself."""
    if by_scope:
        return ""
    return f" under tenant {_or_default(tenant)!r}, operation {_or_default(operation)!r}"


def _name(once: Semel, key: str, *, by_scope: bool) -> str | Scope:
    """What names the record: the key, or the scope that its digits stand for."""
    if not by_scope:
        return key
    try:
        digest = bytes.fromhex(key)
    except ValueError:
        digest = b""
    if _LEAST <= len(key) < 2 * _HASH and _DIGITS.issuperset(key.lower()):
        return _beginning_with(once, key.lower())
    if len(digest) != _HASH:
        raise ConfigurationError(
            "a scope is 64 hexadecimal digits, as `semel ls --json` and semel_scope of a log line have it; the first "
            f"{_LEAST} are enough for a key that needs attention. It is not {key!r}"
        )
    unnamed = Scope(digest, "–", "–", key)
    record = once.peek(unnamed)
    return unnamed if record is None or record.scope is None else record.scope


def _beginning_with(once: Semel, digits: str) -> Scope:
    """The scope of the one record that needs attention and begins so: no store has an index of all of them."""
    asked = keeping.query_for((), None, None, None, _MOST, abandoned=False)
    # Of every program: whose the scope is, its digits say.
    known = (record.scope for record in run_sync(keeping.find(once._engine(), asked, None)))  # noqa: SLF001 - our own face
    found = [scope for scope in known if scope is not None and scope.hex.startswith(digits)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationError(f"{len(found)} scopes begin with {digits}: give more digits of it")
    raise ConfigurationError(
        f"no record that needs attention (running, unknown, failed) begins with {digits}: others are found by all 64 digits "
        "only, as semel_scope of a log line has them"
    )


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
    with _opened(url, table, prefix) as once:
        found = once.find(
            states=state or (), tenant=tenant, operation=operation, ref=ref, abandoned=abandoned, limit=limit
        )
    if as_json:
        say([as_data(record) for record in found])
        return
    none = "nothing needs attention" if state is None and ref is None else "no such records"
    show(COLUMNS, [row(record) for record in found], empty=none, whole="key")
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
    with _opened(url, table, prefix, tenant, operation, by_scope=by_scope) as once:
        name = _name(once, key, by_scope=by_scope)
        record, events = once.peek(name), once.history(name)
    if as_json:
        data = None if record is None else as_data(record)
        say({"record": data, "history": [event_data(event) for event in events]})
    elif record is not None:
        _print(lines(record, events))
    else:
        typer.echo(f"no record of {key!r}{_place(tenant, operation, by_scope=by_scope)}", err=True)
    raise typer.Exit(0 if record is not None else 1)


def _print(said: list[tuple[str, str]]) -> None:
    shown = [(printable(name), printable(value)) for name, value in said]
    wide = max(len(name) for name, _ in shown)
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
    with _opened(url, table, prefix, tenant, operation, by_scope=by_scope) as once:
        record = once.peek(_name(once, key, by_scope=by_scope))
    if record is None:
        typer.echo(f"no record of {key!r}{_place(tenant, operation, by_scope=by_scope)}")
    else:
        typer.echo(f"{record.state.value}: {key}")
    typer.echo(explained(record))


def watch(
    url: Url,
    key: Key,
    by_scope: ByScope = False,
    tenant: Tenant = None,
    operation: Operation = None,
    timeout: Annotated[
        float | None, typer.Option(help="Give up after so many seconds, and leave with 1.")
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 0.5,
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
    with _opened(url, table, prefix, tenant, operation, by_scope=by_scope) as once:
        name = _name(once, key, by_scope=by_scope)
        while True:
            record = once.peek(name)
            now = None if record is None else (record.state, record.attempts, record.token)
            if now != seen:
                seen = now
                _tell(record, as_json=as_json)
            if record is not None and record.state in _ENDED:
                return
            left = every if end is None else min(every, end - time.monotonic())
            if left <= 0:
                raise typer.Exit(1)
            time.sleep(left)


def _tell(record: Record | None, *, as_json: bool) -> None:
    if as_json:
        say(None if record is None else as_data(record))
    elif record is None:
        typer.echo("no record yet")
    else:
        typer.echo("  ".join(printable(part) for part in row(record) if part != "–"))


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
        float, typer.Option(help="Seconds to refuse late retries after that: the program's tombstone=.")
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
    with _opened(url, table, prefix, tenant, operation, by_scope=by_scope) as once:
        once.resolve(_name(once, key, by_scope=by_scope), actor=actor or _me(), reason=reason, **word)
    typer.echo(f"{key}: {'released' if release else 'failed' if error is not None else 'done'}")


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
    with _opened(url, table, prefix, tenant, operation, by_scope=by_scope) as once:
        name = _name(once, key, by_scope=by_scope)
        once.resolve(name, release=True, actor=actor or _me(), reason=reason, retention=retention)
    typer.echo(f"{key}: released")


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
    with _opened(url, table, prefix, tenant, operation, by_scope=by_scope) as once:
        gone = once.forget(_name(once, key, by_scope=by_scope), actor=actor or _me(), reason=reason)
    typer.echo(f"{key}: {'forgotten' if gone else 'there is no record'}")
    raise typer.Exit(0 if gone else 1)


def purge(
    url: Url,
    limit: Annotated[int | None, typer.Option(help="At most so many.")] = None,
    table: Table = "semel",
    prefix: Prefix = "semel",
) -> None:
    """Remove what has expired, in batches."""
    with _opened(url, table, prefix) as once:
        typer.echo(f"{once.purge(limit=limit)} removed")


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
    with _opened(url, table, prefix) as once:
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
    lost = record.state is State.RUNNING and record.lease_until <= now
    return (
        scope.tenant if scope else "–",
        scope.operation if scope else "–",
        "abandoned" if lost else record.state.value,
    )


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "ls": ls,
    "show": _show_key,
    "explain": explain,
    "watch": watch,
    "stats": stats,
    "resolve": resolve,
    "release": release,
    "forget": forget,
    "purge": purge,
}


def add_to(app: typer.Typer) -> None:
    """Give the command line these commands."""
    for name, command in _COMMANDS.items():
        app.command(name)(command)
