"""The store forgets what it had acknowledged, or must not: power loss, a lossy commit, a lagging replica."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from semel.testing import services
from semel.testing.chaos.cells import Cell
from semel.testing.chaos.driver import PATIENCE, Stage
from semel.testing.chaos.expectations import LOSING
from semel.testing.chaos.harness import CUT_OFF, HELD
from semel.testing.chaos.places import coloured, sqlite_tables, with_tables
from semel.testing.chaos.power import Disk, Loss
from semel.testing.chaos.preloads import (
    Forgetful,
    ForgetfulFile,
    ForgetfulMaria,
    ForgetfulPostgres,
    ForgetfulRedis,
)
from semel.testing.chaos.replicas import Pair, pair_of

__all__ = ["failed_over", "killed_after_commit", "power_lost"]


def _after(stage: Stage) -> None:
    """What the next caller finds after the store's misfortune. Under tx the rows are counted before it calls, where they count."""
    if stage.cell.mode == "tx":
        stage.send("look").wait()
    stage.send("heir", last=True).wait()


def power_lost(stages: Sequence[Stage]) -> None:
    """The power goes out when the callers have their answers. Who wrote since is dead, and what was not synced is gone."""
    cell = stages[0].cell
    place: Forgetful = stages[0].places.hold(cell.lane, lambda: _forgetful(cell))
    weak = cell.point in LOSING
    if weak:
        # Where an answer waits for no sync, the one that comes by itself a moment later may come too late.
        place.settle()
        place.disk.cut()
    for stage in stages:
        stage.url = coloured(place.url, cell.store, stage.cell.colour)
        with _writing_to(place.disk):
            stage.stand()
    for stage in stages:
        assert stage.victim is not None
        stage.victim.end()
    syncs = place.disk.syncs()
    waited = [_waited(stage, syncs) for stage in stages]
    place.lose_power()
    for stage, synced in zip(stages, waited, strict=True):
        # The verdict alone would not tell: where it is strong, a later caller's sync keeps what an earlier one left to luck; where
        # it is weak, the cut loses what any setting would have kept. A sync that comes by itself may fall into one answer's time,
        # not into those of all.
        if weak and all(waited):
            stage.doubt = "every answer has waited for a sync: this setting is not weak"
        elif not weak and not synced:
            stage.doubt = "its answer has waited for no sync: another one's has kept it"
        _after(stage)


def _waited(stage: Stage, syncs: Sequence[float]) -> bool:
    """Whether a sync was asked for between the function and the answer of its caller: while its outcome was recorded."""
    since = [each.at for each in stage.ledger.owners() if each.by == "victim"]
    until = [each.at for each in stage.ledger.answers() if each.by == "victim" and not each.error]
    return any(since[-1] <= at <= until[-1] for at in syncs) if since and until else False


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


def failed_over(stages: Sequence[Stage]) -> None:
    """The primary dies and its replica takes its place.

    `acked.lagging`: it had not heard of the calls, and nobody waited for it. `acked.waited`: their answers waited until it
    had, which is seen: it stands still for a while, and nobody has one. `acked.timed-out`: they waited for a while only.
    `run.returned`: answers wait, and it is cut off when the effects are made: nobody may be told that they are recorded.
    """
    cell, key = stages[0].cell, stages[0].key
    pair = pair_of(cell.store, cell.point)
    try:
        if cell.point in LOSING:
            pair.cut(key)
        for stage in stages:
            stage.key = key if stage is stages[0] else pair.near(key, stage.key)
            stage.url = coloured(pair.url, cell.store, stage.cell.colour)
        if cell.point == "run.returned":
            _cut_off(stages, pair)
        elif cell.point == "acked.waited":
            _held_back(stages, pair)
        else:
            for stage in stages:
                stage.start("victim", settings=_waiting(cell)).wait()
                stage.bit = _answered(stage)
                _struck(stage)
        url = pair.fail_over(key)
        for stage in stages:
            stage.url = coloured(url, cell.store, stage.cell.colour)
            _after(stage)
    finally:
        pair.close()


def _waiting(cell: Cell) -> dict[str, Any]:
    """Of SQL servers it is the primary that waits."""
    return {"acks": 1} if cell.store in {"redis", "cluster"} and cell.point not in LOSING else {}


def _cut_off(stages: Sequence[Stage], pair: Pair) -> None:
    for stage in stages:
        plan = CUT_OFF.plan
        stage.stand(lease=plan["lease"], settings={**_waiting(stage.cell), **plan["settings"]})
    pair.cut(stages[0].key)
    for stage in stages:
        stage.reply()
    for stage in stages:
        # A caller's own commit has the caller's time limit, which is none: it waits for the replica until it is killed.
        stage.finish(within=1.0 if stage.cell.mode == "tx" else PATIENCE)


_HELD: Final = 0.5
"""Seconds within which an answer that waits for nobody is there."""


def _held_back(stages: Sequence[Stage], pair: Pair) -> None:
    """The replica stands still while the outcomes are recorded. A replica beside its primary has everything a moment later,
    whether anybody waits for it or not: the verdict alone would not tell."""
    for stage in stages:
        before = msgspec.structs.replace(stage.cell, point="run.returned")
        plan = HELD.plan
        stage.stand(cell=before, lease=plan["lease"], settings={**_waiting(stage.cell), **plan["settings"]})
    with pair.held(stages[0].key):
        for stage in stages:
            stage.reply()
        time.sleep(_HELD)
        early = [_answered(stage) for stage in stages]
        link = pair.link() if any(early) else ""
    for stage, was_early in zip(stages, early, strict=True):
        stage.finish()
        stage.bit = stage.bit and _answered(stage)
        if was_early:
            stage.doubt = (
                f"it had its answer while the replica stood still: nobody has waited for it ({link})"
            )


def _answered(stage: Stage) -> bool:
    return any(each.by == "victim" and not each.error for each in stage.ledger.answers())


def killed_after_commit(stages: Sequence[Stage]) -> None:
    cell = stages[0].cell
    setting = "off" if cell.point.endswith("asynchronous") else "on"
    server: _Postgres = stages[0].places.hold(cell.lane, lambda: _Postgres(setting))
    server.settle()
    for stage in stages:
        stage.url = coloured(server.url, cell.store, stage.cell.colour)
        stage.start("victim").wait()
        stage.bit = _answered(stage)
        _struck(stage)
    server.kill()
    for stage in stages:
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
