"""A server's clock jumps: by two minutes, so that a live owner's lease is over; by minus an hour, so that a dead one's is not."""

from __future__ import annotations

from typing import Any, Final

from semel.testing.chaos.driver import PATIENCE, Stage
from semel.testing.chaos.harness import BACK, FORWARD
from semel.testing.chaos.places import coloured, with_tables
from semel.testing.chaos.preloads import ClockedFile, ClockedMaria, ClockedPostgres, ClockedRedis
from semel.testing.chaos.signals import Line

__all__ = ["back", "forward"]

_KINDS: Final[dict[str, Any]] = {
    "sqlite": ClockedFile,
    "redis": ClockedRedis,
    "postgres": ClockedPostgres,
    "mariadb": ClockedMaria,
}


def _clocked(stage: Stage) -> Any:
    kind = _KINDS[stage.cell.store]
    server = stage.places.hold(f"{stage.cell.store} clock", lambda: _Clocked(kind().open(), stage.cell.store))
    server.jump(0)
    stage.url = coloured(server.url, stage.cell.store, stage.cell.colour)
    if stage.cell.store == "sqlite":
        stage.settings = {"clock": str(server.server.clock.path)}
    return server


class _Clocked:
    def __init__(self, server: Any, store: str) -> None:
        self.server = server
        self.url = server.url if store == "sqlite" else with_tables(store, server)

    def jump(self, seconds: int) -> None:
        self.server.clock.jump(seconds)

    def close(self) -> None:
        self.server.close()


def forward(stage: Stage) -> None:
    """A live owner's lease is over at once for the server: an heir takes over, the owner goes on."""
    server = _clocked(stage)
    line = Line.of(str(stage.folder)).make()
    victim = stage.start("victim", **FORWARD.plan)  # its next heartbeat is far
    stage.bit = line.asked(victim.over(), timeout=PATIENCE)
    server.jump(120)
    stage.send("heir", **FORWARD.plan).wait()
    if stage.bit:
        line.reply()
    victim.wait()
    stage.send("judge", **FORWARD.plan).wait()
    server.jump(0)


def back(stage: Stage) -> None:
    """The owner dies and the clock goes back an hour: the key is busy until the clock has caught up, and then free."""
    server = _clocked(stage)
    line = Line.of(str(stage.folder)).make()
    victim = stage.start("victim", **BACK.plan)
    asked = line.asked(victim.over(), timeout=PATIENCE)
    victim.end()
    server.jump(-3600)
    stage.send("early", wait=1.5).wait()
    stage.bit = asked and [each.error for each in stage.ledger.answers() if each.by == "early"] == [
        "InProgress"
    ]
    server.jump(0)
    stage.send("heir", last=True).wait()
