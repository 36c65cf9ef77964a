"""Processes of a schedule: forked for it when they meet a fault, kept from one to the next when nothing happens to them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from semel.testing.chaos.cells import Plan, part_of
from semel.testing.chaos.frames import receive, send
from semel.testing.chaos.ledger import Ledger

__all__ = ["PATIENCE", "Errand", "Helper", "Worker"]

PATIENCE = 30.0
_DIE_WITH_PARENT = 1


class Worker:
    """A forked attempt."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pid = os.fork()
        if self.pid == 0:
            _work(plan)

    def wait(self, *, stopped: bool = False, seconds: float = PATIENCE) -> int:
        """Its status when it ended (or, with `stopped`, stopped). Raises TimeoutError."""
        with _deadline(seconds, f"the {self.plan.role} of {self.plan.cell.name}"):
            _, status = os.waitpid(self.pid, os.WUNTRACED if stopped else 0)
        return status

    def ended(self) -> bool:
        """Whether it is over; it may still be waited for."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

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

    It lives as long as its driver, as other workers of a service do, and keeps its faces. A fork and a face for each errand
    would be half of the cost of a schedule.
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


class Errand:
    """What a helper does for a schedule, with the words of a worker."""

    def __init__(self, plan: Plan, helper: Helper) -> None:
        self.plan = plan
        self._helper = helper
        self._done = False
        send(helper.line, msgspec.json.encode(plan))

    def wait(self, *, seconds: float = PATIENCE) -> int:
        """0 when it is done. Raises TimeoutError."""
        if not self._done:
            with _deadline(seconds, f"the {self.plan.role} of {self.plan.cell.name}"):
                if receive(self._helper.line) is None:
                    raise RuntimeError(f"the helper died as the {self.plan.role} of {self.plan.cell.name}")
            self._done = True
        return 0

    def ended(self) -> bool:
        return self._done or bool(select.select([self._helper.line], [], [], 0)[0])

    def end(self) -> None:
        """One that is not done takes its helper with it."""
        if not self._done:
            self._helper.close()


def _help(line: socket.socket) -> NoReturn:
    try:
        _as_a_child()
        gc.enable()  # it lives for many schedules
        while (text := receive(line)) is not None:
            _attempted(msgspec.json.decode(text, type=Plan))
            send(line, b"done")
    finally:
        os._exit(0)
