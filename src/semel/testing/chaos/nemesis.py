"""The store itself fails: power loss, a lossy commit, a lagging replica, a jumping clock, a full disk. The core's own calls.

Each kind has a lane: one driver that owns the servers it breaks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Final

from semel.testing import services
from semel.testing.chaos import core, expectations
from semel.testing.chaos.cells import Cell, Heir, Part, Verdict, register
from semel.testing.chaos.driver import PATIENCE, Stage
from semel.testing.chaos.places import coloured, with_tables
from semel.testing.chaos.preloads import ClockedPostgres, ClockedRedis, ForgetfulRedis, no_compiler
from semel.testing.chaos.signals import Line
from semel.testing.services import home
from semel.testing.services.redis import RedisServer, redis_program
from semel.testing.services.topology import QUICK

__all__ = ["nemesis_cells"]

_LOST: Final = {
    "retry": (Verdict.DOUBLED, Heir.RAN),
    "hold": (Verdict.DOUBLED, Heir.RAN),
    "keyed": (Verdict.ONCE, Heir.RAN),
    "probe": (Verdict.DOUBLED, Heir.RAN),  # the record is gone with its policy: nobody asks the probe
    "steps": (Verdict.DOUBLED, Heir.RAN),
    "tx": (Verdict.LOST, Heir.ANY),
}
_KEPT: Final = (Verdict.ONCE, Heir.REPLAYED)
_OUTSIDE: Final = ("retry", "hold", "keyed", "probe")
_LOSSES: Final = {
    ("power-loss", "acked.always"): ("redis",),
    ("power-loss", "acked.everysec"): ("redis",),
    ("failover", "acked.lagging"): ("redis",),
    ("store-kill", "acked.synchronous"): ("postgres",),
    ("store-kill", "acked.asynchronous"): ("postgres",),
}


def nemesis_cells() -> Iterator[Cell]:
    for store in core.STORES:
        for colour in core.COLOURS:
            for mode in core.MODES:
                yield from _losses(store, colour, mode)
                yield from _clocks(store, colour, mode)
                yield from _disks(store, colour, mode)


def _cell(store: str, colour: str, mode: str, fault: str, point: str, end: Any, reason: str) -> Cell:
    verdict, heir = end
    lane = f"{store} clock" if fault.startswith("clock") else f"{store} {fault} {point}"
    if reason:
        verdict, heir, lane = None, Heir.ANY, ""
    return Cell(
        part="nemesis",
        store=store,
        colour=colour,
        mode=mode,
        fault=fault,
        point=point,
        expected=verdict,
        heir=heir,
        reason=reason,
        lane=lane,
    )


def _losses(store: str, colour: str, mode: str) -> Iterator[Cell]:
    for (fault, point), stores in _LOSSES.items():
        kept = point in {"acked.always", "acked.synchronous"}
        reason = "" if store in stores else _why_no_loss(store, fault)
        if not reason and fault == "power-loss":
            reason = no_compiler()
        yield _cell(store, colour, mode, fault, point, _KEPT if kept else _LOST[mode], reason)


def _why_no_loss(store: str, fault: str) -> str:
    if fault == "store-kill":
        return f"a setting of PostgreSQL (synchronous_commit): {store} is killed at run.returned"
    if fault == "power-loss" and store == "sqlite":
        return "not broken here: its log is written by the worker itself, which runs without the preload"
    if fault == "power-loss" and store in {"postgres", "mariadb"}:
        return "not broken here: its log keeps its size, so cutting what was not synced off the end shows nothing"
    if store == "cluster":
        return "each node is a redis: power and replication are broken there, on one node"
    return "one server without a replica: there is nothing to fail over to"


def _clocks(store: str, colour: str, mode: str) -> Iterator[Cell]:
    clocked = store in {"redis", "postgres"}
    reason = no_compiler() if clocked else _NO_CLOCK[store]
    if mode not in _OUTSIDE:
        reason = reason or _AS_RETRY[mode]
        yield _cell(store, colour, mode, "clock-forward", "run.returned", _KEPT, reason)
        yield _cell(store, colour, mode, "clock-back", "run.started", _KEPT, reason)
        return
    forward = expectations.zombie(mode, "run.returned")
    yield _cell(store, colour, mode, "clock-forward", "run.returned", forward, reason)
    backward = expectations.killed(mode, "run.started")
    yield _cell(store, colour, mode, "clock-back", "run.started", backward, reason)


_AS_RETRY: Final = {
    "steps": "steps live in a run's record: its lease and its room are those of mode retry",
    "tx": "an SQL transaction has no lease and fails as a whole (reset-before@commit.sent); the lease of a pipeline is that of retry",
}
_NO_CLOCK: Final = {
    "sqlite": "it has the clock of the worker that asks: not one that could jump alone",
    "mariadb": "it reads the kernel's clock without the C library: a preload does not reach it",
    "cluster": "each node is a redis: the clock is broken there",
}


def _disks(store: str, colour: str, mode: str) -> Iterator[Cell]:
    reason = {
        "postgres": "a cluster of its files does not fit into the small disk that this cell can fill",
        "mariadb": "a data folder does not fit into the small disk that this cell can fill",
        "cluster": "each node is a redis: its disk is filled there",
    }.get(store, "")
    if not reason and (os.geteuid() != 0 or shutil.which("mount") is None):
        reason = "a small disk (tmpfs) can be mounted by root only"
    if mode not in _OUTSIDE:
        yield _cell(store, colour, mode, "disk-full", "run.returned", _KEPT, reason or _AS_RETRY[mode])
        return
    yield _cell(
        store, colour, mode, "disk-full", "run.returned", expectations.killed(mode, "run.returned"), reason
    )


# --------------------------------------------------------------------------------------- losses after the ack


def _after(stage: Stage) -> None:
    """What the next caller finds after the store's misfortune; under tx only the rows count, when they must be gone."""
    if stage.cell.expected is Verdict.LOST:
        stage.start("look").wait()
    else:
        stage.start("heir", last=True).wait()


