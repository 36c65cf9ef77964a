"""`python -m semel.testing.simulation`: explore schedules, or replay one.

Leaves with 1 when a promise was broken, with 3 when none was but the run proves nothing: a fault window was never hit, too
few calls ended after the faults, too many histories were not decided.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from semel.testing.simulation.plans import Plan
from semel.testing.simulation.published import publish
from semel.testing.simulation.reach import ended_share, shortcomings
from semel.testing.simulation.runner import Report, check, explore
from semel.testing.simulation.stories import described, told
from semel.testing.simulation.workloads import workload_of, workloads

CAMPAIGNS = {"test": 40_000, "long": 100_000, "release": 2_000_000}
INVALID = 3  # nothing was broken, and yet the run proves nothing
_MOST = 20  # failures that are told one by one
_EVERY = 10.0  # seconds between two lines of progress where no terminal shows one


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m semel.testing.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="how many seeds to run")
    campaigns = ", ".join(f"{name} {count:,}" for name, count in CAMPAIGNS.items())
    parser.add_argument(
        "--campaign", choices=CAMPAIGNS, help=f"as many schedules as belong to it: {campaigns}"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    parser.add_argument(
        "--partial", action="store_true", help="a few schedules: do not ask that every window is hit"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="write the figures into simulation.json and simulation.md there",
    )
    parser.add_argument("--workload", default="core", help=f"one of {', '.join(workloads())}")
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument("--plan", help="replay this plan, written as JSON, as a failure prints it")
    parser.add_argument(
        "--shrink", action="store_true", help="with --seed: the smallest plan that still breaks the promise"
    )
    parser.add_argument("--trace", action="store_true", help="with --seed or --plan: print what happened")
    options = parser.parse_args()
    code = _replay(options) if options.seed is not None or options.plan else _explore(options)
    sys.stdout.flush()
    os._exit(code)  # see SimLoop.graveyard


def _replay(options: argparse.Namespace) -> int:
    if options.plan:
        plan = msgspec.json.decode(options.plan, type=Plan)
    else:
        plan = workload_of(options.workload).plan(options.seed)
    broken, world = check(plan)
    if broken and options.shrink:
        print(told(options.seed, workload=options.workload))
        return 1
    print(described(plan))
    if options.trace:
        print("\n".join(["", *world.trace, ""]))
    print("\n".join(broken) if broken else "nothing was broken")
    return 1 if broken else 0


def _explore(options: argparse.Namespace) -> int:
    count = CAMPAIGNS[options.campaign] if options.campaign else options.schedules
    report = explore(
        options.first,
        count,
        seconds=options.seconds,
        progress=_Progress(count, options.workload),
        workload=options.workload,
    )
    print(
        f"\n{report.schedules} schedules in {report.seconds:.1f} s ({report.schedules / report.seconds:.0f} a second)"
    )
    _show(report)
    if options.report is not None:
        publish(options.report, options.workload, options.first, report, command=_repeat(options, report))
    if report.failures:
        first = report.failures[0][0]
        print(f"{len(report.failures)} seeds failed. The first of them, made smaller:\n")
        print(told(first, workload=options.workload))
        return 1
    missing = [] if options.partial else shortcomings(report, options.workload)
    for text in missing:
        print(f"INVALID: {text}")
    return INVALID if missing else 0


def _repeat(options: argparse.Namespace, report: Report) -> str:
    """What to type for the same schedules."""
    words = [
        "python -m semel.testing.simulation",
        f"--schedules {report.schedules}",
        f"--first {options.first}",
    ]
    words += [f"--workload {options.workload}"] if options.workload != "core" else []
    return " ".join([*words, f"--report {options.report}"])


def _show(report: Report) -> None:
    print(f"calls during the faults: {_counted(report.during)}")
    print(f"calls after the faults: {_counted(report.after)}; {ended_share(report.after):.1%} ended")
    print(f"  refused with {_counted(report.refusals)}")
    print(f"histories: {report.histories}, of which {report.undecided} too long to decide")
    print(f"keys whose effect was made twice, by mode: {_counted(report.doubled)}")
    for name, number in sorted(report.reached.items()):
        print(f"  {number:8d} {name}")


def _counted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(numbers.items()) if number) or "none"


def _command(seed: int, workload: str) -> str:
    named = "" if workload == "core" else f" --workload {workload}"
    return f"python -m semel.testing.simulation --seed {seed} --shrink --trace{named}"


class _Progress:
    """One line that is written over on a terminal; elsewhere a new one now and then. Failures are told at once."""

    def __init__(self, count: int, workload: str) -> None:
        self._count, self._workload = count, workload
        self._told = 0
        self._next = time.monotonic() + _EVERY

    def __call__(self, report: Report) -> None:
        for seed, broken in report.failures[self._told : _MOST]:
            print(f"\nFAILED {'; '.join(broken)}\n  {_command(seed, self._workload)}", flush=True)
        self._told = len(report.failures)
        rate = report.schedules / max(report.seconds, 0.001)
        left = (self._count - report.schedules) / max(rate, 0.001)
        line = f"{report.schedules:,} of {self._count:,} schedules, {rate:.0f} a second, {left:.0f} s left, "
        line += f"{len(report.failures)} failed"
        if sys.stdout.isatty():
            print(f"\r{line}\033[K", end="", flush=True)
        elif time.monotonic() > self._next:
            self._next = time.monotonic() + _EVERY
            print(line, flush=True)


if __name__ == "__main__":
    main()
