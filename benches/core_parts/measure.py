"""How `./bench core` measures: contestants take turns in short rounds of one run, and medians are compared.

The machine may be busy with other work; whatever disturbs one round of a contestant disturbs the others' too. The
turn order rotates, garbage is collected between turns, and CPU is the process's own (all threads), not the wall's.
"""

from __future__ import annotations

import asyncio
import gc
import operator
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

__all__ = [
    "ORDER",
    "Contestant",
    "Effort",
    "Figure",
    "Rate",
    "Samples",
    "Term",
    "closed_loop",
    "compare_crowds",
    "compare_latencies",
    "compare_threadless",
    "on_cores",
    "say",
    "time_latencies",
    "typical",
    "work",
    "work_sync",
]

# What the work returns: an order, 1 KB when it is encoded. Nested and mixed, as results of real services are.
ORDER: dict[str, Any] = {
    "id": "ord_01JB8Z6Q2M4T7W9Y",
    "state": "accepted",
    "customer": {"id": 81_723, "name": "Ada Lovelace", "email": "ada@example.org", "since": "2019-04-01"},
    "lines": [
        {
            "sku": f"SKU-{number:05}",
            "title": f"Article number {number} in its box",
            "count": 2,
            "price": 1_999,
        }
        for number in range(10)
    ],
    "total": 39_980,
    "paid": True,
    "note": "leave it with the neighbour, please " * 6,
}


async def work() -> dict[str, Any]:
    return ORDER


def work_sync() -> dict[str, Any]:
    return ORDER


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ what is told
class Term(msgspec.Struct, frozen=True):
    """One side of a ratio."""

    name: str
    value: float
    unit: str

    def __str__(self) -> str:
        shown = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.3g}"
        return f"{self.name}: {shown} {self.unit}".rstrip()


_SIGNS: dict[str, Callable[[float, float], bool]] = {"≤": operator.le, "≥": operator.ge, "=": operator.eq}


class Figure(msgspec.Struct, frozen=True):
    """One line of the table: a ratio of two terms, or a count or a time on its own (`theirs` is None)."""

    what: str
    ours: Term
    theirs: Term | None = None
    sign: str = ""
    limit: float = 0.0
    note: str = ""

    @property
    def value(self) -> float:
        return self.ours.value if self.theirs is None else self.ours.value / self.theirs.value

    @property
    def met(self) -> bool | None:
        """None: there is no goal, the figure is told for comparison."""
        # Judged as printed: a reader must not find "1.80 ≤ 1.8: missed".
        return _SIGNS[self.sign](float(f"{self.value:.3g}"), self.limit) if self.sign else None

    @property
    def goal(self) -> str:
        unit = f" {self.ours.unit}" if self.theirs is None and self.ours.unit else ""
        return f"{self.sign} {self.limit:g}{unit}" if self.sign else ""

    @property
    def verdict(self) -> str:
        return {True: "met", False: "missed", None: ""}[self.met]

    def __str__(self) -> str:
        terms = str(self.ours) if self.theirs is None else f"{self.ours}; {self.theirs}"
        return (
            f"{self.what:66} {self.value:8.3g}  {self.goal:12} {self.verdict:7} {terms}  {self.note}".rstrip()
        )


