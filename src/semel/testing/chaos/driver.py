"""One schedule: forks the workers of a cell, breaks what the cell breaks, reads the ledger, gives the verdict.

A driver has no threads and no open connections, so its forks are clean; every worker connects for itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from semel.testing.chaos.cells import Cell, Plan, part_of
from semel.testing.chaos.expectations import AWAY
from semel.testing.chaos.harness import BEATEN, GONE, KILLED, PARKED, QUIET, QUIETER, SLOW, WIRE
from semel.testing.chaos.judging import Job, has_no_verdict, is_unsaid, judged
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.locks import Lock
from semel.testing.chaos.places import Places, Private
from semel.testing.chaos.signals import GO, Line
from semel.testing.chaos.verdicts import Result
from semel.testing.chaos.wires import ProxiedCluster, Wire
from semel.testing.chaos.workers import PATIENCE, Errand, Forked, Helper, Worker

__all__ = ["PATIENCE", "Job", "Stage", "Worker", "entered", "run"]


# Whose worker goes on afterwards: it may be the victim of the next schedule, as a service's worker lives on.
_OUTLIVED: Final = {
    "zombie", "overlap", "overruled", "cancel", "interrupt", "reset-before", "reset-after", "stall",
    "poison", "late-commit", "rollback", "late-copy", "slow",
}  # fmt: skip


def _outlived(cell: Cell) -> bool:
    """Whether the process of a victim of this cell lives on, and is the only one of its schedule."""
    if cell.lane:
        alone = cell.point.startswith("acked.") and cell.point != "acked.waited"  # there, all of a batch wait
        return cell.fault in {"failover", "store-kill"} and alone
    if (cell.store, cell.part) == ("sqlite", "messaging"):
        return False  # a consumer cleans up when it begins: at once if it is warm, and then it may be stopped in it, with the lock
    return cell.fault in _OUTLIVED


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
        self.doubt = ""
        """Why its verdict does not count, if it is the expected one."""
        self.line: Line | None = None
        self.victim: Worker | None = None
        self.settings: dict[str, Any] = {}
        """What all workers of this schedule are told, besides what each of them is."""
        self.url = places.url(self.cell)

    def start(self, role: str, **changes: Any) -> Worker:
        """One that may be broken: forked, unless it outlives what befalls it."""
        if role == "victim" and self._helped and _outlived(self.cell):
            return self._errand(role, "victim", changes)
        return self._took(Forked(self.plan(role, **changes)))

    def send(self, role: str, **changes: Any) -> Worker:
        """One whom nothing befalls: it need not be a process of its own, unless its clock is."""
        if not self._helped:
            return self.start(role, **changes)
        return self._errand(role, "helper", changes)

    @property
    def _helped(self) -> bool:
        return part_of(self.cell).helped and not self.settings

    def _errand(self, role: str, helper: str, changes: dict[str, Any]) -> Worker:
        return self._took(Errand(self.plan(role, **changes), self.places.helper(Helper, helper)))

    def _took(self, worker: Worker) -> Worker:
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
        changes["settings"] = {**self.settings, **changes.get("settings", {})}
        return msgspec.structs.replace(plan, **changes)

    def stand(self, **changes: Any) -> None:
        """Start the victim, and wait until it stands at its point."""
        self.line = Line.of(str(self.folder)).make()
        self.victim = self.start("victim", **changes)
        self.bit = self.line.asked(self.victim.over(), timeout=PATIENCE)

    def reply(self) -> None:
        """Let a victim that stands go on."""
        assert self.line is not None
        if self.bit:
            self.line.reply()

    def finish(self, *, within: float = PATIENCE) -> None:
        """Wait for the victim's end; one that may never come to it is killed after so many seconds."""
        assert self.victim is not None
        try:
            self.victim.wait(seconds=within)
        except TimeoutError:
            if within == PATIENCE:
                raise
            self.victim.end()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()


# ------------------------------------------------------------------------------------------------ the orders


def _died(stage: Stage) -> None:
    """Kill, cancel, interrupt: victim, then heir."""
    status = stage.start("victim").wait()
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    stage.bit = killed if stage.cell.fault == "kill" else bool(stage.ledger.faults())
    stage.send("heir", last=True).wait()


