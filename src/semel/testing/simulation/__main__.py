"""`python -m semel.testing.simulation`: explore schedules, or replay one.

Leaves with 1 when a promise was broken, with 3 when none was but the run proves nothing: a campaign was not played to its
end, a fault window was never hit, too few calls ended after the faults, histories were not asked for or not decided, a mode
that promises less never showed it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

from semel.errors import ConfigurationError
from semel.testing.folders import see_to
from semel.testing.simulation.plans import Plan, plan_from
from semel.testing.simulation.published import publish
from semel.testing.simulation.reach import ended_share, shortcomings
from semel.testing.simulation.runner import Report, check, explore
from semel.testing.simulation.stories import described, loading, told, told_of
from semel.testing.simulation.workloads import workload_of, workloads

CAMPAIGNS = {"test": 40_000, "long": 100_000, "release": 2_000_000}
INVALID = 3  # nothing was broken, and yet the run proves nothing
_MOST = 20  # failures that are told one by one
_EVERY = 10.0  # seconds between two lines of progress where no terminal shows one


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.load:
        _load(parser, options.load)
    if options.workload not in workloads():
        parser.error(
            f"no workload {options.workload!r}; there are {', '.join(workloads())} (--load MODULE knows more)"
        )
    plan = _plan(parser, options)
    if options.report is not None:
        try:
            see_to(options.report)
        except ConfigurationError as error:
            parser.error(str(error))
    try:
        code = _explore(options) if plan is None else _replay(plan, options)
    except KeyboardInterrupt:
        print("\ninterrupted")
        code = 130
    sys.stdout.flush()
    os._exit(code)  # see SimLoop.graveyard


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m semel.testing.simulation", description=__doc__)
    many = parser.add_argument_group("many schedules")
    many.add_argument(
        "--schedules", type=_count, default=10_000, metavar="N", help="how many seeds to run (10,000)"
    )
    campaigns = ", ".join(f"{name} {count:,}" for name, count in CAMPAIGNS.items())
    many.add_argument("--campaign", choices=CAMPAIGNS, help=f"as many schedules as belong to it: {campaigns}")
    many.add_argument("--first", type=int, default=0, metavar="N", help="the first seed (0)")
    many.add_argument("--seconds", type=_seconds, metavar="S", help="stop after so many seconds")
    many.add_argument(
        "--partial",
        action="store_true",
        help="a few schedules, one at least: do not ask that every window is hit",
    )
    many.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="write the figures into simulation.json and simulation.md there",
    )
    one = parser.add_argument_group("one schedule again")
    which = one.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, metavar="N", help="replay this one seed")
    which.add_argument(
        "--plan",
        metavar="JSON",
        help="replay this plan, as a failure prints it (- reads it from standard input)",
    )
    one.add_argument("--shrink", action="store_true", help="the smallest plan that still breaks the promise")
    one.add_argument("--trace", action="store_true", help="print what happened, line by line")
    parser.add_argument(
        "--workload", default="core", metavar="NAME", help=f"one of {', '.join(workloads())} (core)"
    )
    parser.add_argument(
        "--load", metavar="MODULE", help="import it first: it registers a workload of its own"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of schedules: 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds: more than 0")
    return seconds


def _load(parser: argparse.ArgumentParser, module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        parser.error(f"--load {module}: {error}")


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Plan | None:
    """The one schedule that is asked for, if it is one."""
    if options.plan is None:
        try:
            plan = workload_of(options.workload).drawn(
                options.first if options.seed is None else options.seed
            )
        except ValueError as error:
            parser.error(f"--workload: {error}")
        if options.seed is None and (options.shrink or options.trace):
            parser.error("--shrink and --trace show one schedule: name it with --seed or --plan")
        return None if options.seed is None else plan
    try:
        plan = plan_from(sys.stdin.read() if options.plan == "-" else options.plan)
        workload_of(plan.workload)
    except ValueError as error:
        parser.error(f"--plan: {error}")
    return plan


def _replay(plan: Plan, options: argparse.Namespace) -> int:
    broken, world = check(plan)
    if broken and options.shrink:
        print(told_of(plan))
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
        f"\n{report.schedules} schedules in {report.seconds:.1f} s"
        f" ({report.schedules / max(report.seconds, 0.001):.0f} a second)"
    )
    _show(report)
    if options.report is not None and report.schedules:
        publish(options.report, options.workload, options.first, report, command=_repeat(options, report))
    if report.failures:
        print(f"{len(report.failures)} seeds failed.")
        # A process that died may take this one with it: its seeds are named, and left to whoever looks.
        for seed in [seed for seed, broken in report.failures if not broken[0].startswith("died:")][:1]:
            print(f"The first of them, made smaller:\n\n{told(seed, workload=options.workload)}")
        return 1
    missing = _missing(options, report)
    for text in missing:
        print(f"INVALID: {text}")
    return INVALID if missing else 0


def _missing(options: argparse.Namespace, report: Report) -> list[str]:
    if options.partial and report.schedules:
        return []
    wanted = CAMPAIGNS[options.campaign] if options.campaign else 1
    return shortcomings(report, options.workload, wanted=wanted)


def _repeat(options: argparse.Namespace, report: Report) -> str:
    """What to type for the same schedules."""
    words = [
        "python -m semel.testing.simulation",
        f"--schedules {report.schedules}",
        f"--first {options.first}",
    ]
    words += [f"--workload {options.workload}"] if options.workload != "core" else []
    words += [loading(options.workload).strip()] if options.load else []
    return " ".join([*words, f"--report {options.report}"])


def _show(report: Report) -> None:
    shares = [number / max(report.schedules, 1) for number in (report.faultless, report.untouched)]
    print(f"schedules without a fault: {shares[0]:.1%}; in which no fault struck anything: {shares[1]:.1%}")
    print(f"calls during the faults: {_counted(report.during)}")
    print(f"calls after the faults: {_counted(report.after)}; {ended_share(report.after):.1%} ended")
    print(f"  refused with {_counted(report.refusals)}")
    print(f"histories: {report.histories}, of which {report.undecided} too long to decide")
    print(f"keys whose effect was made twice, by mode: {_counted(report.doubled)}")
    print(f"keys whose outcome was told as unknown, by mode: {_counted(report.unknown)}")
    for name, number in sorted(report.reached.items()):
        print(f"  {number:8d} {name}")


def _counted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(numbers.items()) if number) or "none"


def _command(seed: int, workload: str) -> str:
    named = "" if workload == "core" else f" --workload {workload}"
    return f"python -m semel.testing.simulation --seed {seed} --shrink --trace{named}{loading(workload)}"


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
