"""The core's rows of the matrix: execute in every mode, steps, and transactions, on every store in both colours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from semel import (
    NOT_FOUND,
    AsyncSemel,
    Found,
    NotRecorded,
    Semel,
    SemelError,
    StoreUnavailable,
    current_run,
    points,
)
from semel.runtime import run_sync
from semel.testing.chaos import expectations, traps
from semel.testing.chaos.cells import Cell, Part, Plan, register
from semel.testing.chaos.expectations import AWAY, HEARD
from semel.testing.chaos.harness import EVERY
from semel.testing.chaos.ledger import Effect, Ledger
from semel.testing.chaos.preloads import attach_clock
from semel.testing.chaos.signals import GO
from semel.testing.chaos.transactions import SqlTransaction, Transaction, open_transaction, wait

__all__ = [
    "COLOURS",
    "LASTING",
    "MODES",
    "POINTS",
    "STORES",
    "WIRE_FAULTS",
    "WORKERS",
    "Worker",
    "attempt",
    "core_cells",
    "points_of",
    "wanted",
]

STORES = ("sqlite", "redis", "postgres", "mariadb", "cluster")
COLOURS = ("sync", "async")
MODES = ("retry", "hold", "keyed", "probe", "steps", "tx")
_RUN = ("claim.sent", "claim.won", "run.started")
_END = ("run.returned", "settle.sent", "settle.stored")
_STEPS = tuple(
    f"{point}#{number}" for number in (1, 2) for point in ("step.started", "step.returned", "step.stored")
)
_BESIDE = ("renew.sent", "wait.parked")
POINTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("retry", "hold", "keyed", "probe"), (*_RUN, "effect.made", *_END, *_BESIDE)),
    "steps": (*_RUN, *_STEPS, *_END, *_BESIDE),
    "tx": (*_RUN, "effect.made", *_END, "commit.sent", "commit.done", *_BESIDE),
}
# The next request is broken: these are the points that one leaves from. After any other it is that of one of these.
WIRE_POINTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("retry", "hold", "keyed", "probe"), ("claim.sent", "settle.sent", *_BESIDE)),
    "steps": ("claim.sent", "step.returned#1", "step.returned#2", "settle.sent", *_BESIDE),
    "tx": ("claim.sent", "settle.sent", "commit.sent", *_BESIDE),
}
WIRE_FAULTS = ("reset-before", "reset-after", "stall")
_WARM = {*WIRE_FAULTS, "store-kill", "disk-full", "memory-full"}
STORE_POINTS = ("run.returned", *AWAY, *_BESIDE)
LASTING = "renew.sent#4"
"""The fourth heartbeat since its effect: more than a lease after its claim."""
_HEARTBEATS, _HEARD = 20, 10.0
"""Leases, and seconds, within which a woken owner has surely heard from its heartbeat, on a busy machine too."""
_OWED = 20.0
"""Seconds within which a server that is back has taken what it missed."""
# A caller's SQLite connection has the caller's setting.
_SYNCHRONOUS = {"acked.full": "FULL", "acked.normal": "NORMAL", "acked.off": "OFF"}

# What a call can come to, or its record, that is no mode of its own here.
_SHOWN_ELSEWHERE = {
    "failing": "a function that fails is settled by the same write, with the same nonce and the same patience, as one that returns "
    "(settle.sent); what on_error makes of it is tried by the simulator (R9) and in tests/rulings/test_failure.py",
    "expiry": "what comes of a record that is over is shown by late-retry, by its server's clock; a purge deletes only what is over: one "
    "that dies has left the rest to the next; tried by the simulator (I11, I14) and in tests/ops/test_purge_is_careful.py",
}
_OUTLIVES: Final = "a store outside of the process outlives it: it is the worker's process that dies (kill)"


def core_cells() -> Iterator[Cell]:
    for store in STORES:
        for colour in COLOURS:
            for mode in MODES:
                yield from _cells(store, colour, mode)
                yield _never(store, colour, mode, "thread-death", _OUTLIVES)
    for mode, reason in _SHOWN_ELSEWHERE.items():
        for store in (*STORES, "memory"):
            for colour in COLOURS:
                yield _never(store, colour, mode, "any", reason)


def _never(store: str, colour: str, mode: str, fault: str, reason: str) -> Cell:
    return Cell(part="core", store=store, colour=colour, mode=mode, fault=fault, point="any", reason=reason)


def _cells(store: str, colour: str, mode: str) -> Iterator[Cell]:
    faults = [(fault, point) for fault in traps.INSIDE for point in points_of(mode, fault)]
    faults += [(fault, point) for fault in WIRE_FAULTS for point in WIRE_POINTS[mode]]
    notes = ("step.returned#1", "step.returned#2") if mode == "steps" else ()
    faults += [("store-kill", point) for point in (*STORE_POINTS, *notes)]
    faults += [("slow", LASTING)]
    for fault, point in faults:
        reason = expectations.not_applicable(store, colour, mode, fault, point)
        lane = f"{store}!" if fault == "store-kill" else ""
        if store == "cluster" and fault in WIRE_FAULTS:
            lane = "cluster wire"
        cell = Cell(
            part="core",
            store=store,
            colour=colour,
            mode=mode,
            fault=fault,
            point=point,
            reason=reason,
            lane=lane,
            batch=fault == "store-kill" and not reason,
        )
        yield cell if reason else expectations.filled(cell)


def points_of(mode: str, fault: str) -> tuple[str, ...]:
    return ("any",) if fault == "overruled" and mode != "hold" else POINTS[mode]


def wanted(cell: Cell) -> tuple[str, ...]:
    """The effects that each key of this cell must have."""
    return ("one", "two") if cell.mode == "steps" else ("effect",)


# ------------------------------------------------------------------------------------------------- one attempt


def attempt(plan: Plan) -> None:
    """In a forked worker: one caller, from the opening of its face to its end. As an errand: one of many of a process."""
    if _stays(plan) and not plan.settings and not plan.cell.lane:
        _last(plan)
        return
    body = _attempt(plan)
    if plan.cell.colour == "sync":
        run_sync(body)
    else:
        asyncio.run(body)


_LASTING = ("heir", "judge", "person", "owner")
_STOPPED = ("zombie", "overlap", "overruled", "slow")
"""Where nobody breaks their server, those whom nothing befalls keep their face and its connections, as a service's workers do;
and so do those who are stopped for a while. Who was cancelled or interrupted ends his face, which waits for what he has begun."""
_faces: dict[tuple[str, str, float], Any] = {}
_runners: list[asyncio.Runner] = []


def _stays(plan: Plan) -> bool:
    return plan.role in _LASTING or (plan.role == "victim" and plan.cell.fault in _STOPPED)


def _last(plan: Plan) -> None:
    if plan.cell.colour == "sync":
        run_sync(_act(_worker(plan), _lasting(plan)))
        return
    if not _runners:
        _runners.append(asyncio.Runner())
    _runners[0].run(_last_async(plan))


async def _last_async(plan: Plan) -> None:
    await _act(_worker(plan), _lasting(plan))


def _lasting(plan: Plan) -> Any:
    name = (plan.url, plan.cell.colour, plan.lease)
    if name not in _faces:
        _faces[name] = _opened(plan, EVERY.plan["settings"])
    return _faces[name]


def _opened(plan: Plan, settings: dict[str, Any]) -> Any:
    face: Any = Semel if plan.cell.colour == "sync" else AsyncSemel
    return face(plan.url, tenant="chaos", lease=plan.lease, **settings)


async def _attempt(plan: Plan) -> None:
    worker = _worker(plan)
    settings = {**EVERY.plan["settings"], **plan.settings}
    if clock := settings.pop("clock", ""):
        attach_clock(clock)
    once = _opened(plan, settings)
    try:
        await _act(worker, once)
    finally:
        await wait(once.close())


async def _act(worker: Worker, once: Any) -> None:
    plan = worker.plan
    try:
        if plan.role == "victim":
            await worker.prepare(once)
            task = asyncio.current_task() if plan.cell.colour == "async" else None
            traps.arm(plan, worker.ledger, task=task)
        await worker.act(once)
    finally:
        traps.disarm()


class Worker:
    """One caller's work: the function under test, what it is told, and how it ends."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cell = plan.cell
        self.by = plan.role
        self.ledger = Ledger(plan.folder)
        self.transaction: Transaction | None = None
        self._since = 0.0

    async def prepare(self, once: Any) -> None:
        """Faults on the wire count from an open, used connection."""
        work = _nothing if self.cell.colour == "sync" else _nothing_async
        until = time.monotonic() + 20
        while self.cell.fault in _WARM or (self.cell.fault, self.cell.point) == ("failover", "run.returned"):
            try:
                await wait(once.execute(f"{self.plan.key}-warm-{time.monotonic()}", work, wait=10))
                return
            except (StoreUnavailable, NotRecorded):  # a busy machine may need longer for the first connection
                if time.monotonic() > until:
                    raise

    async def act(self, once: Any) -> None:
        """What the plan's role does, from the first call to the last look."""
        match self.plan.role:
            case "look":
                self.ledger.survive(len(await self._rows(once)))
                return
            case "person":
                said = {"actor": "ada", "reason": "looked it up"}
                await wait(once.resolve(self.plan.key, value=self._value(), **said))
                return
            case "judge":
                await self.judge(once)
            case _:
                await self.call(once)
                if not self.plan.last:
                    return
                await self.judge(once)
        if self.cell.mode == "tx":
            await self.look(once)

    async def call(self, once: Any, *, patience: float | None = None) -> None:
        try:
            outcome = await (self._within(once) if self.cell.mode == "tx" else self._execute(once, patience))
            self.ledger.answer(self.by, outcome.value, replayed=outcome.replayed, attempt=outcome.attempt)
            if self.cell.fault == "power-loss" and self.by == "victim":
                points.reach(self.cell.point)
            if (
                self.cell.fault == "cancel"
            ):  # too late for the call, it strikes here: not at the face's closing
                await asyncio.sleep(0)
        except SemelError as error:
            self.ledger.error(self.by, type(error).__name__, str(error))
            if (self.by, self.cell.fault, self.cell.point) == ("victim", "store-kill", "settle.sent"):
                await self._recorded(once)
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

    async def _recorded(self, once: Any) -> None:
        """It was told NotRecorded and lives on, as a service does: until what it owes is written, by whoever does it behind it."""
        until = time.monotonic() + _OWED
        while time.monotonic() < until:
            with contextlib.suppress(StoreUnavailable):  # it is still away
                record = await wait(once.peek(self.plan.key))
                if record is not None and record.state.value == "done":
                    return
            if self.cell.colour == "sync":
                time.sleep(0.02)  # noqa: ASYNC251 - in this colour there is no loop
            else:
                await asyncio.sleep(0.02)

    async def judge(self, once: Any) -> None:
        """The same call once more, when all is over: it must find the end and run nothing."""
        self.by = "judge"
        await self.call(once, patience=1.0)
        record = await wait(once.peek(self.plan.key))
        if record is not None:
            self.ledger.keep(record.state.value, record.nonce, record.attempts)

    async def look(self, once: Any) -> None:
        """Mode tx: what is committed goes into the ledger, as it is in the end."""
        for row in await self._rows(once):
            self.ledger.effect(row.what, row.by)

    async def _rows(self, once: Any) -> list[Effect]:
        opened = await self.open(once)
        try:
            return await opened.rows(self.plan.key)
        finally:
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
        self._enter_sync()
        self._effect("effect")
        points.reach("effect.made")
        while not self._may_end():
            time.sleep(0.004)
        return self._value()

    async def _work_async(self) -> dict[str, str]:
        await self._enter_async()
        await asyncio.sleep(0)  # a cancellation that waits strikes before the effect
        self._effect("effect")
        points.reach("effect.made")
        await asyncio.sleep(0)
        try:
            while not self._may_end():  # noqa: ASYNC110 - the sign is a file, made by another process
                await asyncio.sleep(0.004)
        except asyncio.CancelledError:
            self._may_end()  # a lost lease has cancelled it: it has heard
            raise
        return self._value()

    def _steps_sync(self) -> dict[str, str]:
        run = self._enter_sync()
        made = {}
        for name in ("one", "two"):
            while not self._has_heard(run):
                time.sleep(0.004)
            made[name] = run.step(name, self._step_sync, name)
        return made

    async def _steps_async(self) -> dict[str, str]:
        run = await self._enter_async()
        made = {}
        for name in ("one", "two"):
            while not self._has_heard(run):  # noqa: ASYNC110 - its heartbeat says it with a flag
                await asyncio.sleep(0.004)
            made[name] = await run.step(name, self._step_async, name)
        return made

    # ---- inside of it: who is there is written down, and an heir waits there for the one that it has overtaken
    def _enter_sync(self) -> Any:
        run = self._enter()
        while not self._may_begin():
            time.sleep(0.004)
        return run

    async def _enter_async(self) -> Any:
        run = self._enter()
        while not self._may_begin():  # noqa: ASYNC110 - the sign is a file, made by another process
            await asyncio.sleep(0.004)
        return run

    def _enter(self) -> Any:
        run = current_run()
        self.ledger.entered(self.by, run.ask.nonce, run.attempt)
        return run

    def _has_heard(self, run: Any) -> bool:
        """Who has woken between two steps goes on when its heartbeat has told it: then it makes no more of them."""
        waits = self.by == "victim" and self.cell.fault in {"zombie", "overlap"} and self.cell.point in HEARD
        return not waits or not traps.woken.is_set() or self._heard(run)

    def _heard(self, run: Any) -> bool:
        self._since = self._since or time.monotonic()
        return bool(run.lease_lost) or time.monotonic() - self._since > max(
            _HEARD, _HEARTBEATS * self.plan.lease
        )

    def _may_begin(self) -> bool:
        return self.cell.fault != "overlap" or self.by != "heir" or Path(self.plan.folder, GO).exists()

    def _step_sync(self, name: str) -> str:
        self._effect(name)
        return f"{name} by {os.getpid()}" + "." * self.plan.padding

    async def _step_async(self, name: str) -> str:
        await asyncio.sleep(0)
        self._effect(name)
        return f"{name} by {os.getpid()}" + "." * self.plan.padding

    def _effect(self, what: str) -> None:
        peer = current_run().downstream_key("peer") if self.cell.mode == "keyed" else ""
        self.ledger.effect(what, self.by, peer)

    def _may_end(self) -> bool:
        """An owner, and a victim that outlasts its lease, runs until it is told to end; a victim of its own heartbeat until it has risen again."""
        lasts = self.cell.fault == "slow" or (
            self.cell.fault in WIRE_FAULTS and self.cell.point == "renew.sent"
        )
        if self.by == "owner" or (self.by == "victim" and lasts):
            return Path(self.plan.folder, "end").exists()
        if self.by != "victim" or self.cell.point != "renew.sent":
            return True
        if not traps.woken.is_set():
            return False
        if current_run().lease_lost:
            self.ledger.warn(self.by)
            return True
        if self._heard(current_run()):
            return True  # it has not heard: the fence's check says so
        # Nobody takes a held key over: unless a person has decided, its heartbeat has nothing to say.
        return self.cell.mode == "hold" and self.cell.fault == "zombie"

    def _value(self) -> dict[str, str]:
        """Every caller's own, under every mode: whose result is in the record can be seen."""
        return {"by": f"{self.by} {os.getpid()} {threading.get_ident()}" + "." * self.plan.padding}

    def _probe(self) -> Any:
        """Authoritative: the ledger is the outside world."""
        made = [each for each in self.ledger.effects() if each.what == "effect"]
        return Found({"by": made[0].by}) if made else NOT_FOUND

    # ---- mode tx
    async def open(self, once: Any, url: str = "", **options: Any) -> Transaction:
        tag = str(once.tag(self.plan.key)) if self.plan.url.startswith("redis") else ""
        return await open_transaction(url or self.plan.url, self.cell.colour, tag, **options)

    async def _within(self, once: Any) -> Any:
        opened = self.transaction = await self.open(once)
        try:
            await wait(once.peek(self.plan.key))
            if self.cell.point in _SYNCHRONOUS and isinstance(opened, SqlTransaction):
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
        self._enter_sync()
        run_sync(self.transaction.insert(self.plan.key, self.by))
        points.reach("effect.made")
        return self._value()

    async def _row_async(self) -> dict[str, str]:
        assert self.transaction is not None
        await self._enter_async()
        await asyncio.sleep(0)
        await self.transaction.insert(self.plan.key, self.by)
        points.reach("effect.made")
        await asyncio.sleep(0)
        return self._value()


WORKERS: dict[str, type[Worker]] = {}  # by part or mode: who calls otherwise than by `execute`


def _worker(plan: Plan) -> Worker:
    return (WORKERS.get(plan.cell.part) or WORKERS.get(plan.cell.mode, Worker))(plan)


def _nothing() -> None:
    """What a warm-up runs."""


async def _nothing_async() -> None:
    """What a warm-up runs."""


register(Part(name="core", cells=core_cells, attempt=attempt, wanted=wanted, helped=True))
