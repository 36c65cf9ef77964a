"""The store itself fails: power loss, a lossy commit, a lagging replica, a jumping clock, a full disk. The core's own calls.

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
from semel.testing.chaos.disks import disk_full
from semel.testing.chaos.losses import failed_over, killed_after_commit, power_lost
from semel.testing.chaos.preloads import no_compiler

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
# By store and fault: what is set, in the words of the store itself. `expectations.LOSING` says which of them promise less.
_SETTINGS: Final = {
    ("sqlite", "power-loss"): ("acked.full", "acked.normal", "acked.off"),
    ("redis", "power-loss"): ("acked.always", "acked.everysec"),
    ("postgres", "power-loss"): ("acked.synchronous", "acked.asynchronous", "acked.unsynced"),
    ("mariadb", "power-loss"): ("acked.flush-1", "acked.flush-2", "acked.flush-0"),
    ("redis", "failover"): ("acked.lagging",),
    ("postgres", "store-kill"): ("acked.synchronous", "acked.asynchronous"),
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
    for fault in ("power-loss", "failover", "store-kill"):
        for point in _SETTINGS.get((store, fault), ("acked",)):
            end = _LOST[mode] if point in expectations.LOSING else _KEPT
            reason = _why_no_loss(store, mode, fault, point)
            yield _cell(store, colour, mode, fault, point, end, reason)


def _why_no_loss(store: str, mode: str, fault: str, point: str) -> str:
    if store == "cluster":
        return "each node is a redis: power and replication are broken there, on one node"
    if point == "acked":
        return {
            "failover": "one server without a replica: there is nothing to fail over to",
            "store-kill": "what a server has acknowledged it has written: killed at run.returned, where more is at stake",
        }[fault]
    if point in {"acked.normal", "acked.off"} and mode != "tx":
        return "semel's own connections say synchronous=FULL; only a caller's transaction has the caller's setting"
    return no_compiler() if fault == "power-loss" else ""


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


register(
    Part(
        name="nemesis",
        cells=nemesis_cells,
        attempt=core.attempt,
        wanted=core.wanted,
        schedules={
            "power-loss": power_lost,
            "failover": failed_over,
            "store-kill": killed_after_commit,
            "clock-forward": forward,
            "clock-back": back,
            "disk-full": disk_full,
        },
    )
)
