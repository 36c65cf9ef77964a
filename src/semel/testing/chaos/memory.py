"""The memory store's rows: one process, so its victims, owners and heirs are threads, each with a face (and a loop) of its own.

What a process can meet and outlive is here: a thread that never goes on and whose heartbeat has stopped with it (to the
store, a death), one that goes on after its lease was taken over, a cancelled task, an interrupted thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from semel import AsyncSemel, Semel, points
from semel.runtime import run_sync
from semel.testing.chaos import core, expectations, traps
from semel.testing.chaos.cells import Cell, Part, Plan, register
from semel.testing.chaos.driver import Stage
from semel.testing.chaos.harness import PARKED
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.signals import GO
from semel.testing.chaos.transactions import wait

__all__ = ["memory_cells"]

_FAULTS: Final = ("thread-death", "zombie", "overlap", "overruled", "cancel", "interrupt")
_PATIENCE: Final = 20.0
_NEVER: Final = {
    "kill": "its records end with the process: nobody is left who could be told anything (thread-death is its kill)",
    **dict.fromkeys(core.WIRE_FAULTS, "memory has no network"),
    "store-kill": "memory has no server process",
    "slow": "its victims and heirs are one process with one heartbeat for all of them; its renewal is the contract suite's",
    "power-loss": "it promises nothing beyond the process: semel doctor refuses it where durable is required",
    "failover": "memory has no replica",
    "clock-forward": "it has the clock of the process that asks: not one that could jump alone",
    "clock-back": "it has the clock of the process that asks: not one that could jump alone",
    "disk-full": "memory has no disk; its capacity is reserved at the claim",
    "memory-full": "its capacity is reserved at the claim: one beyond it is refused (tests/unit/test_memory.py)",
    "eviction": "it drops nothing but what is over: tests/unit/test_memory.py",
}


def memory_cells() -> Iterator[Cell]:
    for colour in core.COLOURS:
        for mode in core.MODES:
            if mode == "tx":
                yield _cell(colour, mode, "any", "any", "memory joins no transaction")
                continue
            for fault in _FAULTS:
                for point in core.points_of(mode, fault):
                    yield _cell(colour, mode, fault, point, _reason(colour, mode, fault, point))
            for fault, reason in _NEVER.items():
                yield _cell(colour, mode, fault, "any", reason)


def _reason(colour: str, mode: str, fault: str, point: str) -> str:
    if point == "renew.sent":
        return (
            "a process has one heartbeat for all its threads: it dies with the process, not with one of them"
        )
    return expectations.not_applicable("memory", colour, mode, fault, point)


def _cell(colour: str, mode: str, fault: str, point: str, reason: str) -> Cell:
    cell = Cell(
        part="memory", store="memory", colour=colour, mode=mode, fault=fault, point=point, reason=reason
    )
    if reason:
        return cell
    # Memory's verbs never wait, so a cancellation strikes at the next place that does: in the function, or after all of it.
    struck = _NEXT_WAIT.get(point, point) if fault == "cancel" else point
    filled = expectations.filled(msgspec.structs.replace(cell, point=struck))
    return msgspec.structs.replace(filled, point=point)


_NEXT_WAIT: Final = {"claim.sent": "claim.won", "step.returned#2": "step.stored#2"}


# --------------------------------------------------------------------------------------------- one process


class _Actor(threading.Thread):
    """One caller, in a thread of its own; under async in a loop of its own."""

    def __init__(self, plan: Plan, **changes: Any) -> None:
        super().__init__(daemon=True)  # the dead ones never end
        self.plan = msgspec.structs.replace(plan, **changes)
        self.task: asyncio.Task[Any] | None = None

    def run(self) -> None:
        if self.plan.cell.colour == "sync":
            run_sync(self._call(Semel))
        else:
            asyncio.run(self._call(AsyncSemel))

    async def _call(self, face: Any) -> None:
        if self.plan.cell.colour == "async":
            self.task = asyncio.current_task()
        once = face(self.plan.url, tenant="chaos", lease=self.plan.lease)
        worker = core.Worker(self.plan)
        try:
            await worker.act(once)
        finally:
            await wait(once.close())

    def finish(self) -> None:
        self.join(_PATIENCE)
        if self.is_alive():
            raise TimeoutError(f"the {self.plan.role} did not end within {_PATIENCE:g} s")


class _Trap:
    """Strikes the victim's thread at the cell's point; while it is silent, so is its heartbeat."""

    def __init__(self, plan: Plan, ledger: Ledger, victim: _Actor) -> None:
        self._name, _, number = plan.cell.point.partition("#")
        self._left = int(number or 1)
        self._fault = plan.cell.fault
        self._ledger = ledger
        self._victim = victim
        self.struck = threading.Event()
        self.woken = threading.Event()

    def reached(self, name: str) -> None:
        silent = self.struck.is_set() and self._fault not in {"cancel", "interrupt"}
        if name == "renew.sent" and silent:
            self.woken.wait()
        elif name == self._name and threading.current_thread() is self._victim:
            self._left -= 1
            if self._left == 0:
                self._strike()

    def _strike(self) -> None:
        self._ledger.struck("victim")
        self.struck.set()
        if self._fault == "cancel":
            assert self._victim.task is not None
            self._victim.task.cancel()
        elif self._fault == "interrupt":
            raise KeyboardInterrupt
        else:
            self.woken.wait()
            self._ledger.woke("victim")
            traps.woken.set()


def _attempt(plan: Plan) -> None:
    ledger = Ledger(plan.folder)
    waited = plan.cell.point == "wait.parked"
    lease = PARKED.options["lease"] if waited else plan.lease
    owner = _Actor(plan, role="owner", lease=lease)
    if waited:
        owner.start()
        _until(lambda: bool(ledger.effects()))
    victim = _Actor(plan, role="victim", lease=lease)
    traps.woken.clear()  # a process may play many schedules
    trap = _Trap(plan, ledger, victim)
    points.listen(trap.reached)
    victim.start()
    _until(lambda: trap.struck.is_set() or not victim.is_alive())
    if plan.cell.fault in {"cancel", "interrupt"}:
        victim.finish()
    if waited:
        Path(plan.folder, "end").touch()
        owner.finish()
    heir = _Actor(
        plan, role="heir", lease=PARKED.options["lease"]
    )  # while the victim is silent no heartbeat is heard
    heir.start()
    if plan.cell.fault == "overlap":
        _until(lambda: any(each.by == "heir" for each in ledger.owners()) or not heir.is_alive())
    else:
        heir.finish()
    if plan.cell.fault == "overruled":
        _play(_Actor(plan, role="person"))
    if plan.cell.fault != "thread-death":
        trap.woken.set()
        victim.finish()
    Path(plan.folder, GO).touch()
    heir.finish()
    _play(_Actor(plan, role="judge"))
    points.listen(None)
    if plan.cell.fault == "thread-death":
        os._exit(0)  # a dead thread would hold up the end of the process


def _play(actor: _Actor) -> None:
    actor.start()
    actor.finish()


def _until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"the scene was not set within {_PATIENCE:g} s")
        time.sleep(0.002)


def _played(stage: Stage) -> None:
    """All of it in one process; one in which threads have died is of no more use."""
    (stage.start if stage.cell.fault == "thread-death" else stage.send)("all").wait()
    stage.bit = bool(stage.ledger.faults())


register(
    Part(
        name="memory",
        cells=memory_cells,
        attempt=_attempt,
        wanted=core.wanted,
        helped=True,
        schedules=dict.fromkeys(_FAULTS, _played),
    )
)
