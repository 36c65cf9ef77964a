"""The store forgets what it had acknowledged, or must not: power loss, a lossy commit, a lagging replica."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, Final

from semel.testing import services
from semel.testing.chaos.cells import Cell, Verdict
from semel.testing.chaos.driver import PATIENCE, Stage
from semel.testing.chaos.expectations import LOSING
from semel.testing.chaos.places import coloured, sqlite_tables, with_tables
from semel.testing.chaos.power import Disk, Loss
from semel.testing.chaos.preloads import (
    Forgetful,
    ForgetfulFile,
    ForgetfulMaria,
    ForgetfulPostgres,
    ForgetfulRedis,
)
from semel.testing.chaos.signals import Line
from semel.testing.services.redis import RedisServer, redis_program
from semel.testing.services.topology import QUICK

__all__ = ["failed_over", "killed_after_commit", "power_lost"]


def _after(stage: Stage) -> None:
    """What the next caller finds after the store's misfortune; under tx only the rows count, when they must be gone."""
    if stage.cell.expected is Verdict.LOST:
        stage.start("look").wait()
    else:
        stage.start("heir", last=True).wait()


def power_lost(stage: Stage) -> None:
    """The power goes out at the moment when the caller has its answer. Who wrote since is dead, and what was not synced is gone."""
    place: Forgetful = stage.places.hold(stage.cell.lane, lambda: _forgetful(stage.cell))
    stage.url = coloured(place.url, stage.cell.store, stage.cell.colour)
    weak = stage.cell.point in LOSING
    if weak:
        # Where an answer waits for no sync, the one that comes by itself a moment later may come too late.
        place.settle()
        place.disk.cut()
    line = Line.of(str(stage.folder)).make()
    with _writing_to(place.disk):
        victim = stage.start("victim")
    asked = line.asked(victim.pid, timeout=PATIENCE)
    victim.end()
    loss = place.lose_power()
    stage.bit = asked and (weak or loss.syncs > 0)  # a weak setting's loss shows in what comes after
    _after(stage)


def _forgetful(cell: Cell) -> Forgetful:
    setting: Any = cell.point.partition(".")[2]
    match cell.store:
        case "redis":
            return ForgetfulRedis(setting).open()
        case "postgres":
            return _Tables(ForgetfulPostgres(_POSTGRES[setting]).open(), "postgres")
        case "mariadb":
            return _Tables(ForgetfulMaria(int(setting.removeprefix("flush-"))).open(), "mariadb")
    place = ForgetfulFile()
    sqlite_tables(place.file)
    return place


# Its log's writer comes by too late: the moment that this setting leaves open becomes a certain one.
_POSTGRES: Final[dict[str, dict[str, str | int]]] = {
    "synchronous": {},
    "asynchronous": {"synchronous_commit": "off", "wal_writer_delay": 10_000},
    "unsynced": {"fsync": "off"},
}


class _Tables:
    """A server and the one database in it that the workers use."""

    def __init__(self, server: Any, store: str) -> None:
        self.server = server
        self.disk: Disk = server.disk
        self.url = with_tables(store, server)

    def settle(self) -> None:
        self.server.settle()

    def lose_power(self) -> Loss:
        loss: Loss = self.server.lose_power()
        return loss

    def close(self) -> None:
        self.server.close()


@contextlib.contextmanager
def _writing_to(disk: Disk) -> Iterator[None]:
    """Workers that are forked meanwhile note what they write to this disk. A server has the same words from its start."""
    os.environ.update(disk.environment)
    try:
        yield
    finally:
        for name in disk.environment:
            del os.environ[name]


def _struck(stage: Stage) -> None:
    stage.ledger.struck("store")


def failed_over(stage: Stage) -> None:
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


def killed_after_commit(stage: Stage) -> None:
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
        # The log has room and its writer stands still: what is acknowledged without it stays in memory meanwhile.
        config: dict[str, str | int] = {
            "synchronous_commit": synchronous_commit,
            "wal_writer_delay": 10_000,
            "bgwriter_lru_maxpages": 0,
            "autovacuum": "off",
        }
        self.server = services.postgres(config=config)
        self.url = with_tables("postgres", self.server)

    def settle(self) -> None:
        """Write out what went before, so that only this schedule is at stake, and nothing more until the kill."""
        self.server.execute("CHECKPOINT")
        for (pid,) in self.server.execute(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
        ):
            os.kill(pid, signal.SIGSTOP)  # it wakes up every 10 s, which a slow schedule would meet

    def kill(self) -> None:
        self.server.kill()
        self.server.start()

    def close(self) -> None:
        self.server.close()
