"""A plan and what became of it, for people: the smallest plan that still fails, its trace, and the command to see it again."""

from __future__ import annotations

import shlex
from collections.abc import Collection

import msgspec

from semel.testing.simulation.invariants import CHECKS
from semel.testing.simulation.plans import Fault, Op, Plan
from semel.testing.simulation.runner import check, names_of
from semel.testing.simulation.shrink import shrink
from semel.testing.simulation.workloads import workload_of

__all__ = ["command_of", "described", "loading", "told", "told_of"]

_COMMAND = "python -m semel.testing.simulation"
_WITH_A_BUG = "python -m semel.testing.mutants"


def told(seed: int, *, workload: str = "core") -> str:
    """The story of a seed."""
    return told_of(workload_of(workload).drawn(seed))


def told_of(plan: Plan, *, wanted: Collection[str] = (), mutant: str = "") -> str:
    """The story of a plan, made smaller while it still breaks a promise that is `wanted`: by default the first that it breaks.

    `mutant` names the bug that is planted meanwhile, so that the command at the end plants it too.
    """
    broken, world = check(plan)
    # Not any of them: made smaller, a plan would drift to whichever is the easiest to break.
    names = names_of(broken) & set(wanted) or names_of(broken[:1])
    if broken:
        plan = shrink(plan, lambda each: bool(names & names_of(check(each)[0])))
        broken, world = check(plan)
    lines = [described(plan), "", *world.trace, ""]
    lines += broken or ["nothing was broken"]
    lines += [f"  ({name}: {CHECKS[name]})" for name in sorted(names_of(broken) & CHECKS.keys())]
    if broken:
        lines += ["", "the same again:", f"  {command_of(plan, mutant)}"]
    return "\n".join(lines)


def command_of(plan: Plan, mutant: str = "") -> str:
    """What to type to run this very plan, with this bug in it."""
    command = f"{_WITH_A_BUG} {mutant}" if mutant else f"{_COMMAND} --trace{loading(plan.workload)}"
    return f"{command} --plan {shlex.quote(msgspec.json.encode(plan).decode())}"


def loading(workload: str) -> str:
    """What the command line needs to know a workload that another module registers."""
    module = workload_of(workload).plan.__module__
    return "" if module.startswith("semel.testing.simulation.") else f" --load {module}"


def described(plan: Plan) -> str:
    """A plan in a few lines."""
    store = [name for name in ("batches", "cache", "ids", "doubts", "warns") if getattr(plan, name)]
    if not plan.notifies:
        store.append("no wake-ups")
    if plan.step:
        store.append(f"step under {plan.step}")
    times = {name: getattr(plan, name) for name in ("retention", "tombstone", "purge_every")}
    store += [f"{name} {value:g} s" for name, value in times.items() if value]
    head = f"seed {plan.seed} of {plan.workload}: mode {plan.mode}, lease {plan.lease:g} s"
    lines = [", ".join([head, f"latency about {plan.latency * 1000:g} ms", *store])]
    for number, ops in enumerate(plan.workers):
        lines += [f"  worker {number}: {_op(op)}" for op in ops]
    lines += [
        f"  clock of worker {number}: {offset:+g} s, {rate:g} times as fast"
        for number, (offset, rate) in enumerate(plan.clocks)
    ]
    lines += [f"  fault: {_fault(fault)}" for fault in plan.faults] or ["  no fault"]
    return "\n".join(lines)


def _op(op: Op) -> str:
    text = f"at {op.after:.3f} {op.kind} {op.name}"
    if op.kind in ("execute", "consume", "claim"):
        text += f", works {op.work:g} s, waits {op.wait:g} s at most"
    if op.request:
        text += ", another request"
    if op.fails:
        text += f", fails (on_error {op.on_error or 'by default'})"
    if op.policy:
        text += f", on_unknown {op.policy}"
    return text + (f", says {op.word}" if op.kind == "resolve" else "")


def _fault(fault: Fault) -> str:
    where = f"{fault.kind} of worker {fault.worker}"
    if fault.kind in ("store-down", "failover", "clock"):
        where = fault.kind
    if fault.point:
        where += f" ({fault.point}, time {fault.nth})"
    elif fault.at:
        where += f" at {fault.at:.3f}"
    else:
        where += f", number {fault.nth}"
    return where + (f", {fault.span:g} s" if fault.span else "")
