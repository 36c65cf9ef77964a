"""Many schedules on all cores, with what they reached and what they broke."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from semel.testing.simulation.invariants import doubled, violations
from semel.testing.simulation.plans import Plan
from semel.testing.simulation.reach import class_of, is_struck
from semel.testing.simulation.workloads import workload_of
from semel.testing.simulation.world import World

__all__ = ["CHUNK", "Report", "check", "explore", "names_of"]

CHUNK = 200  # schedules per forked process: what killed workers leave behind is never finalized, so processes end early


class Report(msgspec.Struct):
    schedules: int = 0
    faultless: int = 0
    """Schedules whose plan has no fault."""
    untouched: int = 0
    """Schedules in which no fault struck anything: these, and those whose faults came to nothing."""
    seconds: float = 0.0
    failures: list[tuple[int, list[str]]] = []
    reached: dict[str, int] = {}
    doubled: dict[str, int] = {}
    """Keys whose effect was made more than once, by mode."""
    unknown: dict[str, int] = {}
    """Keys of which a caller was told that nobody knows their outcome, by mode."""
    during: dict[str, int] = {}
    """Calls that began before the last fault had ended, by how they ended (`reach.CLASSES`)."""
    after: dict[str, int] = {}
    """Calls that began afterwards: of these most must end, or the run proves nothing."""
    refusals: dict[str, int] = {}
    """What those of them were told that have to ask again, by error."""
    histories: int = 0
    undecided: int = 0
    """Histories whose search for an order was given up."""

    def add(self, other: Report) -> None:
        self.failures += other.failures
        for name in ("schedules", "faultless", "untouched", "histories", "undecided"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("reached", "doubled", "unknown", "during", "after", "refusals"):
            mine: dict[str, int] = getattr(self, name)
            for key, number in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + number


def check(plan: Plan) -> tuple[list[str], World]:
    """Run one plan; what it broke, in words."""
    world = World(plan)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - a deadlock or a crash of the flow is a finding like any other
        last = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"], world
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

    `setup` is called in every forked process before its first schedule: a mutant is planted there. ValueError: no such
    workload, or its plans are another's.
    """
    workload_of(workload).drawn(first)  # here, where it is heard
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
            running[ours] = child, seeds
        if not running:
            break
        for ready in multiprocessing.connection.wait(list(running)):
            child, seeds = running.pop(ready)
            total.add(_received(ready, seeds))
            child.join()
            if progress is not None:
                total.seconds = time.monotonic() - began
                progress(total)
    total.seconds = time.monotonic() - began
    return total


def _chunks(first: int, count: int, size: int) -> Iterator[range]:
    for start in range(first, first + count, size):
        yield range(start, min(start + size, first + count))


def _received(pipe: Any, seeds: range) -> Report:
    try:
        text = pipe.recv_bytes()
    except EOFError:
        died = f"died: the process that ran seeds {seeds.start} to {seeds.stop - 1} ended without a word"
        return Report(failures=[(seeds.start, [died])])
    finally:
        pipe.close()
    return msgspec.json.decode(text, type=Report)


def _work(pipe: Any, seeds: range, setup: Callable[[], Any] | None, workload: str) -> None:
    gc.disable()  # what a schedule leaves stays until this process ends, soon: to look through it again and again frees nothing
    if setup is not None:
        setup()
    report, known = Report(), workload_of(workload)
    for seed in seeds:
        broken, world = check(known.drawn(seed))
        report.add(_tally(world))
        if broken:
            report.failures.append((seed, broken))
    pipe.send_bytes(msgspec.json.encode(report))
    pipe.close()
    os._exit(0)


def _tally(world: World) -> Report:
    """One schedule as numbers."""
    during: Counter[str] = Counter()
    after: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    calm = world.calm_at
    for answer in world.answers:
        kind = class_of(answer)
        if answer.began < calm:
            during[kind] += 1
            continue
        after[kind] += 1
        if kind == "refused":
            refusals[answer.error] += 1
    # What the audit asked again because the answer had got lost is a refusal as well.
    after["refused"] += world.asked_again
    doubts = {answer.op.name for answer in world.answers if answer.error == "OutcomeUnknown"}
    twice: dict[str, int] = {world.plan.mode: doubled(world)}
    return Report(
        1,
        faultless=not world.plan.faults,
        untouched=not is_struck(world),
        reached=dict(world.reached),
        doubled=twice,
        unknown={world.plan.mode: len(doubts)},
        during=dict(during),
        after=dict(after),
        refusals=dict(refusals),
        histories=world.histories,
        undecided=world.undecided,
    )


def names_of(broken: list[str]) -> set[str]:
    """The checks behind a list of broken promises."""
    return {text.partition(":")[0] for text in broken}
