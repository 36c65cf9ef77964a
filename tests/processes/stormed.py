"""Run as a program: `python -m tests.processes.stormed WHAT FOLDER`.

The main thread does one thing over and over while a signal's handler raises in the middle of it, wherever that is, as
handlers for Ctrl-C and for soft time limits do. Afterwards everybody else must still get what they wait for.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from semel import Semel
from semel.runtime import ThreadRuntime, run_sync
from semel.stores.postgres.home import ThreadWorld

STRIKES, LONGEST = 1_500, 20.0
PATIENCE = 20.0  # whoever is not done by then waits for ever


class Struck(BaseException):
    """What the handler raises."""


def storm(act: Callable[[], object], then: Callable[[], object] = bool, strikes: int = STRIKES) -> None:
    """Do it until it was struck often enough. Only what `act` does is struck, never this loop itself, nor `then`."""

    def strike(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is act.__code__:
                raise Struck
            frame = frame.f_back

    signal.signal(signal.SIGALRM, strike)
    struck, until = 0, time.monotonic() + LONGEST
    while struck < strikes and time.monotonic() < until:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-4))
        try:
            for _ in range(20):
                act()
        except Struck:
            struck += 1
        except (
            RuntimeError
        ) as error:  # of a lock of Python's own that it had not taken back when it was struck
            if not isinstance(error.__context__, Struck):
                raise
            struck += 1
        then()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert struck > strikes / 10, "the storm must bite"


def in_time(what: str, act: Callable[[], object]) -> None:
    """Another thread can do it."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        print(f"{what} waits for ever", flush=True)
        os._exit(1)


def heart(_: str) -> None:
    beaten = threading.Event()

    async def tick() -> None:
        beaten.set()

    ticker, far = ThreadRuntime().ticker(tick), [time.monotonic() + 1e6]

    def act() -> None:
        far[0] -= 1e-3
        ticker.at(far[0])

    storm(act)
    in_time("whoever wants a heartbeat", lambda: ticker.at(time.monotonic()))
    in_time("the heart", beaten.wait)
    in_time("whoever stops it", ticker.stop)


def young_hearts(_: str) -> None:
    """Each is struck, if at all, while its thread comes up."""
    beaten = threading.Event()

    async def tick() -> None:
        beaten.set()

    hearts = [ThreadRuntime().ticker(tick)]

    def act() -> None:
        hearts[0].at(time.monotonic() + 1e6)

    def then() -> None:
        hearts[0].at(time.monotonic())
        if not beaten.wait(PATIENCE):
            print("a heart does not beat", flush=True)
            os._exit(1)
        hearts[0].stop()
        beaten.clear()
        hearts[0] = ThreadRuntime().ticker(tick)

    storm(act, then, STRIKES // 10)


def seat(_: str) -> None:
    parker, turns, over = ThreadRuntime().parker(), [0], threading.Event()

    def wake() -> None:
        while not over.is_set():
            parker.wake()
            turns[0] += 1
            time.sleep(0)

    waker = threading.Thread(target=wake, daemon=True)
    waker.start()

    def act() -> None:
        run_sync(parker.park(0.001))

    storm(act)
    over.set()
    in_time("whoever wakes", waker.join)


def flag(_: str) -> None:
    up, over = ThreadWorld().flag(), threading.Event()

    def wave() -> None:
        while not over.is_set():
            up.set()
            up.clear()
            time.sleep(0)

    waver = threading.Thread(target=wave, daemon=True)
    waver.start()

    def act() -> None:
        run_sync(up.wait(0.001))

    storm(act)
    over.set()
    in_time("whoever sets a flag", waver.join)
    up.set()
    in_time("whoever waits for it", lambda: run_sync(up.wait(1e6)))


def file(folder: str) -> None:
    with Semel(f"sqlite:///{folder}/semel.db") as once:
        once.execute("key", str, 1)

        def act() -> None:
            once.peek("key")

        storm(act)
        in_time("whoever reads", act)
        in_time("whoever forks", lambda: os.fork() or os._exit(0))


if __name__ == "__main__":
    {"heart": heart, "young hearts": young_hearts, "seat": seat, "flag": flag, "file": file}[sys.argv[1]](
        sys.argv[2]
    )
    print("calm", flush=True)
    os._exit(0)