def _rose(stage: Stage) -> None:
    """Zombie: the victim stops, its heir takes over and ends, the victim wakes and goes on."""
    changes = _quiet(stage)
    victim = stage.start("victim", **changes)
    stage.bit = os.WIFSTOPPED(victim.wait(stopped=True))
    locks = stage.cell.mode == "tx" and stage.cell.store not in {"redis", "cluster"}
    stage.send(
        "heir", **({"wait": 0.05} if locks and stage.cell.point not in {"claim.sent", "commit.done"} else {})
    ).wait()
    if stage.bit:
        victim.wake()
        victim.wait()
    stage.send("judge").wait()


def _quiet(stage: Stage) -> dict[str, Any]:
    """A heartbeat that is stopped inside a write holds SQLite's only lock: let none be due before the point."""
    if stage.cell.store != "sqlite" or stage.cell.point == "renew.sent":
        return {}
    return QUIETER.plan if stage.cell.mode == "steps" else QUIET.plan


def _overlapped(stage: Stage) -> None:
    """As a zombie, but the victim wakes while its heir is inside of the function, and ends before the heir goes on."""
    changes = _quiet(stage)
    victim = stage.start("victim", **changes)
    stopped = os.WIFSTOPPED(victim.wait(stopped=True))
    heir = stage.send("heir")
    inside = stopped and _until(lambda: entered(stage, "heir"), heir)
    if stopped:
        victim.wake()
        victim.wait()
    stage.bit = inside and not heir.ended()
    (stage.folder / GO).touch()
    heir.wait()
    stage.send("judge").wait()


def entered(stage: Stage, by: str) -> bool:
    return any(each.by == by for each in stage.ledger.owners())


def _overruled(stage: Stage) -> None:
    """Nobody takes a held key over: a person decides while its owner sleeps. Then the owner wakes."""
    changes = _quiet(stage)
    victim = stage.start("victim", **changes)
    stopped = os.WIFSTOPPED(victim.wait(stopped=True))
    stage.send("heir").wait()
    stage.send("person").wait()
    if stopped:
        victim.wake()
        victim.wait()
    stage.bit = stopped
    stage.send("judge").wait()


def _waited(stage: Stage) -> None:
    """The victim is one who waits for a key that an owner runs."""
    owner = stage.send("owner", **PARKED.plan)  # it lives: nothing here waits for a lease to end
    _until(lambda: bool(stage.ledger.effects()), owner)
    victim = stage.start("victim", **PARKED.plan)
    stopping = stage.cell.fault == "zombie"
    status = victim.wait(stopped=stopping)
    stage.bit = bool(stage.ledger.faults())
    (stage.folder / "end").touch()
    owner.wait()
    stage.send("heir").wait()
    if stopping and os.WIFSTOPPED(status):
        victim.wake()
        victim.wait()
    stage.send("judge").wait()


def _lasted(stage: Stage) -> None:
    """The victim lives and its function outlasts its lease: only its heartbeats keep the next caller out."""
    victim = stage.start("victim", **SLOW.plan)
    inside = _until(lambda: bool(stage.ledger.effects()), victim)
    heir = stage.send("heir", **SLOW.plan)
    # One that was overtaken sends no more heartbeats: then its heir is done first, and the verdict says so.
    stage.bit = inside and _until(lambda: bool(stage.ledger.faults()) or heir.ended(), victim)
    (stage.folder / "end").touch()
    victim.wait()
    heir.wait()
    stage.send("judge").wait()


def _until(condition: Callable[[], bool], worker: Worker) -> bool:
    """Wait for what a worker will have done; False when it has ended without it."""
    until = time.monotonic() + PATIENCE
    while not condition():
        if worker.ended():
            return condition()
        if time.monotonic() > until:
            raise TimeoutError(f"the {worker.plan.role} did not come to its place within {PATIENCE:g} s")
        time.sleep(0.004)
    return True


def _on_the_wire(stage: Stage) -> None:
    """Reset or stall: the victim stands still at its point while the proxy learns which request to break: the next one."""
    wire = _stood(stage, **WIRE.plan)
    stage.finish()
    stage.bit = wire.fired()
    stage.send("heir", last=True).wait()


