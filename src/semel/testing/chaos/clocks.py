"""A server's clock jumps: by two minutes, so that a live owner's lease is over; by minus an hour, so that a dead one's is not."""

from __future__ import annotations

from typing import Any

from semel.testing.chaos.driver import PATIENCE, Stage
from semel.testing.chaos.places import coloured, with_tables
from semel.testing.chaos.preloads import ClockedPostgres, ClockedRedis
from semel.testing.chaos.signals import Line

__all__ = ["back", "forward"]


def _clocked(stage: Stage) -> Any:
    kind: Any = ClockedRedis if stage.cell.store == "redis" else ClockedPostgres
    server = stage.places.hold(f"{stage.cell.store} clock", lambda: _Clocked(kind().open(), stage.cell.store))
    server.jump(0)
    stage.url = coloured(server.url, stage.cell.store, stage.cell.colour)
    return server


class _Clocked:
    def __init__(self, server: Any, store: str) -> None:
        self.server = server
        self.url = with_tables(store, server)

    def jump(self, seconds: int) -> None:
        self.server.clock.jump(seconds)

    def close(self) -> None:
        self.server.close()


def forward(stage: Stage) -> None:
    """A live owner's lease is over at once for the server: an heir takes over, the owner goes on."""
    server = _clocked(stage)
    line = Line.of(str(stage.folder)).make()
    victim = stage.start("victim", lease=60.0)  # its next heartbeat is far
    stage.bit = line.asked(victim.pid, timeout=PATIENCE)
    server.jump(120)
    stage.start("heir", lease=60.0).wait()
    if stage.bit:
        line.reply()
    victim.wait()
    stage.start("judge", lease=60.0).wait()
    server.jump(0)


def back(stage: Stage) -> None:
    """The owner dies and the clock goes back an hour: the key is busy until the clock has caught up, and then free."""
    server = _clocked(stage)
    line = Line.of(str(stage.folder)).make()
    victim = stage.start("victim", lease=0.5)
    asked = line.asked(victim.pid, timeout=PATIENCE)
    victim.end()
    server.jump(-3600)
    stage.start("early", wait=1.5).wait()
    stage.bit = asked and [each.error for each in stage.ledger.answers() if each.by == "early"] == [
        "InProgress"
    ]
    server.jump(0)
    stage.start("heir", last=True).wait()
