"""Faults that a worker meets from inside, at a named point: it kills, stops, cancels or interrupts itself there."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from semel import points
from semel.testing.chaos.cells import Plan
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.signals import Line

__all__ = ["INSIDE", "SILENT_DEATHS", "arm", "disarm"]

SILENT_DEATHS = ("kill", "zombie")
INSIDE = (*SILENT_DEATHS, "cancel", "interrupt")
_target: asyncio.Task[object] | None = None


def arm(plan: Plan, ledger: Ledger, *, task: asyncio.Task[object] | None = None) -> None:
    """From now on the cell's fault waits at its point: `run.returned`, or `step.stored#2` for the second time."""
    name, _, number = plan.cell.point.partition("#")
    left = int(number or 1)
    strike = _striker(plan, ledger, task)

    def listener(reached: str) -> None:
        nonlocal left
        if reached == name:
            left -= 1
            if left == 0:
                strike()

    points.listen(listener)


def disarm() -> None:
    points.listen(None)


def _striker(plan: Plan, ledger: Ledger, task: asyncio.Task[object] | None) -> Callable[[], None]:
    match plan.cell.fault:
        case "kill":
            return lambda: (ledger.struck(plan.role), signal.raise_signal(signal.SIGKILL))[1]
        case "zombie":
            return lambda: (ledger.struck(plan.role), signal.raise_signal(signal.SIGSTOP))[1]
        case "cancel":
            return lambda: _cancel(plan, ledger, task)
        case "interrupt":
            return lambda: _interrupt(plan, ledger)
    # Everything else is done from outside, by the driver, while the worker waits.
    return lambda: _from_outside(plan, ledger)


def _cancel(plan: Plan, ledger: Ledger, task: asyncio.Task[object] | None) -> None:
    ledger.struck(plan.role)
    assert task is not None, "a cancellation needs a task"
    task.cancel()


def _interrupt(plan: Plan, ledger: Ledger) -> None:
    ledger.struck(plan.role)
    raise KeyboardInterrupt


def _from_outside(plan: Plan, ledger: Ledger) -> None:
    ledger.struck(plan.role)
    Line.of(plan.folder).ask()
