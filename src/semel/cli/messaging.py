"""`semel outbox …`, `semel inbox …`: look after messages that do not move."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import typer

from semel.cli.durations import lasting
from semel.cli.tables import counted, moment, say, show
from semel.errors import ConfigurationError

if TYPE_CHECKING:  # SQLAlchemy takes longer to import than most commands run: those that need it do it
    from semel.messaging import Inbox, Outbox
    from semel.messaging.pages import Line, Page, Waiting
    from semel.messaging.sink import Row

__all__ = ["inbox", "outbox", "patience", "see_to"]

T = TypeVar("T")
_PATIENCE: Final = (
    60.0  # seconds for an answer: a command that hangs tells nobody that its server has stopped
)
outbox = typer.Typer(no_args_is_help=True, help="Messages that wait to be sent.")
inbox = typer.Typer(no_args_is_help=True, help="Messages that were admitted, and dead letters.")

Url = Annotated[str, typer.Argument(help="The database, such as postgresql://host/db or sqlite:///app.db")]
Place = Annotated[str, typer.Argument(help="The outbox's database, or its Redis: redis://host/0")]
Table = Annotated[str, typer.Option(help="The table= that the program uses.")]
Team = Annotated[str, typer.Option("--name", help="The name= of the relays, if they have one.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Consumer = Annotated[str, typer.Option(help="The consumer= of the inbox.")]
Bodies = Annotated[
    str | None,
    typer.Option(
        "--claim-check", help="Where large bodies are, as the program has it: file:///…, s3://… or sql."
    ),
]
Retention = Annotated[float, lasting("The retention= of the inbox.")]
Ids = Annotated[list[str] | None, typer.Argument(help="Message ids; none: all.")]


# -------------------------------------------------------------------------------------------------- outbox
@outbox.command("stats")
def _stats(url: Place, table: Table = "semel", name: Team = "relay", as_json: AsJson = False) -> None:
    """How many messages wait, by topic, since when, who carries them, and what is parked."""
    found = _with_outbox(url, table, lambda o: _stats_of(o, name))
    if as_json:
        typer.echo(json.dumps(found))
        return
    waiting = sum(found["pending"].values())
    typer.echo(f"waiting {waiting}, oldest {found['oldest']:.1f} s, relays {len(found['relays'])}")
    for topic, count in sorted(found["pending"].items()):
        typer.echo(f"  {topic}: {count}")
    typer.echo(f"parked keys {found['parked']}, backing off {found['backing_off']}")
    for caution in found["cautions"]:
        typer.echo(f"caution: {caution}")


async def _stats_of(where: Outbox, team: str) -> dict[str, Any]:
    found = await where.home.ledger(team).run(_stats_on)
    return {**found, "cautions": await where.cautions() + await _beside(where)}


def _stats_on(page: Page) -> dict[str, Any]:
    lines = page.lines()
    return {
        "pending": page.pending(),
        "oldest": page.oldest(),
        "relays": sorted(page.alive()),
        "parked": sum(line.until is None for line in lines),
        "backing_off": sum(line.until is not None for line in lines),
    }


@outbox.command("ls")
def _ls(
    url: Place,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    key: Annotated[str | None, typer.Option(help="Only this key.")] = None,
    message: Annotated[str | None, typer.Option(help="Only this message id: does it wait?")] = None,
    limit: Annotated[int, typer.Option(help="How many, oldest first.")] = 50,
    table: Table = "semel",
    as_json: AsJson = False,
) -> None:
    """Messages that wait, oldest first."""

    async def look(where: Outbox) -> tuple[list[Waiting], list[str]]:
        found = await where.waiting(topic=topic, tenant=tenant, key=key, id=message, limit=limit)
        return found, [] if found else await _beside(where)

    found, cautions = _with_outbox(url, table, look)
    rows = [
        (
            each.tenant,
            each.key,
            each.topic,
            each.id,
            moment(each.created),
            None if each.due is None else _later(each.due),
            each.size,
        )
        for each in found
    ]
    names = ("tenant", "key", "topic", "message", "added", "due", "bytes")
    _show(names, rows, as_json=as_json, empty="nothing waits")
    for caution in cautions:
        typer.echo(f"caution: {caution}", err=True)


async def _beside(where: Outbox) -> list[str]:
    """Where messages wait that nobody carries, if none are here: is it the right --table?"""
    from semel.messaging.beside import unserved

    return [found.message for found in await unserved(where)]


@outbox.command("parked")
def _parked(url: Place, table: Table = "semel", name: Team = "relay", as_json: AsJson = False) -> None:
    """Keys that are held back: parked for good, or until their next attempt."""

    async def look(where: Outbox) -> list[Line]:
        return await where.home.ledger(name).read(lambda page: page.lines())

    lines = _with_outbox(url, table, look)
    rows = [
        (
            line.tenant,
            line.key,
            line.topic,
            line.id,
            line.attempts,
            None if line.until is None else _later(line.until),
            line.reason,
        )
        for line in lines
    ]
    names = ("tenant", "key", "topic", "message", "attempts", "next", "reason")
    _show(names, rows, as_json=as_json, empty="nothing is held back")


@outbox.command("replay")
def _replay(
    url: Place,
    key: Annotated[str | None, typer.Option(help="Only this key.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    message: Annotated[str | None, typer.Option(help="Only the key whose first message has this id.")] = None,
    table: Table = "semel",
    name: Team = "relay",
) -> None:
    """Let parked keys flow again, from their first message, in order. Leaves with 1 if none is as it was asked for."""

    async def let(where: Outbox) -> int:
        return await where.home.ledger(name).run(
            lambda page: page.unpark(key=key, tenant=tenant, identity=message)
        )

    count = _with_outbox(url, table, let)
    typer.echo(counted(count, "key flows again", "keys flow again"))
    if not count and (key or tenant or message):
        raise typer.Exit(1)


@outbox.command("delete")
def _give_up(
    url: Place,
    messages: Annotated[list[str], typer.Argument(help="Ids of messages that park a key.")],
    table: Table = "semel",
    name: Team = "relay",
) -> None:
    """Give parked messages up for good, undelivered; what follows them flows on. Each is printed, so that it is not lost."""
    from semel.messaging.desk import give_up

    done = _with_outbox(url, table, lambda o: give_up(o.home.ledger(name), messages))
    for row in done.rows:
        typer.echo(json.dumps(_as_data(row)))
    for message, why in sorted(done.left.items()):
        typer.echo(f"{message} was left alone: {why}", err=True)
    if done.left:
        raise typer.Exit(1)


def _as_data(row: Row) -> dict[str, Any]:
    """Everything of a message, its body as text where it is text."""
    said = msgspec.structs.asdict(row)
    body = said.pop("body")
    try:
        return {**said, "body": body.decode()}
    except UnicodeDecodeError:
        return {**said, "body_base64": base64.b64encode(body).decode()}


@outbox.command("sweep")
def _sweep(
    url: Url,
    claim_check: Bodies = None,
    grace: Annotated[float, lasting("Leave bodies alone that are younger.")] = 3600.0,
    table: Table = "semel",
) -> None:
    """Remove large bodies that are over, and those that no message refers to. A relay with --claim-check does it too."""
    if claim_check is None:
        raise ConfigurationError(
            "--claim-check says where the bodies are: file:///folder, s3://bucket/prefix or sql"
        )
    from semel.messaging import Outbox

    with Outbox(url, table=table, create=False, claim_check=claim_check, timeout=patience(url)) as where:
        see_to(where.home)
        count = asyncio.run(where.sweep(grace=grace))
    typer.echo(counted(count, "body removed", "bodies removed"))


# --------------------------------------------------------------------------------------------------- inbox
@inbox.command("dead")
def _dead(url: Url, consumer: Consumer, table: Table = "semel", as_json: AsJson = False) -> None:
    """Messages that their handler could not do."""
    letters = _with_inbox(url, table, consumer, lambda i: i.dead_letters())
    rows = [
        (
            letter.message.tenant,
            letter.message.topic,
            letter.id,
            letter.attempts,
            moment(letter.at),
            letter.reason,
        )
        for letter in letters
    ]
    names = ("tenant", "topic", "message", "attempts", "since", "reason")
    _show(names, rows, as_json=as_json, empty="no dead letters")


@inbox.command("replay")
def _revive(url: Url, consumer: Consumer, ids: Ids = None, table: Table = "semel") -> None:
    """Try dead letters again; a running consumer does it. Leaves with 1 if none has one of the ids."""
    count = _with_inbox(url, table, consumer, lambda i: i.replay(ids or None))
    typer.echo(counted(count, "letter is tried again", "letters are tried again"))
    if ids and not count:
        raise typer.Exit(1)


@inbox.command("delete")
def _delete(
    url: Url,
    consumer: Consumer,
    ids: Annotated[list[str], typer.Argument(help="Message ids.")],
    table: Table = "semel",
) -> None:
    """Give dead letters up for good. Leaves with 1 if none has one of the ids."""
    count = _with_inbox(url, table, consumer, lambda i: i.delete(ids))
    typer.echo(counted(count, "letter deleted", "letters deleted"))
    if not count:
        raise typer.Exit(1)


@inbox.command("purge")
def _purge(url: Url, consumer: Consumer, retention: Retention, table: Table = "semel") -> None:
    """Forget admissions that are older than the retention. A running consumer does it by itself; a program that calls
    process() in its own transactions does it by this, or by inbox.purge()."""
    from semel.messaging import Inbox, Windows

    windows = Windows(retries=0, redelivery=0)  # whoever gives the retention has thought of them
    with Inbox(
        url,
        table=table,
        consumer=consumer,
        create=False,
        retention=retention,
        windows=windows,
        timeout=_PATIENCE,
    ) as where:
        see_to(where.home)
        total = count = asyncio.run(where.purge())
        while count:
            total += (count := asyncio.run(where.purge()))
    typer.echo(counted(total, "admission forgotten", "admissions forgotten"))


@inbox.command("log")
def _log(
    url: Url,
    consumer: Consumer,
    message: Annotated[str | None, typer.Option(help="Only this message id.")] = None,
    business_key: Annotated[str | None, typer.Option(help="Only this business key.")] = None,
    limit: Annotated[int, typer.Option(help="How many, newest first.")] = 50,
    table: Table = "semel",
    as_json: AsJson = False,
) -> None:
    """What was admitted when, with its result: was this message handled?"""
    lines = _with_inbox(
        url, table, consumer, lambda i: i.log(message=message, business_key=business_key, limit=limit)
    )
    rows = [
        (line.tenant, line.topic, line.message, moment(line.at), line.business_key, line.result)
        for line in lines
    ]
    names = ("tenant", "topic", "message", "at", "business_key", "result")
    _show(names, rows, as_json=as_json, empty="nothing was admitted")


# --------------------------------------------------------------------------------------------------- words
def patience(url: str) -> float | None:
    """How long an answer is waited for; an outbox in Redis has its own bound."""
    from semel.messaging.redis import is_redis

    return None if is_redis(url) else _PATIENCE


def see_to(home: object, made: str = "The program that uses it makes it") -> None:
    """A SQLite file that is not there is a mistyped name: made, it would be empty for ever, whatever --table is."""
    from semel.messaging.database import Database
    from semel.messaging.engines import sync_engine_of
    from semel.messaging.files import missing_file

    if isinstance(home, Database) and (name := missing_file(sync_engine_of(home.any_engine))):
        raise ConfigurationError(f"there is no file {name!r}: correct the URL. {made}")


def _with_outbox(url: str, table: str, work: Callable[[Outbox], Coroutine[Any, Any, T]]) -> T:
    from semel.messaging import Outbox

    with Outbox(url, table=table, create=False, timeout=patience(url)) as where:
        see_to(where.home)
        return asyncio.run(work(where))


def _with_inbox(url: str, table: str, consumer: str, work: Callable[[Inbox], Coroutine[Any, Any, T]]) -> T:
    from semel.messaging import Inbox

    with Inbox(url, table=table, consumer=consumer, create=False, timeout=_PATIENCE) as where:
        see_to(where.home)
        return asyncio.run(work(where))


def _later(at: float) -> str | None:
    """When it is due; None: now."""
    return moment(at) if at > time.time() else None


def _show(names: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool, empty: str) -> None:
    if as_json:
        say([dict(zip(names, row, strict=True)) for row in rows])
        return
    shown = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    show(names, shown, empty=empty, whole="message")
