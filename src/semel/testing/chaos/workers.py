"""Processes of a schedule: forked for it when they die of it, kept from one to the next when they outlive it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from semel.testing.chaos.cells import Plan, part_of
from semel.testing.chaos.frames import receive, send
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.leftovers import too_many

__all__ = ["PATIENCE", "Errand", "Forked", "Helper", "Worker"]

PATIENCE = 30.0
_DIE_WITH_PARENT = 1
_STOPPED = (signal.SIGSTOP << 8) | 0x7F  # what waitpid says


class Worker(ABC):
    """One attempt, in a process."""

    plan: Plan
    pid: int

    @abstractmethod
    def wait(self, *, stopped: bool = False, seconds: float = PATIENCE) -> int:
        """Its status when it ended (or, with `stopped`, stopped). Raises TimeoutError."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether it is over; it may still be waited for."""

    @abstractmethod
    def over(self) -> int:
        """A new descriptor that can be read from when it is over."""

    @abstractmethod
    def end(self) -> None:
        """Kill what is not over."""

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Forked(Worker):
    """In a process of its own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pid = os.fork()
        if self.pid == 0:
            _work(plan)

    def wait(self, *, stopped: bool = False, seconds: float = PATIENCE) -> int:
        with _deadline(seconds, f"the {self.plan.role} of {self.plan.cell.name}"):
            _, status = os.waitpid(self.pid, os.WUNTRACED if stopped else 0)
        return status

    def ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def over(self) -> int:
        return os.pidfd_open(self.pid)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _work(plan: Plan) -> NoReturn:
    code = 1
    try:
        _as_a_child()
        code = 0 if _attempted(plan) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def _as_a_child() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _attempted(plan: Plan) -> bool:
    try:
        part_of(plan.cell).attempt(plan)
    except BaseException:  # noqa: BLE001 - whatever it is, it belongs into the story of this schedule
        Ledger(plan.folder).error(plan.role, "Crashed", traceback.format_exc())
        return False
    return True


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


class Helper:
    """One process that is everybody whom no fault meets: the next caller, the judge, the person. It does one errand at a time.
    Another one is every victim that outlives what befalls it.

    It lives as long as its driver, as other workers of a service do, and keeps its faces. A fork and a face for each errand
    would be most of the cost of a schedule.
    """

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.line.close()
            _help(theirs)
        theirs.close()

    @property
    def alive(self) -> bool:
        return self.pid != 0

    def close(self) -> None:
        if not self.alive:
            return
        self.line.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.pid = 0


class Errand(Worker):
    """What a helper does for a schedule. Its status is 0 when it is done."""

    def __init__(self, plan: Plan, helper: Helper) -> None:
        self.plan = plan
        self.pid = helper.pid
        self._helper = helper
        self._done = False
        send(helper.line, msgspec.json.encode(plan))

    def wait(self, *, stopped: bool = False, seconds: float = PATIENCE) -> int:
        if stopped and (status := self._stopped(seconds)):
            return status
        if not self._done:
            with _deadline(seconds, f"the {self.plan.role} of {self.plan.cell.name}"):
                if receive(self._helper.line) is None:
                    raise RuntimeError(f"the helper died as the {self.plan.role} of {self.plan.cell.name}")
            self._done = True
        return 0

    def _stopped(self, seconds: float) -> int:
        """The status of a stopped process; 0 when it is done without."""
        until = time.monotonic() + seconds
        while not self.ended():
            if os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG) is not None:
                return _STOPPED
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the {self.plan.role} of {self.plan.cell.name} did not stop within {seconds:g} s"
                )
            time.sleep(0.004)
        return 0

    def ended(self) -> bool:
        return self._done or bool(select.select([self._helper.line], [], [], 0)[0])

    def over(self) -> int:
        return os.dup(self._helper.line.fileno())

    def end(self) -> None:
        """One that is not done takes its helper with it."""
        if not self._done:
            self._helper.close()


def _help(line: socket.socket) -> NoReturn:
    try:
        _as_a_child()
        gc.enable()  # it lives for many schedules
        while (text := receive(line)) is not None:
            _run_errand(msgspec.json.decode(text, type=Plan))
            send(line, b"done")
    finally:
        os._exit(0)


def _run_errand(plan: Plan) -> None:
    _attempted(plan)
    if left := too_many():
        Ledger(plan.folder).error(plan.role, "Crashed", left)