def _locked_out(stage: Stage) -> None:
    """Nobody can write the file for longer than the victim's time limit. Who claims is told so; a note or an outcome is offered on."""
    lock = _stood(stage, **WIRE.plan)
    assert stage.victim is not None
    told = []
    try:
        if stage.cell.point == "claim.sent":
            _until(lambda: bool(stage.ledger.answers()), stage.victim)
            told = [AWAY["claim.sent"]]
        else:
            time.sleep(_SILENCE)
        stage.bit = stage.bit and lock.fired() and _stands(stage, told)
    finally:
        lock.speak()
    stage.finish()
    stage.send("heir", last=True).wait()


def _stands(stage: Stage, told: list[str]) -> bool:
    """Whether its victim has made no effect since it was struck, and was told this and nothing else."""
    struck = stage.ledger.faults()[0].at
    return [each.error for each in stage.ledger.answers()] == told and all(
        each.at < struck for each in stage.ledger.effects()
    )


def _stood(stage: Stage, **changes: Any) -> Wire | Lock:
    """The victim goes by a proxy, stands at its point, and goes on when the proxy is ready to break its next request. A file has no
    proxy: somebody else has its lock."""
    if stage.cell.store == "sqlite":
        lock: Lock = stage.places.hold("lock", lambda: Lock(stage.url.removeprefix("sqlite:///")))
        stage.stand(**changes)
        if stage.bit:
            lock.silence()
        stage.reply()
        return lock
    wire = _wired(stage, **changes)
    if stage.bit and _is_silence(stage.cell):
        wire.silence()
    elif stage.bit:
        wire.arm(stage.cell.fault)
    stage.reply()
    return wire


def _wired(stage: Stage, **changes: Any) -> Wire:
    """The victim stands at its point, with a proxy between it and its server."""
    if stage.cell.store == "cluster":
        place: ProxiedCluster = stage.places.hold(stage.cell.lane, ProxiedCluster)
        stage.url = place.url
        stage.stand(**changes)
        return place.wire
    name, address = stage.cell.store, stage.places.address(stage.cell)
    wire: Wire = stage.places.hold(f"wire to {name}", lambda: Wire(address, speaks=name))
    stage.stand(**changes, url=stage.places.through(stage.cell, wire.ports[0]))
    return wire


def _is_silence(cell: Cell) -> bool:
    """Of one request that hangs a heartbeat need not know: a store asks again on another connection, within its time limit."""
    return (cell.fault, cell.point) == ("stall", "renew.sent")


_SILENCE: Final = 1.3 * WIRE.options["timeout"]
"""Seconds after which a heartbeat has failed, with all that its store has tried, on a busy machine too; the next one comes later."""


def _beaten(stage: Stage) -> None:
    """A heartbeat is broken on its way, or nothing is answered until it has failed. Its function runs on for more than a lease while the next caller asks: the next heartbeat
    keeps that one out."""
    wire = _stood(stage, **BEATEN.plan | {"settings": WIRE.plan["settings"]})
    heir = stage.send("heir", **BEATEN.plan)
    if stage.bit and _is_silence(stage.cell):
        assert stage.victim is not None
        _until(
            wire.struck, stage.victim
        )  # its time limit begins when it is sent: a busy machine may be late with that
        time.sleep(_SILENCE)
        wire.speak()
    until = time.monotonic() + BEATEN.options["lease"]
    while time.monotonic() < until and not heir.ended():
        time.sleep(0.01)
    (stage.folder / "end").touch()
    stage.finish()
    heir.wait()
    stage.bit = wire.fired()
    stage.send("judge").wait()


def _waited_in_vain(stage: Stage) -> None:
    """The next request of one who waits is broken on its way: it has time left, and gets the outcome all the same."""
    owner = stage.send("owner", **PARKED.plan)
    _until(lambda: bool(stage.ledger.effects()), owner)
    wire = _stood(stage, **PARKED.plan | {"settings": WIRE.plan["settings"]})
    (stage.folder / "end").touch()
    owner.wait()
    stage.finish()
    stage.bit = wire.fired()
    told = [each for each in stage.ledger.answers() if each.by == "victim"]
    if not told or told[-1].error:
        stage.doubt = f"one who waited, and had time left, was told {told[-1].error if told else 'nothing'}"
    stage.send("heir").wait()
    stage.send("judge").wait()


