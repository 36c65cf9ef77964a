"""What no event tells of a relay: how much waits, asked now and then, and whether the relay is well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from semel.errors import ConfigurationError, StoreUnavailable
from semel.telemetry.prometheus import PrometheusHook
from semel.telemetry.server import MetricsServer

try:
    from sqlalchemy.exc import DBAPIError

    from semel.messaging.relay import Relay
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        'a relay needs SQLAlchemy: pip install "semel[messaging,telemetry]" brings it'
    ) from missing

__all__ = ["exposed", "health", "survey"]


async def survey(relay: Relay, every: float = 10.0) -> None:
    """Until cancelled: look at what waits, and let the relay's hooks know."""
    while True:
        with suppress(StoreUnavailable, DBAPIError):  # the relay's heartbeat tells of it
            await relay.backlog()
        await asyncio.sleep(every)


def health(relay: Relay) -> dict[str, Any]:
    """`status` is ok, degraded (a sink is away: its messages wait), or failing (the database took no heartbeat for a lease).

    A relay that fails goes on trying: to start it anew helps only if it is stuck.
    """
    silence, paused = relay.silence, relay.paused
    failing = silence is None or silence > relay.lease
    return {
        "status": "failing" if failing else "degraded" if paused else "ok",
        "relay": relay.id,
        "parts": len(relay.parts),
        "paused": paused,
        "silence": None if silence is None else round(silence, 3),
        "sent": relay.report.sent,
    }


@asynccontextmanager
async def exposed(
    relay: Relay, hook: PrometheusHook, host: str, port: int, *, every: float = 10.0
) -> AsyncIterator[MetricsServer]:
    """`/metrics` and `/health` of a relay that runs inside, with a survey every so many seconds."""
    with MetricsServer(host, port, hook.registry, lambda: health(relay)) as server:
        looking = asyncio.create_task(survey(relay, every))
        try:
            yield server
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
