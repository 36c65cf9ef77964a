"""Conducts the demo: starts the workers, kills one in the middle of the function, keeps count of what they tell."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from semel.demo.worker import Orders

__all__ = ["Plan", "Race", "Tally"]

_PATIENCE_BEFORE_KILL = 0.5  # the victim is seen alive, with others waiting for its key, before it dies


class Plan(msgspec.Struct, frozen=True):
    workers: int
    keys: int
    seconds: float
    lease: float
    callers: int = 4

    @property
    def all_callers(self) -> int:
        return (self.workers - 1) * self.callers + 1

    @property
    def work(self) -> float:
        """How long the function takes, so that the whole takes about `seconds`."""
        return max(0.005, 0.6 * self.seconds * self.all_callers / self.keys)

    @property
    def limit(self) -> float:
        return 60 + 6 * self.seconds + 3 * self.lease


@dataclass
class Tally:
    """What one worker has told so far."""

    pid: int = 0
    state: str = "starts"
    executed: int = 0
    replayed: int = 0
    waited: int = 0
    taken_over: int = 0


class Race:
    """All that is known about a run, while it goes on and when it is over."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.keys = [f"order-{number:04}" for number in range(1, plan.keys + 1)]
        self.tallies = [Tally() for _ in range(plan.workers)]
        self.receipts: dict[str, set[str]] = {key: set() for key in self.keys}
        self.done: set[str] = set()
        self.news: list[str] = []
        self.troubles: list[str] = []
        self.began = self.took = 0.0
        self.killed_at = self.taken_over_after = 0.0
        self.taken_over_by = 0
        self._kill_due = 0.0
        self._processes: list[subprocess.Popen[str]] = []
        self._told: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()

    @property
    def victims_key(self) -> str:
        return self.keys[len(self.keys) // 3]

    @property
    def over(self) -> bool:
        return all(tally.state in {"finished", "killed", "failed"} for tally in self.tallies)

    # ------------------------------------------------------------------------------------ the course of it
    def start(self) -> None:
        for number in range(self.plan.workers):
            orders = Orders(
                name=f"worker-{number + 1}",
                folder=str(self.folder),
                keys=self.keys,
                victims_key=self.victims_key,
                is_victim=number == 0,
                callers=self.plan.callers,
                work=self.plan.work,
                lease=self.plan.lease,
            )
            command = [sys.executable, "-m", "semel.demo.worker", msgspec.json.encode(orders).decode()]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            self.tallies[number].pid = process.pid
            threading.Thread(target=self._listen, args=(number, process), daemon=True).start()

    def step(self, timeout: float) -> None:
        """Take in what the workers have told, for at most `timeout` seconds; kill the victim when it is due."""
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0 and not self.over:
            if self._kill_due and time.monotonic() >= self._kill_due:
                self._kill()
            try:
                number, told = self._told.get(timeout=min(left, 0.05))
            except queue.Empty:
                continue
            self._take_in(number, told)
        if self.over and not self.took:
            self.took = time.monotonic() - self.began

    def stop(self) -> None:
        """End whatever still runs; also after Ctrl-C."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    # --------------------------------------------------------------------------------- what workers tell
    def _listen(self, number: int, process: subprocess.Popen[str]) -> None:
        if process.stdout is None:
            return
        try:
            for line in process.stdout:
                if line.endswith("}\n"):  # what a kill tore is not told
                    self._told.put((number, json.loads(line)))
        except ValueError:
            return  # `stop` closed the pipe: nobody listens any more
        self._told.put((number, {"did": "ended", "code": process.wait()}))

    def _take_in(self, number: int, told: dict[str, Any]) -> None:
        tally = self.tallies[number]
        match told["did"]:
            case "ready":
                tally.state = "ready"
                if all(other.state == "ready" for other in self.tallies):
                    self._go()
            case "waits":
                tally.waited += 1
            case "inside":
                tally.state = f"inside {told['key']}"
                self.news.append(
                    f"worker-{number + 1} is in the middle of {told['key']}; others come to wait for it"
                )
                self._send("open\n")
                self._kill_due = time.monotonic() + _PATIENCE_BEFORE_KILL
            case "executed" | "replayed":
                self._count(number, tally, told)
            case "finished":
                tally.state = "finished"
            case "ended" if tally.state not in {"finished", "killed"}:
                tally.state = "failed"
                self.troubles.append(f"worker-{number + 1} ended by itself, with code {told['code']}")
            case "retries":
                self.news.append(f"worker-{number + 1} tries {told['key']} again: {told['error']}")
            case _:
                pass

    def _count(self, number: int, tally: Tally, told: dict[str, Any]) -> None:
        key = told["key"]
        self.receipts[key].add(told["receipt"])
        if told["did"] == "replayed":
            tally.replayed += 1
            return
        tally.executed += 1
        self.done.add(key)
        if told["took_over"]:
            tally.taken_over += 1
            self.taken_over_by = number + 1
            self.taken_over_after = time.monotonic() - self.killed_at
            self.news.append(
                f"worker-{number + 1} took {key} over and finished it {self.taken_over_after:.1f} s after the kill"
            )

    def _go(self) -> None:
        self.began = time.monotonic()
        for tally in self.tallies:
            tally.state = "runs"
        self._send("go\n")

    def _send(self, line: str) -> None:
        for process, tally in zip(self._processes, self.tallies, strict=True):
            if tally.state not in {"killed", "failed"} and process.stdin is not None:
                try:
                    process.stdin.write(line)
                    process.stdin.flush()
                except BrokenPipeError:
                    continue  # it has ended; its listener tells with which code

    def _kill(self) -> None:
        self._kill_due = 0.0
        victim, tally = self._processes[0], self.tallies[0]
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        self.killed_at = time.monotonic()
        self.news.append(
            f"worker-1 (pid {victim.pid}) was killed by SIGKILL {tally.state}; its lease of {self.plan.lease:g} s runs out"
        )
        tally.state = "killed"
