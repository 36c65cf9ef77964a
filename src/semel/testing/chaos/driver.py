"""One schedule: forks the workers of a cell, breaks what the cell breaks, reads the ledger, gives the verdict.

A driver has no threads and no open connections, so its forks are clean; every worker connects for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from semel.testing.chaos.cells import Cell, Plan, part_of
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.places import Places, Private
from semel.testing.chaos.signals import Line
from semel.testing.chaos.verdicts import Result, compare, counts, heir_of, judge, recovery, settled
from semel.testing.chaos.wires import Wire

__all__ = ["PATIENCE", "Job", "Stage", "Worker", "run"]

PATIENCE = 30.0
_DIE_WITH_PARENT = 1


class Job(msgspec.Struct, kw_only=True):
    """What the runner asks a driver for."""

    cell: Cell
    number: int
    lease: float
    timed: bool = False
    """Its time of recovery counts: it runs when the machine is not kept busy by other schedules."""


class Worker:
    """A forked attempt."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pid = os.fork()
        if self.pid == 0:
            _work(plan)

    def wait(self, *, stopped: bool = False) -> int:
        """Its status when it ended (or, with `stopped`, stopped). Raises TimeoutError, and the worker is killed."""
        with _deadline(PATIENCE, f"the {self.plan.role} of {self.plan.cell.name}"):
            _, status = os.waitpid(self.pid, os.WUNTRACED if stopped else 0)
        return status

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _work(plan: Plan) -> NoReturn:
    code = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        part_of(plan.cell).attempt(plan)
        code = 0
    except BaseException:  # noqa: BLE001
        # Whatever it is, it belongs into the story of this schedule, and a forked worker must never return.
        Ledger(plan.folder).error(plan.role, "Crashed", traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)


