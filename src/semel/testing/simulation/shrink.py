"""Make a failing plan smaller while it still fails: fewer faults, workers, calls, then rounder numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from semel.testing.simulation.plans import Op, Plan

__all__ = ["shrink"]

replace = msgspec.structs.replace

_PLAINEST = {
    "batches": False,
    "cache": False,
    "notifies": True,
    "purge_every": None,
    "tombstone": 0.0,
    "retention": None,
    "ids": False,
    "doubts": False,
    "warns": False,
    "clocks": (),
    "posts": False,
}


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
    for index in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
    for setting, plainest in _PLAINEST.items():
        if getattr(plan, setting) != plainest:
            yield replace(plan, **{setting: plainest})
    if plan.workers and not plan.workers[-1]:
        yield replace(plan, workers=plan.workers[:-1])
    for number, ops in enumerate(plan.workers):
        # A worker's place stays: faults name workers by number.
        for index in range(len(ops)):
            yield _with(plan, number, ops[:index] + ops[index + 1 :])
    for number, ops in enumerate(plan.workers):
        for index, op in enumerate(ops):
            for easier in _easier(op):
                yield _with(plan, number, (*ops[:index], easier, *ops[index + 1 :]))
    for index, fault in enumerate(plan.faults):
        rounder = replace(fault, at=_round(fault.at), span=_round(fault.span))
        if rounder != fault:
            yield replace(plan, faults=(*plan.faults[:index], rounder, *plan.faults[index + 1 :]))


def _with(plan: Plan, number: int, ops: tuple[Op, ...]) -> Plan:
    return replace(plan, workers=(*plan.workers[:number], ops, *plan.workers[number + 1 :]))


def _easier(op: Op) -> Iterator[Op]:
    for change in (
        {"after": 0.0},
        {"after": _round(op.after)},
        {"work": 0.0},
        {"kind": "execute"},
        {"fails": False, "on_error": ""},
        {"labels": ""},
        {"policy": ""},
        {"request": 0},
    ):
        easier = replace(op, **change)
        if easier != op:
            yield easier


def _round(seconds: float) -> float:
    """To a tenth; a time that is set stays set, since zero means never."""
    return round(seconds, 1) or seconds
