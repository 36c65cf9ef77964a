"""DBOS, run through the cases of the matrix that apply to it, beside the cells of semel that are the same case.

Its workers are written in its own words (`peer_dbos`), on PostgreSQL, with its own recovery: the next process of the same
executor takes up what the last one left. What is compared is what its documentation promises, in both directions, too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from semel.errors import ConfigurationError
from semel.testing import services
from semel.testing.chaos.cells import Cell, Verdict
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.places import DDL
from semel.testing.chaos.preloads import ForgetfulPostgres, no_compiler
from semel.testing.chaos.signals import Line
from semel.testing.chaos.verdicts import judge
from semel.testing.services import home

__all__ = ["APART", "CASES", "Case", "Finding", "Peer", "cells_beside", "peer_version", "run_peer"]

_PATIENCE: Final = 120.0
_SCRIPT: Final = Path(__file__).with_name("peer_dbos.py")


class Case(msgspec.Struct, frozen=True):
    """One fault in one kind of effect; `semel` names the cell that is the same case, `promised` is DBOS's own word for it."""

    what: str
    mode: str
    fault: str
    point: str
    semel: str
    promised: Verdict


class Finding(msgspec.Struct, kw_only=True):
    """What came of a case. `seconds`: from a kill to the effect, made by the next process, its start included."""

    what: str
    semel: str
    promised: Verdict
    found: list[Verdict]
    seconds: float | None = None
    problem: str = ""

    @property
    def agrees(self) -> bool:
        return not self.problem and set(self.found) == {self.promised}


class Peer(msgspec.Struct, kw_only=True):
    """What came of a peer's cases. It is kept in the report's folder (`peers.json`) until it is run again."""

    name: str
    version: str
    findings: list[Finding]
    made: str = ""
    """The day of its run, and `command`, what began it."""
    command: str = "semel chaos --peers PYTHON"
    shortest: float | None = None
    """Seconds from a kill to the effect, and `longest`."""
    longest: float | None = None


_ONCE, _TWICE, _LOST = Verdict.ONCE, Verdict.DOUBLED, Verdict.LOST
_STEPS, _TX, _KEYED = "postgres/sync/steps", "postgres/sync/tx", "postgres/sync/keyed"
CASES: Final = (
    Case("step: killed before its effect", "step", "kill", "effect.before", f"{_STEPS}/kill@step.started#1", _ONCE),
    Case("step: killed after its effect", "step", "kill", "effect.made", f"{_STEPS}/kill@step.returned#1", _TWICE),
    Case("step: killed when it was stored", "step", "kill", "step.stored", f"{_STEPS}/kill@step.stored#1", _ONCE),
    Case("step: zombie, before its effect", "step", "zombie", "effect.before", f"{_STEPS}/zombie@step.started#1", _TWICE),
    Case("step: zombie, after its effect", "step", "zombie", "effect.made", f"{_STEPS}/zombie@step.returned#1", _TWICE),
    Case("step: store killed after its effect", "step", "store-kill", "effect.made", f"{_STEPS}/store-kill@step.returned#1", _ONCE),
    Case("step: power loss", "step", "power-loss", "acked.synchronous", f"{_STEPS}/power-loss@acked.synchronous", _ONCE),
    Case("step: power loss, synchronous_commit=off", "step", "power-loss", "acked.asynchronous",
         f"{_STEPS}/power-loss@acked.asynchronous", _TWICE),
    Case("transaction: killed inside", "tx", "kill", "effect.made", f"{_TX}/kill@effect.made", _ONCE),
    Case("transaction: killed when it was committed", "tx", "kill", "step.stored", f"{_TX}/kill@commit.done", _ONCE),
    Case("transaction: zombie inside", "tx", "zombie", "effect.made", f"{_TX}/zombie@effect.made", _ONCE),
    Case("transaction: store killed inside", "tx", "store-kill", "effect.made", f"{_TX}/store-kill@run.returned", _ONCE),
    Case("transaction: power loss", "tx", "power-loss", "acked.synchronous", f"{_TX}/power-loss@acked.synchronous", _ONCE),
    Case("transaction: power loss, synchronous_commit=off", "tx", "power-loss", "acked.asynchronous",
         f"{_TX}/power-loss@acked.asynchronous", _LOST),
    Case("keyed peer: killed after the call", "keyed", "kill", "effect.made", f"{_KEYED}/kill@effect.made", _ONCE),
    Case("keyed peer: zombie, before the call", "keyed", "zombie", "effect.before", f"{_KEYED}/zombie@run.started", _ONCE),
    Case("keyed peer: power loss, synchronous_commit=off", "keyed", "power-loss", "acked.asynchronous",
         f"{_KEYED}/power-loss@acked.asynchronous", _ONCE),
)  # fmt: skip

# What is not compared, and why.
APART: Final = {
    "hold and probe": "a DBOS step whose outcome is lost is run again; there is no policy to stop, or to ask first",
    "resets and stalls on the wire": "the points at which they strike are between the requests of semel's own protocol; the "
    "store's death above breaks DBOS's connections as well",
    "cancel and interrupt": "DBOS cancels a workflow by its id, at its next step; a caller's task is not the workflow's",
    "Redis, MariaDB, Redis Cluster, memory": "its system database is PostgreSQL or SQLite",
    "failover, clocks, full disks": "they break the store alike for everybody: shown with semel's calls",
    "leases": "it has none: a dead executor's workflows wait for its restart (or for Conductor, a separate service), a live "
    "zombie is not told from a dead one",
}


def peer_version(python: Path) -> str:
    """Of the package dbos. ConfigurationError when that Python has none."""
    words = [str(python), "-c", "from importlib.metadata import version; print(version('dbos'))"]
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigurationError(
            f"{python} has no package dbos: install requirements/bench.txt into an environment of its own "
            "(`./bench core peers` makes .venv/peers) and name its Python"
        ) from error


