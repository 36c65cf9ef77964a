"""Callers that give up in the middle: nobody is ever handed another's reply, and nothing stays behind that could be."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, InProgress, Semel, StoreUnavailable

from .conftest import url_of

CALLERS, TURNS, LOOKS = 24, 6, 25
ALARMS = 60


class Storm:
    """Callers of many keys, each of which is given up at any moment; the effects they had, and what they were told."""

    def __init__(self, once: AsyncSemel, chance: random.Random, *, shared: bool) -> None:
        self.once, self.chance, self.shared = once, chance, shared
        self.effects: Counter[str] = Counter()
        self.told = self.cancelled = self.refused = 0
        self.keys: set[str] = set()

    async def run(self) -> None:
        await asyncio.gather(*(self._caller(number) for number in range(CALLERS)))

    async def _caller(self, number: int) -> None:
        for turn in range(TURNS):
            key = f"shared-{self.chance.randrange(8)}-{turn // 4}" if self.shared else f"{number}-{turn}"
            task = asyncio.ensure_future(self._call(key))
            if self.chance.random() < 0.6:
                await self._a_moment()
                task.cancel()
            try:
                await task
                self.told += 1
            except asyncio.CancelledError:
                self.cancelled += 1
            except InProgress:
                self.refused += 1

    async def _a_moment(self) -> None:
        if self.chance.random() < 0.6:
            for _ in range(self.chance.randrange(12)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.chance.random() * 0.004)

    async def _call(self, key: str) -> None:
        self.keys.add(key)
        outcome = await self.once.execute(key, self._effect, key, request={"key": key}, wait=30)
        assert outcome.value == self._value(key), "another's reply"

    async def _effect(self, key: str) -> str:
        self.effects[key] += 1
        await asyncio.sleep(0)
        return self._value(key)

    @staticmethod
    def _value(key: str) -> str:
        return f"<{key}>" * (1 + len(key) % 3)

    async def look(self) -> None:
        """Afterwards every key answers for itself, and the connections are in order."""
        for key in sorted(self.keys)[:: max(1, len(self.keys) // LOOKS)]:
            await self._call(key)
            record = await self.once.peek(key)
            assert record is not None
            assert record.scope is not None
            assert (record.scope.key, record.state.value) == (key, "done")


@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "shared keys"])
def test_a_storm_of_cancellations_hands_nobody_anothers_reply(async_url: str, shared: bool) -> None:
    async def body() -> Storm:
        prefix = f"storm-{time.time_ns()}"
        async with AsyncSemel(async_url, prefix=prefix, lease=10, timeout=15, settle_timeout=60) as once:
            storm = Storm(once, random.Random(11), shared=shared)
            await storm.run()
            await storm.look()
            return storm

    storm = asyncio.run(body())
    print(f"\n{storm.told} told, {storm.cancelled} cancelled, {len(storm.keys)} keys")
    assert storm.told > 20
    assert storm.cancelled > 20, "the storm must bite"


# ---------------------------------------------------------------------------------------------- time limits


class TooLate(BaseException):
    """As a task queue raises in the middle of whatever runs when a soft time limit is over."""


@contextmanager
def alarms() -> Iterator[Any]:
    """Arm with seconds; the main thread is interrupted wherever it is then."""

    def ring(*_: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _seconds_of(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a socket whose opening was cut
@pytest.mark.parametrize("store", ["redis", "postgres", "mysql"])
def test_an_interrupted_thread_leaves_no_reply_for_the_next_call(
    request: pytest.FixtureRequest, store: str, tmp_path: Path
) -> None:
    assert threading.current_thread() is threading.main_thread()
    chance = random.Random(5)
    told = cut = 0
    url = url_of(request, store, tmp_path)
    with Semel(url, prefix=f"alarm-{time.time_ns()}", lease=0.2, timeout=15, settle_timeout=20) as once:
        once.execute("warm", str)
        typical = min(
            _seconds_of(partial(once.execute, f"as long as this {number}", str)) for number in range(9)
        )
        with alarms() as arm:
            for number in range(ALARMS):
                try:
                    arm(chance.random() * typical + 1e-5 if chance.random() < 0.4 else 0)
                    try:
                        assert once.execute(f"k{number}", str, number).value == str(number), "another's reply"
                        told += 1
                    finally:
                        arm(0)
                except (TooLate, StoreUnavailable):
                    cut += 1
        for late in range(0, ALARMS, 4):
            # Cut between two lines of the flow itself, a run has nobody who holds it: its lease ends by itself.
            assert once.execute(f"k{late}", str, late, wait=30).value == str(late)
    gc.collect()  # what lost its owner is complained of here, not in the test that comes next
    print(f"\n{told} told, {cut} cut")
    assert told > 5
    assert cut > 5, "the alarms must bite"
