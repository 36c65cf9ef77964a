"""Many schedules on all cores, with what they reached and what they broke."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from semel.testing.simulation.invariants import doubled, violations
from semel.testing.simulation.plans import Plan
from semel.testing.simulation.workloads import workload_of
from semel.testing.simulation.world import World

__all__ = ["CHUNK", "Report", "check", "explore", "names_of"]

CHUNK = 200  # schedules per forked process: what killed workers leave behind is never finalized, so processes end early

_ENDS = frozenset({"KeyMismatch", "Flaw", "InProgress", "PreviousFailure", "KeyExpired"})


class Report(msgspec.Struct):
    schedules: int = 0
    seconds: float = 0.0
    failures: list[tuple[int, list[str]]] = []
    reached: dict[str, int] = {}
    doubled: dict[str, int] = {}
    answered: int = 0
    answered_well: int = 0

    def add(self, other: Report) -> None:
        self.schedules += other.schedules
        self.failures += other.failures
        self.reached = dict(Counter(self.reached) + Counter(other.reached))
        self.doubled = dict(Counter(self.doubled) + Counter(other.doubled))
        self.answered += other.answered
        self.answered_well += other.answered_well


def check(plan: Plan) -> tuple[list[str], World]:
    """Run one plan; what it broke, in words."""
    world = World(plan)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - a deadlock or a crash of the flow is a finding like any other
        last = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"], world  # noqa: PTH119
    return violations(world), world


def explore(
    first: int,
    count: int,
    *,
    seconds: float | None = None,
    processes: int | None = None,
    progress: Callable[[Report], None] | None = None,
    setup: Callable[[], Any] | None = None,
    workload: str = "core",
    until: Callable[[Report], bool] | None = None,
    chunk: int = CHUNK,
) -> Report:
    """Seeds `first` … `first + count - 1`, or as many as fit into `seconds`, or until `until` says so.

    `setup` is called in every forked process before its first schedule: a mutant is planted there.
    """
    began = time.monotonic()
    total = Report()
    context = multiprocessing.get_context("fork")
    running: dict[Any, Any] = {}
    chunks = _chunks(first, count, chunk)
    while True:
        late = (seconds is not None and time.monotonic() - began > seconds) or (
            until is not None and until(total)
        )
        while not late and len(running) < (processes or os.cpu_count() or 1):
            seeds = next(chunks, None)
            if seeds is None:
                break
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_work, args=(theirs, seeds, setup, workload))
            child.start()
            theirs.close()
            running[ours] = child
        if not running:
            break
        for ready in multiprocessing.connection.wait(list(running)):
            child = running.pop(ready)
            total.add(_received(ready))
            child.join()
            if progress is not None:
                total.seconds = time.monotonic() - began
                progress(total)
    total.seconds = time.monotonic() - began
    return total


def _chunks(first: int, count: int, size: int) -> Iterator[range]:
    for start in range(first, first + count, size):
        yield range(start, min(start + size, first + count))


def _received(pipe: Any) -> Report:
    try:
        text = pipe.recv_bytes()
    except EOFError:
        return Report(failures=[(-1, ["a process of the simulator died without a word"])])
    return msgspec.json.decode(text, type=Report)


def _work(pipe: Any, seeds: range, setup: Callable[[], Any] | None, workload: str) -> None:
    if setup is not None:
        setup()
    report, plan = Report(), workload_of(workload).plan
    reached: Counter[str] = Counter()
    twice: Counter[str] = Counter()
    for seed in seeds:
        broken, world = check(plan(seed))
        report.schedules += 1
        reached.update(world.reached)
        twice[world.plan.mode] += doubled(world)
        report.answered += len(world.answers)
        report.answered_well += sum(
            not answer.error or answer.error in _ENDS or answer.op.kind in ("resolve", "forget")
            for answer in world.answers
        )
        if broken:
            report.failures.append((seed, broken))
    report.reached, report.doubled = dict(reached), dict(twice)
    pipe.send_bytes(msgspec.json.encode(report))
    pipe.close()
    os._exit(0)


def names_of(broken: list[str]) -> set[str]:
    """The checks behind a list of broken promises."""
    return {text.partition(":")[0] for text in broken}
