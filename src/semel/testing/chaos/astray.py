"""A pipeline's connection is the caller's own: it may lead to another server than the store's, or be another one without a word.

`split`: a master was replaced, and one of the two has not heard of it. It is alive, knows what the new one knew at the time, and
takes writes that nobody will ever hear of. `redialled`: redis-py's health check found the connection broken between WATCH and EXEC,
while another owner was there, and made a new one, which watches nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from semel.testing import services
from semel.testing.chaos import core
from semel.testing.chaos.cells import Cell, Heir, Part, Verdict, register
from semel.testing.chaos.driver import Stage
from semel.testing.chaos.harness import SPLIT
from semel.testing.chaos.places import coloured
from semel.testing.chaos.replicas import until
from semel.testing.chaos.transactions import Transaction
from semel.testing.chaos.wires import Wire
from semel.testing.services.topology import QUICK

__all__ = ["astray_cells"]

_PIPELINE: Final = "pipeline"
"""A file of the schedule's folder: where the victim's pipeline leads, and what its client does by itself."""
_POINTS: Final = {
    "split": {
        "pipeline.behind": Heir.RAN,  # what the replaced master has applied counts for nothing
        "store.behind": Heir.REPLAYED,  # the new one has applied it, whatever the old one says of the record
        "store.overtaken": Heir.RAN,  # the same, and another owner was there
    },
    "redialled": {"settle.sent": Heir.RAN},
}
_ELSEWHERE: Final = {
    **dict.fromkeys(("sqlite", "postgres", "mariadb"), "an SQL transaction has one connection: its record is where its rows are"),
    "cluster": "each node is a redis, and a pipeline's transaction goes to one of them, which is asked alike: shown there; slots that "
    "move under a pipeline: tests/within/test_redis_moves.py",
    "memory": "it has no connection",
}  # fmt: skip


def astray_cells() -> Iterator[Cell]:
    for store in (*core.STORES, "memory"):
        for colour in core.COLOURS:
            for fault, points in _POINTS.items():
                if store in _ELSEWHERE:
                    yield _cell(store, colour, fault, "any", Heir.ANY, _ELSEWHERE[store])
                    continue
                for point, heir in points.items():
                    yield _cell(store, colour, fault, point, heir, "")


def _cell(store: str, colour: str, fault: str, point: str, heir: Heir, reason: str) -> Cell:
    return Cell(
        part="astray",
        store=store,
        colour=colour,
        mode="tx",
        fault=fault,
        point=point,
        expected=None if reason else Verdict.ONCE,
        heir=heir,
        reason=reason,
        lane="redis split" if fault == "split" and not reason else "",
    )


class _Astray(core.Worker):
    """A victim's pipeline does not go the way of its store."""

    async def open(self, once: Any, url: str = "", **options: Any) -> Transaction:
        if self.by == "victim":
            options |= json.loads((self.ledger.folder / _PIPELINE).read_bytes())
        return await super().open(once, **({"url": url} | options))


class _Split:
    """Two masters: the store's, and one that followed it until they were parted."""

    def __init__(self) -> None:
        # A replica that takes writes is what a master is that was replaced: it knows the same, and nobody follows it.
        self._stores = services.redis()
        self._others = services.redis(config={**QUICK, "replica-read-only": "no"})
        self.store, self.other = self._stores.url, self._others.url

    def join(self) -> None:
        self._others.command("REPLICAOF", self._stores.host, self._stores.port)
        until(lambda: self._others.info("replication").get("master_link_status") == "up")

    def part(self) -> None:
        """When the other one knows what the store's knows by now."""
        if not self._stores.command("WAIT", 1, 20_000):
            raise TimeoutError("the replica has not heard everything within 20 s")
        self._others.command("REPLICAOF", "NO", "ONE")

    def close(self) -> None:
        for server in (self._stores, self._others):
            server.close()


def _lead(stage: Stage, **client: Any) -> None:
    (stage.folder / _PIPELINE).write_text(json.dumps(client))


def _split(stage: Stage) -> None:
    """The store and the pipeline of one call lead to two masters from the moment on when its commands are queued; only one of them
    is what everybody else uses."""
    cell = stage.cell
    pair: _Split = stage.places.hold(cell.lane, _Split)
    pair.join()
    _lead(stage, url=pair.other)
    stage.url = coloured(pair.store, cell.store, cell.colour)
    stage.stand(cell=msgspec.structs.replace(cell, point="effect.made"), **SPLIT.plan)
    pair.part()
    if cell.point != "pipeline.behind":
        stage.url = coloured(pair.other, cell.store, cell.colour)
    if cell.point == "store.overtaken":
        stage.send("heir").wait()
    stage.reply()
    stage.finish()
    if cell.point == "store.overtaken":
        stage.send("judge").wait()
    else:
        stage.send("heir", last=True).wait()


def _redialled(stage: Stage) -> None:
    """The victim stops between WATCH and EXEC, its heir makes the effect, and the victim wakes on a connection that was reset."""
    address = stage.places.address(stage.cell)
    wire: Wire = stage.places.hold("wire to redis", lambda: Wire(address, speaks="redis"))
    url = stage.places.through(stage.cell, wire.ports[0])
    _lead(stage, url=url, retries=3, health_check_interval=0.001)
    victim = stage.start("victim", cell=msgspec.structs.replace(stage.cell, fault="zombie"))
    stopped = os.WIFSTOPPED(victim.wait(stopped=True))
    stage.send("heir").wait()
    stage.bit = wire.cut() and stopped
    if stopped:
        victim.wake()
        victim.wait()
    stage.send("judge").wait()


core.WORKERS["astray"] = _Astray
register(
    Part(
        name="astray",
        cells=astray_cells,
        attempt=core.attempt,
        wanted=core.wanted,
        helped=True,
        schedules={"split": _split, "redialled": _redialled},
    )
)
