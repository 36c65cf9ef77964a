"""The store itself fails: power loss, a lossy commit, a lagging replica, a jumping clock, a full disk or memory. The core's own calls.

Each kind has a lane: one driver that owns the servers it breaks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any, Final

from semel.testing.chaos import core, expectations
from semel.testing.chaos.cells import Cell, Heir, Part, Verdict, register
from semel.testing.chaos.clocks import back, forward
from semel.testing.chaos.disks import disk_full, memory_full
from semel.testing.chaos.losses import failed_over, killed_after_commit, power_lost
from semel.testing.chaos.preloads import no_compiler

__all__ = ["nemesis_cells"]

_LOST: Final = {
    "retry": (Verdict.DOUBLED, Heir.RAN),
    "hold": (Verdict.DOUBLED, Heir.RAN),
    "keyed": (Verdict.ONCE, Heir.RAN),
    "probe": (Verdict.DOUBLED, Heir.RAN),  # the record is gone with its policy: nobody asks the probe
    "steps": (Verdict.DOUBLED, Heir.RAN),
    "tx": (Verdict.LOST, Heir.RAN),  # and is made again, once: the next caller calls
}
_KEPT: Final = (Verdict.ONCE, Heir.REPLAYED)
# By store and fault: what is set, in the words of the store itself. `expectations.LOSING` says which of them promise less.
_SETTINGS: Final = {
    ("sqlite", "power-loss"): ("acked.full", "acked.normal", "acked.off"),
    ("redis", "power-loss"): ("acked.always", "acked.everysec"),
    ("postgres", "power-loss"): ("acked.synchronous", "acked.asynchronous", "acked.unsynced"),
    ("mariadb", "power-loss"): ("acked.flush-1", "acked.flush-2", "acked.flush-0"),
    **dict.fromkeys(
        ((store, "failover") for store in ("redis", "cluster", "postgres", "mariadb")),
        ("acked.lagging", "acked.waited", "run.returned"),
    ),
    ("mariadb", "failover"): ("acked.lagging", "acked.timed-out", "acked.waited", "run.returned"),
    ("postgres", "store-kill"): ("acked.synchronous", "acked.asynchronous"),
}


_BATCHED: Final = {"power-loss", "failover", "store-kill", "memory-full"}
"""Faults whose servers take long to come back, or which all callers meet alike: once for all modes and colours."""


def nemesis_cells() -> Iterator[Cell]:
    for store in core.STORES:
        for colour in core.COLOURS:
            for mode in core.MODES:
                yield from _losses(store, colour, mode)
                yield from _clocks(store, colour, mode)
                yield from _disks(store, colour, mode)
                yield from _memories(store, colour, mode)


_LANES: Final = {"clock-forward": "{} clock", "clock-back": "{} clock", "memory-full": "{} memory"}


def _cell(store: str, colour: str, mode: str, fault: str, point: str, end: Any, reason: str) -> Cell:
    verdict, heir = end
    lane = _LANES.get(fault, f"{{}} {fault} {point}").format(store)
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
        batch=not reason and fault in _BATCHED,
    )


def _losses(store: str, colour: str, mode: str) -> Iterator[Cell]:
    for fault in ("power-loss", "failover", "store-kill"):
        for point in _SETTINGS.get((store, fault), ("acked",)):
            end = _LOST[mode] if point in expectations.LOSING else _KEPT
            if point == "run.returned":
                end = _late(
                    mode, "kill", point
                )  # its record says that it runs; nobody was told of a transaction
            reason = _why_no_loss(store, mode, fault, point)
            yield _cell(store, colour, mode, fault, point, end, reason)


_WRITTEN: Final = {
    **dict.fromkeys(
        ("redis", "cluster"),
        "a Redis with a log writes it before it answers: killed at run.returned, where more is at stake",
    ),
    "mariadb": "it writes its log before it answers, except with flush-0, whose loss power-loss shows: killed at run.returned",
}


def _why_no_loss(store: str, mode: str, fault: str, point: str) -> str:
    if store == "cluster" and fault == "power-loss":
        return "each node is a redis: its power is lost there, on one node"
    if point == "acked":
        if fault == "failover":
            return "one server without a replica: there is nothing to fail over to"
        if store == "sqlite":
            return "SQLite has no server process: its death is the worker's (kill)"
        return _WRITTEN[store]
    if point in {"acked.normal", "acked.off"} and mode != "tx":
        return "semel's own connections say synchronous=FULL; only a caller's transaction has the caller's setting"
    return no_compiler() if fault == "power-loss" else ""


def _clocks(store: str, colour: str, mode: str) -> Iterator[Cell]:
    reason = _CLUSTER_CLOCK if store == "cluster" else no_compiler()
    if mode == "tx" and store != "redis":
        reason = reason or "an SQL transaction has no lease: a clock changes nothing in it"
    yield _cell(
        store, colour, mode, "clock-forward", "run.returned", _late(mode, "zombie", "run.returned"), reason
    )
    yield _cell(store, colour, mode, "clock-back", "run.started", _late(mode, "kill", "run.started"), reason)


def _late(mode: str, fault: str, point: str) -> tuple[Verdict, Heir]:
    """As a zombie's end, or a dead one's, whatever has made it late."""
    match mode:
        case "tx":
            return Verdict.ONCE, Heir.RAN
        case "steps":
            return expectations.stepped(fault, point)
    return expectations.killed(mode, point) if fault == "kill" else expectations.zombie(mode, point)


_CLUSTER_CLOCK: Final = "each node is a redis: the clock is broken there"


def _disks(store: str, colour: str, mode: str) -> Iterator[Cell]:
    reason = "each node is a redis: its disk is filled there" if store == "cluster" else ""
    if not reason and (os.geteuid() != 0 or shutil.which("mount") is None):
        reason = "a small disk (tmpfs) can be mounted by root only"
    end = _late(mode, "kill", "run.returned")
    yield _cell(store, colour, mode, "disk-full", "run.returned", end, reason)


_NO_LIMIT: Final = {
    "cluster": "each node is a redis: its memory is filled there",
    "sqlite": "its memory is its worker's, which dies without (kill)",
    **dict.fromkeys(
        ("postgres", "mariadb"),
        "its memory is no limit for data: without, it refuses a statement, as with a full disk (disk-full), or dies (store-kill)",
    ),
}
_EVICTED: Final = {
    **dict.fromkeys(
        ("redis", "cluster"),
        "a server that may drop records is refused at its first use: tests/ops/test_store_redis_faults.py; who accepts it "
        "(?eviction=accept) has no promise: a record that was dropped is one that is over (late-retry)",
    ),
    **dict.fromkeys(("sqlite", "postgres", "mariadb"), "it drops nothing to make room"),
}


def _memories(store: str, colour: str, mode: str) -> Iterator[Cell]:
    yield _cell(store, colour, mode, "eviction", "any", _KEPT, _EVICTED[store])
    reason = _NO_LIMIT.get(store, "")
    end = _late(mode, "kill", "run.returned")
    yield _cell(store, colour, mode, "memory-full", "run.returned", end, reason)
    if mode != "retry":
        reason = reason or "a claim that is refused has run nothing, whatever the mode: as in mode retry"
    yield _cell(store, colour, mode, "memory-full", "claim.sent", (Verdict.ONCE, Heir.RAN), reason)


register(
    Part(
        name="nemesis",
        cells=nemesis_cells,
        attempt=core.attempt,
        wanted=core.wanted,
        helped=True,
        schedules={
            "power-loss": power_lost,
            "failover": failed_over,
            "store-kill": killed_after_commit,
            "clock-forward": forward,
            "clock-back": back,
            "disk-full": disk_full,
            "memory-full": memory_full,
        },
    )
)
