"""Let the named check look for a mutant: with its recorded seed, by search, or by a clause of the contract suite."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from semel.testing import services
from semel.testing.mutants.plant import MUTANTS, Mutant, planted, recorded_seeds
from semel.testing.mutants.trials import Trials
from semel.testing.simulation.plans import Plan
from semel.testing.simulation.runner import Report, check, explore, names_of
from semel.testing.simulation.stories import described, told_of
from semel.testing.simulation.workloads import workload_of

__all__ = ["Catch", "catch", "clause_of", "replayed", "search", "story"]

_AFRESH = 20_000  # schedules


class Catch(msgspec.Struct, frozen=True):
    """What became of a mutant. `seed` is None when no schedule caught it, or none was needed.

    `stale` is the recorded seed when it does not catch the mutant any more: the product, or the plans, have moved on.
    """

    name: str
    check: str
    caught: bool
    schedules: int
    seconds: float
    seed: int | None = None
    others: tuple[str, ...] = ()
    """Further checks that saw it."""
    stale: int | None = None


def catch(name: str) -> Catch:
    """The quick way: the recorded seed, or the clause. A seed that is stale, or missing, is looked for anew, and told."""
    mutant = MUTANTS[name]
    if mutant.store:
        return clause_of(mutant)
    seed = recorded_seeds().get(name)
    found = None if seed is None else _hunted(mutant, seed, 1)
    if found is not None and found.caught:
        return found
    return msgspec.structs.replace(_hunted(mutant, 0, _AFRESH), stale=seed)


def search(name: str, *, first: int = 0, most: int = 20_000) -> Catch:
    """The honest way: seeds from `first` on until the named check has caught it, `most` of them at the most."""
    mutant = MUTANTS[name]
    return clause_of(mutant) if mutant.store else _hunted(mutant, first, most)


def _hunted(mutant: Mutant, first: int, most: int) -> Catch:
    def found(report: Report) -> bool:
        return any(names_of(broken) & {mutant.check} for _, broken in report.failures)

    report = explore(
        first, most, setup=_planter(mutant.name), until=found, chunk=100, workload=mutant.workload
    )
    hits = sorted(seed for seed, broken in report.failures if mutant.check in names_of(broken))
    every = {name for _, broken in report.failures for name in names_of(broken)}
    return Catch(
        mutant.name,
        mutant.check,
        caught=bool(hits),
        schedules=hits[0] - first + 1 if hits else report.schedules,
        seconds=report.seconds,
        seed=hits[0] if hits else None,
        others=tuple(sorted(every - {mutant.check})),
    )


def _planter(name: str) -> Callable[[], Any]:
    # Kept by the closure and never left: the process ends with it.
    stack = ExitStack()
    return lambda: stack.enter_context(planted(name))


def story(name: str, seed: int) -> str:
    """What a mutant does, in the smallest plan that its check still catches: told in a process of its own."""
    return _apart(name, lambda mutant: _story(mutant, workload_of(mutant.workload).plan(seed)))


def replayed(name: str, plan: Plan) -> str:
    """What a mutant does in this very plan, line by line: told in a process of its own."""
    return _apart(name, lambda _: _once(plan))


def _story(mutant: Mutant, plan: Plan) -> str:
    return told_of(plan, wanted={mutant.check}, mutant=mutant.name)


def _once(plan: Plan) -> str:
    broken, world = check(plan)
    return "\n".join([described(plan), "", *world.trace, "", *(broken or ["nothing was broken"])])


def _apart(name: str, tell: Callable[[Mutant], str]) -> str:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_tell, args=(theirs, name, tell))
    child.start()
    theirs.close()
    try:
        return ours.recv_bytes().decode()
    except EOFError:
        return "the process that was to tell it ended without a word"
    finally:
        ours.close()
        child.join()


def _tell(pipe: Any, name: str, tell: Callable[[Mutant], str]) -> None:
    with planted(name) as mutant:
        pipe.send_bytes(tell(mutant).encode())
    pipe.close()
    os._exit(0)


# ------------------------------------------------------------------------------------------------- real stores


def clause_of(mutant: Mutant, *, plant: bool = True) -> Catch:
    """Run the contract's clause on the real store, in a process of its own; caught when the clause fails."""
    began = time.monotonic()
    with ExitStack() as stack:
        url = _served(mutant.store, stack)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_try_clause, args=(theirs, mutant, url, plant))
        child.start()
        theirs.close()
        try:
            word = ours.recv_bytes().decode()
        except EOFError:
            word = "died: the process ended without a word"
        child.join()
    if word not in ("passed", "failed"):
        raise AssertionError(f"{mutant.name}: the clause could not be tried: {word}")
    return Catch(
        mutant.name,
        mutant.check,
        caught=word == "failed",
        schedules=1,
        seconds=time.monotonic() - began,
    )


def _served(store: str, stack: ExitStack) -> str:
    if store == "sqlite":
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        return f"sqlite:///{Path(folder) / 'semel.db'}"
    if store == "redis":
        return stack.enter_context(services.redis()).url
    if store == "mysql":
        return stack.enter_context(services.mariadb()).database(driver="pymysql")
    return stack.enter_context(services.postgres()).database(driver="psycopg")


def _try_clause(pipe: Any, mutant: Mutant, url: str, plant: bool) -> None:
    with ExitStack() as stack:
        if plant:
            stack.enter_context(planted(mutant.name))
        try:
            getattr(Trials(url), mutant.check)()
            word = "passed"
        except AssertionError:
            word = "failed"
        except BaseException:  # noqa: BLE001 - told to the parent, which raises
            word = traceback.format_exc()
    pipe.send_bytes(word.encode())
    pipe.close()
    os._exit(0)
