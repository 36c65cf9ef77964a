"""One process of the demo: several callers, each of which calls every key once, in an order of its own.

It tells its parent what happens by JSON lines on standard output and is told "go" and "open" on standard input.
The victim goes into the function for its key, says so, and waits to be killed before it makes the effect. The
others come to that key only after it was opened, so that there is somebody to take over from.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from semel import LeaseLost, Outcome, Semel, StoreUnavailable, current_run
from semel.demo.ledger import Effect, append
from semel.hooks import Contended, TakenOver

__all__ = ["Orders", "Worker", "run", "say"]


class Orders(msgspec.Struct, frozen=True):
    """What a worker is told on its command line."""

    name: str
    folder: str
    keys: Sequence[str]
    victims_key: str
    is_victim: bool
    callers: int
    work: float
    lease: float


def say(**fields: Any) -> None:
    # A single write: the lines of several threads do not mix, and a kill tears none that matters.
    os.write(1, (json.dumps(fields) + "\n").encode())


class Worker:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._ledger = Path(orders.folder) / "ledger.txt"
        self._opened = threading.Event()
        self._met = threading.local()
        self.once = Semel(
            f"sqlite:///{orders.folder}/semel.db",
            operation="orders.charge",
            lease=orders.lease,
            wait=300,
            timeout=20,
            hooks=[self._notice],
        )

    def _notice(self, event: object) -> None:
        """Hooks run in the caller's own thread."""
        if isinstance(event, Contended):
            if not getattr(self._met, "waited", False):
                say(did="waits", key=event.scope.key)
            self._met.waited = True
        elif isinstance(event, TakenOver):
            self._met.took_over = True

    def charge(self, key: str) -> str:
        """The function that must happen once per key: some work, then an effect that the world can see."""
        run = current_run()
        half = self._orders.work / 2
        time.sleep(half)
        if self._orders.is_victim and key == self._orders.victims_key:
            say(did="inside", key=key)
            time.sleep(300)  # killed in here
        if run.lease_lost:  # this process slept so long that another one has taken over
            raise LeaseLost(f"{key} belongs to another worker now")
        receipt = f"receipt-{secrets.token_hex(4)}"
        append(
            self._ledger,
            Effect(key, receipt, str(run.attempt), self._orders.name, run.downstream_key("ledger")),
        )
        time.sleep(half)
        return receipt

    def call(self, key: str) -> None:
        if key == self._orders.victims_key and not self._orders.is_victim:
            self._opened.wait()
        self._met.waited = self._met.took_over = False
        outcome = self._insist(key)
        say(
            did="replayed" if outcome.replayed else "executed",
            key=key,
            receipt=outcome.value,
            attempt=outcome.attempt,
            waited=self._met.waited,
            took_over=self._met.took_over and not outcome.replayed,
        )

    def _insist(self, key: str) -> Outcome[str]:
        while True:
            try:
                return self.once.execute(key, self.charge, key)
            except (StoreUnavailable, LeaseLost) as error:
                # Nothing ran, or somebody else runs it now: calling again is always safe.
                say(did="retries", key=key, error=str(error))

    def caller(self) -> None:
        for key in self._walk():
            self.call(key)

    def _walk(self) -> list[str]:
        keys = [key for key in self._orders.keys if key != self._orders.victims_key]
        random.shuffle(keys)
        # The victim comes to its key after a few others; everybody else in the second half of the way.
        callers = max(1, self._orders.callers)
        first = len(keys) // (4 * callers) if self._orders.is_victim else len(keys) // 2
        last = first if self._orders.is_victim else len(keys)
        keys.insert(random.randint(first, last), self._orders.victims_key)
        return keys

    def listen(self) -> None:
        """Without its parent a worker ends: an abandoned demo leaves no processes behind."""
        for line in sys.stdin:
            if line.strip() == "open":
                self._opened.set()
        os._exit(3)


def run(orders: Orders) -> None:
    """Wait for "go", let the callers walk, say that it is over."""
    worker = Worker(orders)
    say(did="ready")
    if sys.stdin.readline().strip() != "go":
        return
    threading.Thread(target=worker.listen, daemon=True).start()
    callers = [
        threading.Thread(target=worker.caller) for _ in range(1 if orders.is_victim else orders.callers)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    worker.once.close()
    say(did="finished")


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Orders))
    os._exit(0)  # the listening thread sits in a read of standard input that nothing ends
