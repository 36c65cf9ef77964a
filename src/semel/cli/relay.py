"""`semel relay`: carry messages from an outbox to their sinks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from semel.cli.durations import lasting
from semel.cli.messaging import Bodies, Place, Table, patience, see_to
from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.messaging import Relay
    from semel.messaging.events import RelayEvent
    from semel.messaging.tally import Report

__all__ = ["relay"]


def relay(
    url: Place,
    route: Annotated[
        list[str],
        typer.Option(help="TOPIC=SINK-URL, as often as needed; TOPIC may be a pattern, as orders.*"),
    ],
    table: Table = "semel",
    batch: Annotated[int, typer.Option(help="Rows in one publish.")] = 500,
    lease: Annotated[float, lasting("Time after which a silent relay's parts are taken over.")] = 10.0,
    sink_safety: Annotated[float, lasting("How long delivered batches are kept.")] = 0.0,
    topic: Annotated[list[str] | None, typer.Option(help="Only these topics.")] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="Only these tenants.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The relays' common name; needed with --topic and --tenant.")
    ] = None,
    max_attempts: Annotated[int, typer.Option(help="Rejections before a message parks its key.")] = 10,
    backoff: Annotated[
        tuple[float, float], typer.Option(help="First and longest delay between them, in seconds.")
    ] = (1.0, 300.0),
    fair: Annotated[bool, typer.Option(help="Tenants take turns.")] = True,
    listen: Annotated[
        str | None,
        typer.Option(help="Where NOTIFY is heard, if the outbox's URL leads through a pooler."),
    ] = None,
    claim_check: Bodies = None,
    drain: Annotated[
        bool,
        typer.Option("--drain", help="Send what is due, and leave: with 1 if something could not be sent."),
    ] = False,
    metrics: Annotated[
        str | None, typer.Option(help="HOST:PORT where /metrics and /health are served, as 0.0.0.0:9464.")
    ] = None,
) -> None:
    """Carry messages from an outbox to their sinks until it is ended (SIGINT, SIGTERM)."""
    from semel.messaging import Outbox, Relay

    routes = _routes(route)
    watch = None if metrics is None else _Watch(metrics, drain=drain)
    where = Outbox(url, table=table, claim_check=claim_check, timeout=patience(url))
    see_to(where.home, "The program that adds messages makes it")
    made = Relay(
        where,
        routes,
        batch=batch,
        lease=lease,
        sink_safety=sink_safety,
        max_attempts=max_attempts,
        backoff=backoff,
        fair=fair,
        listen=listen,
        topics=topic or (),
        tenants=tenant or (),
        name=name,
        hooks=(_tell,) if watch is None else (_tell, watch.hook),
    )
    asyncio.run(_carry(made, watch, drain=drain))
    where.close()


def _tell(event: RelayEvent) -> None:
    """Logged; what is a question to whoever typed the command is said as one."""
    from semel.messaging.events import Unserved, log_event

    if isinstance(event, Unserved):
        typer.echo(f"caution: {event.message}", err=True)
    else:
        log_event(event)


def _routes(given: list[str]) -> dict[str, list[str] | str]:
    found: dict[str, list[str]] = {}
    for one in given:
        pattern, mark, sink = one.partition("=")
        if not mark or not sink:
            raise ConfigurationError(f"--route is TOPIC=SINK-URL, not {one!r}")
        found.setdefault(pattern, []).append(sink)
    return {pattern: sinks if len(sinks) > 1 else sinks[0] for pattern, sinks in found.items()}


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
            typer.echo(f"metrics at http://{self.place[0]}:{server.port}/metrics")
            yield


async def _carry(made: Relay, watch: _Watch | None, *, drain: bool) -> None:
    async with made, nullcontext() if watch is None else watch.over(made):
        if drain:
            report = await made.drain()
            _report(report)
            if report.unavailable or report.unroutable or report.parked:
                raise typer.Exit(1)
            return
        classes = ", ".join(f"{t.pattern} → {t.sink.guarantee}" for t in made.router.targets)
        typer.echo(f"relay {made.id} ({classes})")
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
    typer.echo(said)
    for topic, count in sorted(report.pending.items()):
        typer.echo(f"  waiting: {topic} {count}")
    for topic in report.unroutable:
        typer.echo(f"  no route for topic {topic}")
    for name in report.unavailable:
        typer.echo(f"  sink away: {name}")
