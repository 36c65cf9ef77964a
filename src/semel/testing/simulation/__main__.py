"""`python -m semel.testing.simulation`: explore schedules, or replay one."""

from __future__ import annotations

import argparse
import os
import sys

from semel.testing.simulation.runner import Report, dump, explore, replay
from semel.testing.simulation.workloads import workloads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=2_000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument("--workload", default="core", help=f"one of {', '.join(workloads())}")
    parser.add_argument(
        "--shrink", action="store_true", help="with --seed: find the smallest plan that still fails"
    )
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happened")
    options = parser.parse_args()
    code = _replay(options) if options.seed is not None else _explore(options)
    sys.stdout.flush()
    os._exit(code)  # see SimLoop.graveyard


def _replay(options: argparse.Namespace) -> int:
    plan, broken, world = replay(options.seed, smaller=options.shrink, workload=options.workload)
    print(dump(plan))
    if options.trace:
        print("\n".join(world.trace))
    print("\n".join(broken) if broken else "nothing was broken")
    return 1 if broken else 0


def _explore(options: argparse.Namespace) -> int:
    report = explore(
        options.first,
        options.schedules,
        seconds=options.seconds,
        progress=_progress,
        workload=options.workload,
    )
    print()
    print(
        f"{report.schedules} schedules in {report.seconds:.1f} s ({report.schedules / report.seconds:.0f} a second)"
    )
    print(f"calls that ended well: {report.answered_well} of {report.answered}")
    print(f"keys whose effect was made twice, by mode: {report.doubled}")
    for name, count in sorted(report.reached.items()):
        print(f"  {count:8d} {name}")
    for seed, broken in report.failures[:20]:
        print(
            f"FAILED {'; '.join(broken)}\n  python -m semel.testing.simulation --seed {seed} --shrink --trace"
        )
    return 1 if report.failures else 0


def _progress(report: Report) -> None:
    if sys.stdout.isatty():
        print(f"\r{report.schedules} schedules, {len(report.failures)} failures", end="", flush=True)


if __name__ == "__main__":
    main()
