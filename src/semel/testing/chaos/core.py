"""The core's rows of the matrix: execute in every mode, steps, and transactions, on every store in both colours."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from semel import NOT_FOUND, AsyncSemel, Found, Semel, SemelError, StoreUnavailable, current_run, points
from semel.runtime import run_sync
from semel.testing.chaos import expectations, traps
from semel.testing.chaos.cells import Cell, Part, Plan, register
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.transactions import Transaction, open_transaction, wait

__all__ = ["COLOURS", "MODES", "POINTS", "STORES", "WIRE_FAULTS", "Worker", "attempt", "core_cells", "wanted"]

STORES = ("sqlite", "redis", "postgres", "mariadb", "cluster")
COLOURS = ("sync", "async")
MODES = ("retry", "hold", "keyed", "probe", "steps", "tx")
_RUN = ("claim.sent", "claim.won", "run.started")
_END = ("run.returned", "settle.sent", "settle.stored")
_STEPS = tuple(
    f"{point}#{number}" for number in (1, 2) for point in ("step.started", "step.returned", "step.stored")
)
POINTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("retry", "hold", "keyed", "probe"), (*_RUN, "effect.made", *_END, "renew.sent", "wait.parked")
    ),
    "steps": (*_RUN, *_STEPS, *_END),
    "tx": (*_RUN, "effect.made", *_END, "commit.sent", "commit.done", "wait.parked"),
}
WIRE_POINTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("retry", "hold", "keyed", "probe"), ("claim.sent", "settle.sent")),
    "steps": ("claim.sent", "step.returned#1", "settle.sent"),
    "tx": ("claim.sent", "settle.sent", "commit.sent"),
}
WIRE_FAULTS = ("reset-before", "reset-after", "stall")
STORE_POINTS = ("run.returned",)
# A caller's SQLite connection has the caller's setting.
_SYNCHRONOUS = {"acked.full": "FULL", "acked.normal": "NORMAL", "acked.off": "OFF"}


def core_cells() -> Iterator[Cell]:
    for store in STORES:
        for colour in COLOURS:
            for mode in MODES:
                yield from _cells(store, colour, mode)


def _cells(store: str, colour: str, mode: str) -> Iterator[Cell]:
    faults = [(fault, point) for fault in traps.INSIDE for point in POINTS[mode]]
    faults += [(fault, point) for fault in WIRE_FAULTS for point in WIRE_POINTS[mode]]
    faults += [("store-kill", point) for point in STORE_POINTS]
    for fault, point in faults:
        reason = expectations.not_applicable(store, colour, mode, fault, point)
        lane = f"{store}!" if fault == "store-kill" else ""
        cell = Cell(
            part="core",
            store=store,
            colour=colour,
            mode=mode,
            fault=fault,
            point=point,
            reason=reason,
            lane=lane,
        )
        yield cell if reason else expectations.filled(cell)


def wanted(cell: Cell) -> tuple[str, ...]:
    """The effects that each key of this cell must have."""
    return ("one", "two") if cell.mode == "steps" else ("effect",)


# ------------------------------------------------------------------------------------------------- one attempt


def attempt(plan: Plan) -> None:
    """In a forked worker: one caller, from the opening of its face to its end."""
    body = _attempt(plan)
    if plan.cell.colour == "sync":
        run_sync(body)
    else:
        asyncio.run(body)


async def _attempt(plan: Plan) -> None:
    worker = Worker(plan)
    face: Any = Semel if plan.cell.colour == "sync" else AsyncSemel
    once = face(plan.url, tenant="chaos", lease=plan.lease, **{"timeout": 10.0, **plan.settings})
    try:
        if plan.role == "victim":
            await worker.prepare(once)
            task = asyncio.current_task() if plan.cell.colour == "async" else None
            traps.arm(plan, worker.ledger, task=task)
        if plan.role not in ("judge", "look"):
            await worker.call(once)
        traps.disarm()
        if plan.role == "judge" or (plan.role == "heir" and plan.last):
            await worker.judge(once)
        if plan.cell.mode == "tx" and (plan.role in ("judge", "look") or plan.last):
            await worker.look(once)
    finally:
        traps.disarm()
        await wait(once.close())


class Worker:
    """One caller's work: the function under test, what it is told, and how it ends."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cell = plan.cell
        self.by = plan.role
        self.ledger = Ledger(plan.folder)
        self.transaction: Transaction | None = None

    async def prepare(self, once: Any) -> None:
        """Faults on the wire count from an open, used connection."""
        work = _nothing if self.cell.colour == "sync" else _nothing_async
        until = time.monotonic() + 20
        while self.cell.fault in WIRE_FAULTS or self.cell.fault == "store-kill":
            try:
                await wait(once.execute(f"{self.plan.key}-warm", work))
                return
            except StoreUnavailable:  # a busy machine may need longer for the first connection
                if time.monotonic() > until:
                    raise

    async def call(self, once: Any, *, patience: float | None = None) -> None:
        try:
            outcome = await (self._within(once) if self.cell.mode == "tx" else self._execute(once, patience))
            self.ledger.answer(self.by, outcome.value, replayed=outcome.replayed)
            if self.cell.fault == "power-loss":
                points.reach(self.cell.point)
            if self.cell.fault == "cancel":
                await asyncio.sleep(
                    0
                )  # one that came too late for the call strikes here, not at the closing of the face
        except SemelError as error:
            self.ledger.error(self.by, type(error).__name__, str(error))
        except (asyncio.CancelledError, KeyboardInterrupt) as error:
            if isinstance(error, asyncio.CancelledError):
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
            self.ledger.error(self.by, type(error).__name__)
        except Exception as error:  # noqa: BLE001 - whatever it is, the ledger has it
            # Under `tx` a broken connection is the caller's own error; elsewhere none is expected.
            text = "".join(traceback.format_exception(error))
            self.ledger.error(self.by, type(error).__name__ if self.cell.mode == "tx" else "Unexpected", text)

    async def judge(self, once: Any) -> None:
        """The same call once more, when all is over: it must find the end and run nothing."""
        self.by = "judge"
        await self.call(once, patience=1.0)

    async def look(self, once: Any) -> None:
        """Mode tx: what is committed goes into the ledger, as it is in the end."""
        opened = await open_transaction(self.plan.url, self.cell.colour, self._tag(once))
        for row in await opened.rows(self.plan.key):
            self.ledger.effect(row.what, row.by)
        await opened.close()

    async def _execute(self, once: Any, patience: float | None) -> Any:
        mode = self.cell.mode
        options: dict[str, Any] = {"wait": self.plan.wait if patience is None else patience}
        if mode == "hold":
            options["on_unknown"] = "hold"
        elif mode == "probe":
            options["on_unknown"] = self._probe
        kind = "_steps" if mode == "steps" else "_work"
        return await wait(once.execute(self.plan.key, getattr(self, f"{kind}_{self.cell.colour}"), **options))

    # ---- the function under test, in both colours
    def _work_sync(self) -> dict[str, str]:
        self._effect("effect")
        points.reach("effect.made")
        while not self._may_end():
            time.sleep(0.002)
        return self._value()

    async def _work_async(self) -> dict[str, str]:
        await asyncio.sleep(0)  # a cancellation that waits strikes before the effect
        self._effect("effect")
        points.reach("effect.made")
        await asyncio.sleep(0)
        while not self._may_end():  # noqa: ASYNC110 - the sign is a file, made by another process
            await asyncio.sleep(0.002)
        return self._value()

    def _steps_sync(self) -> dict[str, str]:
        run = current_run()
        return {name: run.step(name, self._step_sync, name) for name in ("one", "two")}

    async def _steps_async(self) -> dict[str, str]:
        run = current_run()
        return {name: await run.step(name, self._step_async, name) for name in ("one", "two")}

    def _step_sync(self, name: str) -> str:
        self._effect(name)
        return f"{name} by {os.getpid()}"

    async def _step_async(self, name: str) -> str:
        await asyncio.sleep(0)
        self._effect(name)
        return f"{name} by {os.getpid()}"

    def _effect(self, what: str) -> None:
        peer = current_run().downstream_key("peer") if self.cell.mode == "keyed" else ""
        self.ledger.effect(what, self.by, peer)

    def _may_end(self) -> bool:
        """An owner runs until it is told to end; a victim of its own heartbeat until it has risen again."""
        if self.by == "owner":
            return Path(self.plan.folder, "end").exists()
        return self.by != "victim" or self.cell.point != "renew.sent" or traps.woken.is_set()

    def _value(self) -> dict[str, str]:
        by = "keyed peer" if self.cell.mode == "keyed" else f"{self.by} {os.getpid()}"
        return {"by": by + "." * self.plan.padding}

    def _probe(self) -> Any:
        """Authoritative: the ledger is the outside world."""
        made = [each for each in self.ledger.effects() if each.what == "effect"]
        return Found({"by": made[0].by}) if made else NOT_FOUND

    # ---- mode tx
    def _tag(self, once: Any) -> str:
        return str(once.tag(self.plan.key)) if self.plan.url.startswith("redis") else ""

    async def _within(self, once: Any) -> Any:
        opened = self.transaction = await open_transaction(self.plan.url, self.cell.colour, self._tag(once))
        try:
            await wait(once.peek(self.plan.key))
            if self.cell.point in _SYNCHRONOUS:
                await opened.run(f"PRAGMA synchronous = {_SYNCHRONOUS[self.cell.point]}")
            bound = once.within(opened.target)
            outcome = await wait(
                bound.execute(self.plan.key, getattr(self, f"_row_{self.cell.colour}"), wait=self.plan.wait)
            )
            points.reach("commit.sent")
            await opened.commit()
            points.reach("commit.done")
            if self.cell.fault == "cancel":
                await asyncio.sleep(0)  # here, and not while the connection is closed
            return outcome
        finally:
            await opened.close()

    def _row_sync(self) -> dict[str, str]:
        assert self.transaction is not None
        run_sync(self.transaction.insert(self.plan.key, self.by))
        points.reach("effect.made")
        return self._value()

    async def _row_async(self) -> dict[str, str]:
        assert self.transaction is not None
        await asyncio.sleep(0)
        await self.transaction.insert(self.plan.key, self.by)
        points.reach("effect.made")
        await asyncio.sleep(0)
        return self._value()


def _nothing() -> None:
    """What a warm-up runs."""


async def _nothing_async() -> None:
    """What a warm-up runs."""


register(Part(name="core", cells=core_cells, attempt=attempt, wanted=wanted))