@contextlib.contextmanager
def _deadline(seconds: float, what: str) -> Iterator[None]:
    def late(*_: object) -> NoReturn:
        raise TimeoutError(f"{what} did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Stage:
    """One schedule's workers, files and server. Schedules of parts are functions of a stage."""

    def __init__(self, job: Job, places: Places, folder: Path) -> None:
        self.cell = job.cell
        self.job = job
        self.places = places
        self.ledger = Ledger(str(folder))
        self.folder = folder
        self.workers: list[Worker] = []
        self.key = f"{job.number}-{os.urandom(4).hex()}"
        self.bit = False
        self.url = places.url(self.cell)

    def start(self, role: str, **changes: Any) -> Worker:
        worker = Worker(self.plan(role, **changes))
        self.workers.append(worker)
        return worker

    def plan(self, role: str, **changes: Any) -> Plan:
        plan = Plan(
            cell=self.cell,
            key=self.key,
            url=self.url,
            folder=str(self.folder),
            lease=self.job.lease,
            role=role,
        )
        return msgspec.structs.replace(plan, **changes)

    def close(self) -> None:
        for worker in self.workers:
            worker.end()


# ------------------------------------------------------------------------------------------------ the orders


def _died(stage: Stage) -> None:
    """Kill, cancel, interrupt: victim, then heir."""
    status = stage.start("victim").wait()
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    stage.bit = killed if stage.cell.fault == "kill" else bool(stage.ledger.faults())
    stage.start("heir", last=True).wait()


def _rose(stage: Stage) -> None:
    """Zombie: the victim stops, its heir takes over and ends, the victim wakes and goes on."""
    # A heartbeat that is stopped inside a write holds SQLite's only lock: let none be due before the point.
    changes = {"lease": 0.6} if stage.cell.store == "sqlite" and stage.cell.point != "renew.sent" else {}
    victim = stage.start("victim", **changes)
    stage.bit = os.WIFSTOPPED(victim.wait(stopped=True))
    locks = stage.cell.mode == "tx" and stage.cell.store not in {"redis", "cluster"}
    stage.start(
        "heir", **({"wait": 0.05} if locks and stage.cell.point not in {"claim.sent", "commit.done"} else {})
    ).wait()
    if stage.bit:
        victim.wake()
        victim.wait()
    stage.start("judge").wait()


def _waited(stage: Stage) -> None:
    """The victim is one who waits for a key that an owner runs."""
    owner = stage.start("owner", lease=6.0)  # it lives: nothing here waits for a lease to end
    _until(lambda: bool(stage.ledger.effects()), "the owner's effect")
    victim = stage.start("victim", lease=6.0)
    stopping = stage.cell.fault == "zombie"
    status = victim.wait(stopped=stopping)
    stage.bit = bool(stage.ledger.faults())
    (stage.folder / "end").touch()
    owner.wait()
    stage.start("heir").wait()
    if stopping and os.WIFSTOPPED(status):
        victim.wake()
        victim.wait()
    stage.start("judge").wait()


def _until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come within {PATIENCE:g} s")
        time.sleep(0.002)


def _on_the_wire(stage: Stage) -> None:
    """Reset or stall: the victim stands still at its point while the proxy learns which request to break: the next one."""
    line = Line.of(str(stage.folder)).make()
    with Wire(*stage.places.address(stage.cell), stage.cell.fault, resp=stage.cell.store == "redis") as wire:
        victim = stage.start(
            "victim", url=stage.places.through(stage.cell, wire.port), lease=9.0, settings={"timeout": 2.0}
        )
        if line.asked(victim.pid, timeout=PATIENCE):
            wire.arm()
            line.reply()
        victim.wait()
        stage.bit = wire.fired()
    stage.start("heir", last=True).wait()


def _store_killed(stage: Stage) -> None:
    """The server is killed and comes back while the victim stands between its effect and its record."""
    server: Private = stage.places.private(stage.cell)
    line = Line.of(str(stage.folder)).make()
    victim = stage.start("victim", lease=3.0, settings={"settle_timeout": 20})
    if line.asked(victim.pid, timeout=PATIENCE):
        server.kill(stage.cell, stage.key)
        server.start()
        line.reply()
        stage.bit = True
    victim.wait()
    stage.start("heir", last=True).wait()


ORDERS: dict[str, Callable[[Stage], None]] = {
    "kill": _died,
    "cancel": _died,
    "interrupt": _died,
    "zombie": _rose,
    "reset-before": _on_the_wire,
    "reset-after": _on_the_wire,
    "stall": _on_the_wire,
    "store-kill": _store_killed,
}


def _order_of(cell: Cell) -> Callable[[Stage], None]:
    own = part_of(cell).schedules.get(cell.fault)
    if own is not None:
        return own
    return _waited if cell.point == "wait.parked" else ORDERS[cell.fault]


# ---------------------------------------------------------------------------------------------------- one job


def run(job: Job, places: Places) -> Result:
    """Play the schedule and judge it. Never raises: what goes wrong is the result."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="schedule-", dir=places.folder))
    problem = ""
    stage = None
    try:
        stage = Stage(job, places, folder)
        _order_of(job.cell)(stage)
    except Exception as error:  # noqa: BLE001 - the result says it
        problem = f"{type(error).__name__}: {error}"
        if not isinstance(error, TimeoutError):
            problem += "\n" + traceback.format_exc()
    finally:
        if stage is not None:
            stage.close()
    result = _judged(job, Ledger(str(folder)), bit=stage is not None and stage.bit, problem=problem)
    result.seconds = time.monotonic() - began
    shutil.rmtree(folder)
    return result


def _judged(job: Job, ledger: Ledger, *, bit: bool, problem: str) -> Result:
    cell = job.cell
    effects, answers = ledger.effects(), ledger.answers()
    wanted = part_of(cell).wanted(cell)
    verdict = judge(cell, effects, answers, wanted)
    heir = heir_of(answers)
    odd = next((each for each in answers if each.error in {"Crashed", "Unexpected"}), None)
    problem = problem or (
        f"the {odd.by} ended with {odd.text}" if odd else compare(cell, verdict, heir, bit=bit)
    )
    after, well = settled(cell, answers)
    return Result(
        cell=cell.name,
        verdict=verdict,
        heir=heir,
        agrees=not problem,
        problem=problem,
        effects=sum(counts(cell, effects, wanted).values()),
        calls=len(effects),
        after=after,
        well=well,
        bit=bit,
        recovery=recovery(effects, ledger.faults()) if job.timed else None,
        lease=job.lease,
        store=cell.store,
        number=job.number,
        story=_story(ledger) if problem else [],
    )


def _story(ledger: Ledger) -> list[str]:
    """Everything in the order it happened."""
    lines = [(each.at, f"{each.by} makes {each.what} {each.peer[:8]}") for each in ledger.effects()]
    lines += [(each.at, f"{each.by} meets the fault") for each in ledger.faults()]
    lines += [
        (
            each.at,
            f"{each.by} is told {each.error + ': ' + each.text if each.error else each.value} replayed={each.replayed}",
        )
        for each in ledger.answers()
    ]
    first = min((at for at, _ in lines), default=0.0)
    return [f"{at - first:8.3f} s  {text}" for at, text in sorted(lines)]