def _power_lost(stage: Stage) -> None:
    setting: Any = stage.cell.point.partition(".")[2]
    server: ForgetfulRedis = stage.places.hold(stage.cell.lane, lambda: ForgetfulRedis(setting).open())
    stage.url = server.url
    server.sync()
    if setting == "everysec":
        server.cut()  # the power goes before the next second is over
    stage.start("victim").wait()
    _struck(stage)
    gone = server.lose_power()
    stage.bit = gone > 0 if setting == "everysec" else gone >= 0
    _after(stage)


def _struck(stage: Stage) -> None:
    stage.ledger.struck("store")


def _failed_over(stage: Stage) -> None:
    """The replica's link is cut without a word; the primary acknowledges on; then the primary dies."""
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(RedisServer(program=redis_program(), config=QUICK).open())
        replica = stack.enter_context(RedisServer(program=redis_program(), config=QUICK).open())
        replica.command("REPLICAOF", primary.host, primary.port)
        _until_linked(replica)
        # Nothing arrives any more, not even what a paused replica's socket would still hold.
        replica.command("REPLICAOF", "127.0.0.1", 1)
        stage.url = primary.url
        stage.start("victim").wait()
        _struck(stage)
        primary.kill()
        replica.command("REPLICAOF", "NO", "ONE")
        stage.url = replica.url
        stage.bit = True
        _after(stage)


def _until_linked(replica: RedisServer) -> None:
    until = time.monotonic() + PATIENCE
    while replica.info("replication").get("master_link_status") != "up":
        if time.monotonic() > until:
            raise TimeoutError("the replica has not followed its primary")
        time.sleep(0.01)


def _killed_after_commit(stage: Stage) -> None:
    setting = "off" if stage.cell.point.endswith("asynchronous") else "on"
    server = stage.places.hold(stage.cell.lane, lambda: _Postgres(setting))
    stage.url = coloured(server.url, "postgres", stage.cell.colour)
    server.settle()
    stage.start("victim").wait()
    _struck(stage)
    server.kill()
    stage.bit = True
    _after(stage)


class _Postgres:
    """Commits wait for the log to be written, or not: then the last of them die with the server."""

    def __init__(self, synchronous_commit: str) -> None:
        # The log's writer sleeps for 10 s and the log has room: what is acknowledged stays in memory meanwhile.
        config: dict[str, str | int] = {
            "synchronous_commit": synchronous_commit,
            "wal_writer_delay": 10_000,
            "autovacuum": "off",
        }
        self.server = services.postgres(config=config)
        self.url = with_tables("postgres", self.server)

    def settle(self) -> None:
        """Write out what went before, so that only this schedule is at stake."""
        self.server.execute("CHECKPOINT")

    def kill(self) -> None:
        self.server.kill()
        self.server.start()

    def close(self) -> None:
        self.server.close()


# ------------------------------------------------------------------------------------------------------ clocks


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


def _forward(stage: Stage) -> None:
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


def _back(stage: Stage) -> None:
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


# -------------------------------------------------------------------------------------------------------- disks


class _SmallDisk:
    """Three megabytes of tmpfs, and a file that fills what is left of them."""

    def __init__(self) -> None:
        self.folder = home.new_folder("disk")
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m,mode=0777", "tmpfs", str(self.folder)], check=True
        )

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.folder / "ballast").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
        self.folder.rmdir()


class _RedisOnDisk(RedisServer):
    def __init__(self, disk: _SmallDisk) -> None:
        super().__init__(program=redis_program(), appendonly="always", config={"dir": str(disk.folder)})
        self.disk = disk

    def heal(self) -> None:
        self.disk.free()
        self.kill()
        self.start()

    def close(self) -> None:
        super().close()
        self.disk.close()


class _SqliteOnDisk:
    def __init__(self, disk: _SmallDisk) -> None:
        self.disk = disk
        self.url = f"sqlite:///{disk.folder}/semel.db"

    def heal(self) -> None:
        self.disk.free()

    def close(self) -> None:
        self.disk.close()


def _disk_full(stage: Stage) -> None:
    """The disk fills up between the effect and its record; the worker gives up (NotRecorded); room is made."""
    store = stage.cell.store
    server: Any = stage.places.hold(
        stage.cell.lane,
        lambda: _RedisOnDisk(_SmallDisk()).open() if store == "redis" else _SqliteOnDisk(_SmallDisk()),
    )
    stage.url = server.url
    line = Line.of(str(stage.folder)).make()
    victim = stage.start("victim", settings={"settle_timeout": 0.5, "timeout": 1.0}, padding=1 << 16)
    if line.asked(victim.pid, timeout=PATIENCE):
        server.disk.fill()
        line.reply()
    victim.wait()
    server.heal()
    told = [each.error for each in stage.ledger.answers() if each.by == "victim"]
    stage.bit = told == ["NotRecorded"]
    stage.start("heir", last=True).wait()


register(
    Part(
        name="nemesis",
        cells=nemesis_cells,
        attempt=core.attempt,
        wanted=core.wanted,
        schedules={
            "power-loss": _power_lost,
            "failover": _failed_over,
            "store-kill": _killed_after_commit,
            "clock-forward": _forward,
            "clock-back": _back,
            "disk-full": _disk_full,
        },
    )
)