def _store_killed(stages: Sequence[Stage]) -> None:
    """The server is killed while the victims stand at their points, and comes back. Some of them go on meanwhile, and must hear that
    it is away; the others stand between their effects and their records until it is there again."""
    server: Private = stages[0].places.private(stages[0].cell)
    for stage in stages:
        stage.key = server.near(stages[0].key, stage.key)
        stage.stand(**(GONE if stage.cell.point in AWAY else KILLED).plan)
    server.kill(stages[0].key)
    away = [stage for stage in stages if stage.cell.point in AWAY]
    for stage in away:
        stage.reply()
    for stage in away:
        stage.bit = stage.bit and _heard(stage)
    server.start()
    for stage in stages:
        if stage not in away:
            stage.reply()
    for stage in stages:
        stage.finish()
    for stage in stages:
        stage.send("heir", last=True).wait()


def _heard(stage: Stage) -> bool:
    """Whether its victim is told, before its server is back, that it is away."""
    assert stage.victim is not None
    _until(lambda: bool(stage.ledger.answers()), stage.victim)
    return [each.error for each in stage.ledger.answers()] == [AWAY[stage.cell.point]]


ORDERS: dict[str, Callable[..., None]] = {
    "kill": _died,
    "cancel": _died,
    "interrupt": _died,
    "zombie": _rose,
    "overlap": _overlapped,
    "overruled": _overruled,
    "reset-before": _on_the_wire,
    "reset-after": _on_the_wire,
    "stall": _on_the_wire,
    "store-kill": _store_killed,
    "slow": _lasted,
}


_ON_THE_WIRE: Final = {"renew.sent": _beaten, "wait.parked": _waited_in_vain}
"""Where it is not the call's own request that is broken."""


def _order_of(cell: Cell) -> Callable[..., None]:
    own = part_of(cell).schedules.get(cell.fault)
    if own is not None:
        return own
    if ORDERS[cell.fault] is _on_the_wire:
        return _ON_THE_WIRE.get(cell.point, _locked_out if cell.store == "sqlite" else _on_the_wire)
    return _waited if cell.point == "wait.parked" else ORDERS[cell.fault]


# ---------------------------------------------------------------------------------------------------- one job


def run(jobs: Sequence[Job], places: Places) -> list[Result]:
    """Play a schedule, or a batch of them, and judge. Never raises: what goes wrong is the result.

    One in which somebody did not end in time has no verdict, neither way: it is played once more, and the report counts it.
    So is one that ended better than its cell promises: an anomaly must be seen, and a race inside of the victim may spare it.
    So is one that ended as it must, and was struck a moment beside the one that its cell names: the next caller has run what he
    was to get as a replay, or the other way round.
    A verdict that is worse, or a breach that is certain whoever did not end, is never asked for twice: in a batch that is
    played again it stays as it was.
    """
    results = _played(jobs, places)
    if not any(has_no_verdict(job.cell, each) for job, each in zip(jobs, results, strict=True)):
        return results
    kept = []
    for job, first, then in zip(jobs, results, _played(jobs, places), strict=True):
        if first.agrees or has_no_verdict(job.cell, first):
            then.again, then.first, then.hung = True, first.problem, is_unsaid(first)
            kept.append(then)
        else:
            kept.append(first)
    return kept


def _played(jobs: Sequence[Job], places: Places) -> list[Result]:
    began = time.monotonic()
    folders = [Path(tempfile.mkdtemp(prefix="schedule-", dir=places.folder)) for _ in jobs]
    problem = ""
    stages: list[Stage] = []
    try:
        stages += [Stage(job, places, folder) for job, folder in zip(jobs, folders, strict=True)]
        cell = jobs[0].cell
        _order_of(cell)(stages if cell.batch else stages[0])
    except Exception as error:  # noqa: BLE001 - the result says it
        problem = f"{type(error).__name__}: {error}"
        if not isinstance(error, TimeoutError):
            problem += "\n" + traceback.format_exc()
        problem = problem.encode("utf-8", "backslashreplace").decode()  # it is sent as JSON
    finally:
        for stage in stages:
            stage.close()
    results = []
    for at, (job, folder) in enumerate(zip(jobs, folders, strict=True)):
        bit, doubt = (stages[at].bit, stages[at].doubt) if at < len(stages) else (False, "")
        result = judged(job, Ledger(str(folder)), bit=bit, problem=problem, doubt=doubt)
        result.seconds = (time.monotonic() - began) / len(jobs)
        result.together = len(jobs)
        results.append(result)
        shutil.rmtree(folder)
    return results
