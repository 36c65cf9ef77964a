"""`semel relay`, `semel outbox …`, `semel inbox …`: carry messages, and look after those that do not move."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table as Grid

from semel.errors import ConfigurationError
from semel.messaging import Inbox, Outbox, Relay
from semel.messaging.carrier import Report
from semel.messaging.events import log_event
from semel.messaging.pages import Line, Page

__all__ = ["inbox", "outbox", "relay"]

T = TypeVar("T")
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
Ids = Annotated[list[str] | None, typer.Argument(help="Message ids; none: all.")]
_out = Console()


def relay(
    url: Place,
    route: Annotated[
        list[str],
        typer.Option(help="TOPIC=SINK-URL, as often as needed; TOPIC may be a pattern, as orders.*"),
    ],
    table: Table = "semel",
    batch: Annotated[int, typer.Option(help="Rows in one publish.")] = 500,
    lease: Annotated[
        float, typer.Option(help="Seconds after which a silent relay's parts are taken over.")
    ] = 10.0,
    sink_safety: Annotated[float, typer.Option(help="Seconds that delivered batches are kept.")] = 0.0,
    topic: Annotated[list[str] | None, typer.Option(help="Only these topics.")] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="Only these tenants.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The relays' common name; needed with --topic and --tenant.")
    ] = None,
    claim_check: Bodies = None,
    drain: Annotated[bool, typer.Option("--drain", help="Send what is due, and leave.")] = False,
    metrics: Annotated[
        str | None, typer.Option(help="HOST:PORT where /metrics and /health are served, as 0.0.0.0:9464.")
    ] = None,
) -> None:
    """Carry messages from an outbox to their sinks until it is ended (SIGINT, SIGTERM)."""
    routes: dict[str, list[str]] = {}
    for one in route:
        pattern, mark, sink = one.partition("=")
        if not mark or not sink:
            raise ConfigurationError(f"--route is TOPIC=SINK-URL, not {one!r}")
        routes.setdefault(pattern, []).append(sink)
    watch = None if metrics is None else _Watch(metrics, drain=drain)
    where = Outbox(url, table=table, claim_check=claim_check)
    made = Relay(
        where,
        {pattern: sinks if len(sinks) > 1 else sinks[0] for pattern, sinks in routes.items()},
        batch=batch,
        lease=lease,
        sink_safety=sink_safety,
        topics=topic or (),
        tenants=tenant or (),
        name=name,
        hooks=(log_event,) if watch is None else (log_event, watch.hook),
    )
    asyncio.run(_carry(made, watch, drain=drain))
    where.close()


class _Watch:
    """Where figures are served, and what counts them."""

    def __init__(self, given: str, *, drain: bool) -> None:
        if drain:
            raise ConfigurationError(
                "--metrics with --drain: it would end before anybody could look; give one of them"
            )
        from semel.telemetry.prometheus import PrometheusHook
        from semel.telemetry.server import address

        self.place = address(given)
        self.hook = PrometheusHook()

    @asynccontextmanager
    async def over(self, made: Relay) -> AsyncIterator[None]:
        from semel.telemetry.relays import exposed

        async with exposed(made, self.hook, *self.place) as server:
            _out.print(f"metrics at http://{self.place[0]}:{server.port}/metrics", highlight=False)
            yield


async def _carry(made: Relay, watch: _Watch | None, *, drain: bool) -> None:
    async with made, nullcontext() if watch is None else watch.over(made):
        if drain:
            _report(await made.drain())
            return
        classes = ", ".join(f"{t.pattern} → {t.sink.guarantee}" for t in made.router.targets)
        _out.print(f"relay {made.id} ({classes})", highlight=False)
        task = asyncio.create_task(made.run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        _report(made.report)


def _report(report: Report) -> None:
    said = f"sent {report.sent}, duplicates left out {report.duplicates}, parked keys {report.parked}"
    if report.resent:
        said += f", sent again to a sink that lost them {report.resent}"
    _out.print(said, highlight=False)
    for topic, count in sorted(report.pending.items()):
        _out.print(f"  waiting: {topic} {count}", highlight=False)
    for topic in report.unroutable:
        _out.print(f"  no route for topic {topic}", highlight=False)
    for name in report.unavailable:
        _out.print(f"  sink away: {name}", highlight=False)


# -------------------------------------------------------------------------------------------------- outbox
@outbox.command("stats")
def _stats(url: Place, table: Table = "semel", name: Team = "relay", as_json: AsJson = False) -> None:
    """How many messages wait, by topic, since when, who carries them, and what is parked."""
    found = _with_outbox(url, table, lambda o: _stats_of(o, name))
    if as_json:
        typer.echo(json.dumps(found))
        return
    waiting = sum(found["pending"].values())
    _out.print(
        f"waiting {waiting}, oldest {found['oldest']:.1f} s, relays {len(found['relays'])}", highlight=False
    )
    for topic, count in sorted(found["pending"].items()):
        _out.print(f"  {topic}: {count}", highlight=False)
    _out.print(f"parked keys {found['parked']}, backing off {found['backing_off']}", highlight=False)
    for caution in found["cautions"]:
        _out.print(f"caution: {caution}", highlight=False, soft_wrap=True)


async def _stats_of(where: Outbox, team: str) -> dict[str, Any]:
    found = await where.home.ledger(team).run(_stats_on)
    return {**found, "cautions": await where.cautions()}


def _stats_on(page: Page) -> dict[str, Any]:
    lines = page.lines()
    return {
        "pending": page.pending(),
        "oldest": page.oldest(),
        "relays": sorted(page.alive()),
        "parked": sum(line.until is None for line in lines),
        "backing_off": sum(line.until is not None for line in lines),
    }


@outbox.command("parked")
def _parked(url: Place, table: Table = "semel", name: Team = "relay", as_json: AsJson = False) -> None:
    """Keys that are held back: parked for good, or until their next attempt."""

    async def look(where: Outbox) -> list[Line]:
        return await where.home.ledger(name).read(lambda page: page.lines())

    lines = _with_outbox(url, table, look)
    rows = [
        (
            line.tenant,
            line.key or "–",
            line.topic,
            line.id,
            str(line.attempts),
            _when(line.until),
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
    """Let parked keys flow again, from their first message, in order."""

    async def let(where: Outbox) -> int:
        return await where.home.ledger(name).run(
            lambda page: page.unpark(key=key, tenant=tenant, identity=message)
        )

    _out.print(f"{_with_outbox(url, table, let)} keys flow again", highlight=False)


@outbox.command("sweep")
def _sweep(
    url: Url,
    claim_check: Bodies = None,
    grace: Annotated[float, typer.Option(help="Leave bodies alone that are younger, in seconds.")] = 3600.0,
    table: Table = "semel",
) -> None:
    """Remove large bodies that are over, and those that no message refers to. A relay with --claim-check does it too."""
    if claim_check is None:
        raise ConfigurationError(
            "--claim-check says where the bodies are: file:///folder, s3://bucket/prefix or sql"
        )
    with Outbox(url, table=table, create=False, claim_check=claim_check) as where:
        count = asyncio.run(where.sweep(grace=grace))
    _out.print(f"{count} bodies removed", highlight=False)


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
            str(letter.attempts),
            _when(letter.at),
            letter.reason,
        )
        for letter in letters
    ]
    names = ("tenant", "topic", "message", "attempts", "since", "reason")
    _show(names, rows, as_json=as_json, empty="no dead letters")


@inbox.command("replay")
def _revive(url: Url, consumer: Consumer, ids: Ids = None, table: Table = "semel") -> None:
    """Try dead letters again; a running consumer does it."""
    count = _with_inbox(url, table, consumer, lambda i: i.replay(ids or None))
    _out.print(f"{count} letters are tried again", highlight=False)


@inbox.command("delete")
def _delete(
    url: Url,
    consumer: Consumer,
    ids: Annotated[list[str], typer.Argument(help="Message ids.")],
    table: Table = "semel",
) -> None:
    """Give dead letters up for good."""
    count = _with_inbox(url, table, consumer, lambda i: i.delete(ids))
    _out.print(f"{count} letters deleted", highlight=False)


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
        (line.tenant, line.topic, line.message, _when(line.at), line.business_key or "–", line.result or "–")
        for line in lines
    ]
    names = ("tenant", "topic", "message", "at", "business key", "result")
    _show(names, rows, as_json=as_json, empty="nothing was admitted")


# --------------------------------------------------------------------------------------------------- words
def _with_outbox(url: str, table: str, work: Callable[[Outbox], Coroutine[Any, Any, T]]) -> T:
    with Outbox(url, table=table, create=False) as where:
        return asyncio.run(work(where))


def _with_inbox(url: str, table: str, consumer: str, work: Callable[[Inbox], Coroutine[Any, Any, T]]) -> T:
    with Inbox(url, table=table, consumer=consumer, create=False) as where:
        return asyncio.run(work(where))


def _when(at: float | None) -> str:
    if at is None:
        return "parked"
    if at <= time.time() - 365 * 86_400:
        return "now"
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _show(names: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, as_json: bool, empty: str) -> None:
    if as_json:
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        return
    if not rows:
        _out.print(empty)
        return
    grid = Grid(*names, box=None, header_style="bold")
    for row in rows:
        grid.add_row(*row)
    _out.print(grid)