class Effort(msgspec.Struct, frozen=True):
    """How long a run is: `--quick` shows that the program works, the full run is what the page shows."""

    rounds: int
    calls: int
    quick: bool

    @classmethod
    def of(cls, *, quick: bool) -> Effort:
        return cls(rounds=2, calls=64, quick=True) if quick else cls(rounds=41, calls=1_000, quick=False)

    def smaller(self, by: int) -> Effort:
        """For contestants that are `by` times slower."""
        return msgspec.structs.replace(self, calls=max(64, self.calls // by))

    def longer(self, by: int) -> Effort:
        """For contestants so quick that a round would be over before the caches are warm again after the one before."""
        return self if self.quick else msgspec.structs.replace(self, calls=self.calls * by)


# ---------------------------------------------------------------------------------------------- how it is measured
class Contestant(msgspec.Struct, frozen=True):
    """`prepare(count)` gives the arguments of a round's calls (not timed); `call` makes one call with one of them."""

    name: str
    prepare: Callable[[int], Sequence[Any]]
    call: Callable[[Any], Any]


class Rate(msgspec.Struct, frozen=True):
    """Medians over rounds: calls per second, client CPU in µs per call."""

    per_second: float
    cpu: float


async def closed_loop(call: Callable[[Any], Awaitable[Any]], items: Sequence[Any], callers: int) -> None:
    """All items, by so many callers, each of which makes its next call when its last one was answered."""
    left = iter(items)

    async def caller() -> None:
        for item in left:
            await call(item)

    if callers == 1:
        await caller()
    else:
        await asyncio.gather(*(caller() for _ in range(callers)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Nobody pays for the garbage of the contestant before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def on_cores(server: int, *, shared: bool) -> Iterator[None]:
    """For the block this process has the first core. The server and its children (those to come, too) get the others, or, if it is
    `shared`, the same one, and keep them.

    Left to the scheduler, one connection is answered on the client's own core and the next one is not, for minutes: a select
    then takes 30 µs or 110, and says nothing about what it is compared with.
    """
    cores = sorted(os.sched_getaffinity(0))
    children = subprocess.run(["pgrep", "-P", str(server)], capture_output=True, text=True, check=False)
    everybody = [server, *map(int, children.stdout.split())]
    theirs = set(cores[:1] if shared else cores[1:] or cores)
    os.sched_setaffinity(0, cores[:1])
    for pid in everybody:
        with suppress(ProcessLookupError):  # some come and go
            os.sched_setaffinity(pid, theirs)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _turns(contestants: Sequence[Contestant], number: int) -> Sequence[Contestant]:
    at = number % len(contestants)
    return [*contestants[at:], *contestants[:at]]


def _medians(rounds: dict[str, list[tuple[float, float]]]) -> dict[str, Rate]:
    return {
        name: Rate(statistics.median(rate for rate, _ in seen), statistics.median(cpu for _, cpu in seen))
        for name, seen in rounds.items()
    }


async def compare_crowds(
    contestants: Sequence[Contestant], effort: Effort, callers: int, calls: dict[str, int] | None = None
) -> dict[str, Rate]:
    """Throughput of so many callers. The first round warms up and does not count."""
    rounds: dict[str, list[tuple[float, float]]] = {one.name: [] for one in contestants}
    for number in range(effort.rounds + 1):
        for one in _turns(contestants, number):
            items = one.prepare((calls or {}).get(one.name, effort.calls))
            with _quiet():
                cpu, start = time.process_time(), time.perf_counter()
                await closed_loop(one.call, items, callers)
                wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            if number:
                rounds[one.name].append((len(items) / wall, cpu / len(items) * 1e6))
    return _medians(rounds)


def compare_threadless(contestants: Sequence[Contestant], effort: Effort) -> dict[str, Rate]:
    """Throughput of one caller in plain code."""
    rounds: dict[str, list[tuple[float, float]]] = {one.name: [] for one in contestants}
    for number in range(effort.rounds + 1):
        for one in _turns(contestants, number):
            items = one.prepare(effort.calls)
            with _quiet():
                cpu, start = time.process_time(), time.perf_counter()
                for item in items:
                    one.call(item)
                wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            if number:
                rounds[one.name].append((len(items) / wall, cpu / len(items) * 1e6))
    return _medians(rounds)


Samples = dict[str, list[float]]
"""Seconds that calls have taken, by contestant."""


async def time_latencies(contestants: Sequence[Contestant], rounds: int, block: int, seen: Samples) -> None:
    """Blocks of calls, one contestant after the other, one caller; what each call took is added to `seen`."""
    clock = time.perf_counter
    for number in range(rounds + 1):
        for one in _turns(contestants, number):
            items, call, times = one.prepare(block), one.call, []
            with _quiet():
                for item in items:
                    start = clock()
                    await call(item)
                    times.append(clock() - start)
            if number:
                seen.setdefault(one.name, []).extend(times)


def typical(seen: Samples) -> dict[str, float]:
    """The median time of one call, in µs."""
    return {name: statistics.median(times) * 1e6 for name, times in seen.items()}


async def compare_latencies(
    contestants: Sequence[Contestant], rounds: int, block: int = 50
) -> dict[str, float]:
    """The median time of one call, in µs."""
    seen: Samples = {}
    await time_latencies(contestants, rounds, block, seen)
    return typical(seen)