def run_peer(python: Path, *, repeat: int = 1, progress: Callable[[str], None] = print) -> Peer:
    """Every case `repeat` times. ConfigurationError when that Python has no dbos."""
    version = peer_version(python)
    with ExitStack() as stack:
        scene = _Scene(python, stack)
        findings = [_find(scene, case, repeat, progress) for case in CASES]
    kills = [each.seconds for each in findings if each.seconds is not None]
    return Peer(
        name="DBOS",
        version=version,
        findings=findings,
        made=time.strftime("%Y-%m-%d", time.gmtime()),
        shortest=min(kills, default=None),
        longest=max(kills, default=None),
    )


def _find(scene: _Scene, case: Case, repeat: int, progress: Callable[[str], None]) -> Finding:
    finding = Finding(what=case.what, semel=case.semel, promised=case.promised, found=[])
    if case.fault == "power-loss" and no_compiler():
        finding.problem = no_compiler()
        return finding
    for _ in range(repeat):
        folder = home.new_folder(
            "peer"
        )  # with everything else of this process, it goes when the process has gone
        try:
            _Schedule(scene, case, folder).play(finding)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            finding.problem = str(error)
        finally:
            shutil.rmtree(folder)
    progress(f"DBOS {case.what}: {', '.join(finding.found) or finding.problem}")
    return finding


class _Scene:
    """The servers, each started when the first case asks for it."""

    def __init__(self, python: Path, stack: ExitStack) -> None:
        self.python = python
        self._stack = stack
        self._held: dict[str, tuple[Any, str]] = {}

    def server(self, case: Case) -> tuple[Any, str]:
        name = case.point if case.fault == "power-loss" else "plain"
        if name not in self._held:
            server = self._stack.enter_context(_opened(name))
            url = server.database()
            server.execute(DDL["postgres"], database=url.rpartition("/")[2])
            self._held[name] = server, url
        return self._held[name]


def _opened(name: str) -> Any:
    if name == "plain":
        return services.postgres()
    lazy: dict[str, str | int] = {"synchronous_commit": "off", "wal_writer_delay": 10_000}
    return ForgetfulPostgres(lazy if name == "acked.asynchronous" else {}).open()


class _Schedule:
    def __init__(self, scene: _Scene, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.key = f"chaos-{os.urandom(6).hex()}"
        self.ledger = Ledger(str(folder))
        self._python = scene.python
        self._server, self._url = scene.server(case)
        self._workers: list[subprocess.Popen[bytes]] = []

    def play(self, finding: Finding) -> None:
        try:
            self._fault()
            if self.case.promised is not Verdict.LOST:
                self._run("judge")
            finding.found.append(self._verdict())
            if not self.ledger.faults():
                finding.problem = "the fault did not strike"
            elif self.case.fault == "kill":
                made = [each.at for each in self._effects() if each.by == "heir"]
                finding.seconds = made[0] - self.ledger.faults()[0].at if made else finding.seconds
        finally:
            for worker in self._workers:
                worker.kill()
                worker.wait()

    def _fault(self) -> None:
        match self.case.fault:
            case "kill":
                self._run("victim")
                self._run("heir")
            case "zombie":
                victim = self._start("victim")
                _stopped(victim.pid)
                self._run("heir")
                victim.send_signal(signal.SIGCONT)
                victim.wait(_PATIENCE)
            case _:
                self._broken_store()

    def _broken_store(self) -> None:
        line = Line.of(str(self.folder)).make()
        weak = self.case.point == "acked.asynchronous"
        if weak:
            self._server.settle()
            self._server.disk.cut()
        victim = self._start("victim")
        if not line.asked(os.pidfd_open(victim.pid), timeout=_PATIENCE):
            raise TimeoutError("its victim did not come to its point")
        if self.case.fault == "store-kill":
            self._server.kill()
            self._server.start()
            line.reply()
            victim.wait(_PATIENCE)
        else:
            victim.kill()
            self._server.lose_power()
        if self.case.promised is not Verdict.LOST:
            self._run("heir")

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        case = self.case
        point = case.point.partition(".")[0] if case.fault == "power-loss" else case.point
        plan = {
            "url": self._url,
            "key": self.key,
            "folder": str(self.folder),
            "role": role,
            "mode": case.mode,
        }
        words = [
            str(self._python),
            str(_SCRIPT),
            msgspec.json.encode({**plan, "fault": case.fault, "point": point}).decode(),
        ]
        worker = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._workers.append(worker)
        return worker

    def _run(self, role: str) -> None:
        self._start(role).wait(_PATIENCE)

    def _effects(self) -> list[Any]:
        return self.ledger.effects()

    def _verdict(self) -> Verdict:
        if self.case.mode == "tx":
            sql = f"SELECT made_by, made_at FROM chaos_effects WHERE k = '{self.key}'"
            for by, _ in self._server.execute(sql, database=self._url.rpartition("/")[2]):
                self.ledger.effect("effect", by)
        mode = {"step": "retry"}.get(self.case.mode, self.case.mode)
        cell = Cell(
            part="peers",
            store="postgres",
            colour="sync",
            mode=mode,
            fault=self.case.fault,
            point=self.case.point,
        )
        return judge(cell, self.ledger.effects(), self.ledger.answers(), ("effect",))


def _stopped(pid: int) -> None:
    """Wait until the process has stopped itself."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise TimeoutError("its victim ended and did not stop")


def cells_beside() -> set[str]:
    """The cells of semel that stand beside DBOS's cases."""
    return {case.semel for case in CASES}
