"""Make a failing plan smaller while it still fails: fewer faults, workers, calls, then rounder numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from semel.testing.simulation.plans import Plan

__all__ = ["shrink"]


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, tries: int = 400) -> Plan:
    """The smallest plan found that still fails. Greedy: every accepted step starts over."""
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for candidate in _smaller(plan):
            tries -= 1
            if fails(candidate):
                plan, smaller = candidate, True
                break
            if tries <= 0:
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    replace = msgspec.structs.replace
    for index in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
    for simpler_store in (
        replace(plan, batches=False),
        replace(plan, cache=False),
        replace(plan, notifies=True),
        replace(plan, retention=None),
    ):
        if simpler_store != plan:
            yield simpler_store
    for number, ops in enumerate(plan.workers):
        # A worker's place stays: faults name workers by number.
        for index in range(len(ops)):
            left = ops[:index] + ops[index + 1 :]
            yield replace(plan, workers=(*plan.workers[:number], left, *plan.workers[number + 1 :]))
    for number, ops in enumerate(plan.workers):
        for index, op in enumerate(ops):
            for easier in (
                replace(op, after=0.0),
                replace(op, work=0.0),
                replace(op, kind="execute"),
                replace(op, fails=False),
            ):
                if easier != op:
                    simpler = (*ops[:index], easier, *ops[index + 1 :])
                    yield replace(
                        plan, workers=(*plan.workers[:number], simpler, *plan.workers[number + 1 :])
                    )
