"""Faults that a worker meets from inside, at a named point: it kills, stops, cancels or interrupts itself there."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

from semel import points
from semel.testing.chaos.cells import Plan
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.signals import Line

__all__ = ["INSIDE", "arm", "disarm", "woken"]

woken = threading.Event()
"""Set in a zombie that goes on."""

INSIDE = ("kill", "zombie", "overlap", "overruled", "cancel", "interrupt")
"""Faults that a worker does to itself."""


def arm(plan: Plan, ledger: Ledger, *, task: asyncio.Task[object] | None = None) -> None:
    """From now on the cell's fault waits at its point: `run.returned`, or `step.stored#2` for the second time."""
    name, _, number = plan.cell.point.partition("#")
    left = int(number or 1)
    strike = _striker(plan, ledger, task)
    woken.clear()  # a process may be the victim of many schedules
    ready = name != "renew.sent"  # a heartbeat that comes before the effect is let pass

    def listener(reached: str) -> None:
        nonlocal left, ready
        if woken.is_set() and reached == "step.stored":
            ledger.note(plan.role)
        ready = ready or reached == "effect.made"
        if reached == name and ready:
            left -= 1
            if left == 0:
                strike()

    points.listen(listener)


def disarm() -> None:
    points.listen(None)


def _striker(plan: Plan, ledger: Ledger, task: asyncio.Task[object] | None) -> Callable[[], None]:
    def strike() -> None:
        ledger.struck(plan.role)
        match plan.cell.fault:
            case "kill":
                signal.raise_signal(signal.SIGKILL)
            case "zombie" | "overlap" | "overruled":
                signal.raise_signal(signal.SIGSTOP)
                ledger.woke(plan.role)
                woken.set()
            case "cancel":
                assert task is not None, "a cancellation needs a task"
                task.cancel()
            case "interrupt":
                raise KeyboardInterrupt
            case "slow":
                pass  # it lives: what it meets is the time
            case _:
                # Everything else is done from outside, by the driver, while the worker waits.
                Line.of(plan.folder).ask()

    return strike
