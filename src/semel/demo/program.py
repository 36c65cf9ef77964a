"""The command: options, start, end, exit code."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from semel import Semel
from semel.demo.ledger import read
from semel.demo.race import Plan, Race
from semel.demo.summary import judge
from semel.demo.view import show

__all__ = ["main"]

N = TypeVar("N", int, float)


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m semel.demo") -> int:
    """Run the demo; 0 if every key has exactly one effect, 1 if not, 130 after Ctrl-C. `program` is named in its errors."""
    options = _parser(program).parse_args(arguments)
    plan = Plan(options.workers, options.keys, options.seconds, options.lease)
    print(
        f"semel: {plan.workers} processes race for {plan.keys} keys; each of {plan.all_callers} callers calls every key. "
        "One process gets killed."
    )
    with tempfile.TemporaryDirectory(prefix="semel-demo-") as folder:
        race = Race(plan, Path(folder))
        try:
            race.start()
            show(race, plain=options.plain)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130
        finally:
            race.stop()
        with Semel(f"sqlite:///{folder}/semel.db", operation="orders.charge", timeout=20) as once:
            verdict = judge(race, read(Path(folder) / "ledger.txt"), once)
    print(verdict.text)
    return 1 if verdict.faults else 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Callers in several processes race for the same keys over one SQLite file; one of them is killed.",
    )
    number = parser.add_argument
    number("--workers", type=_at_least(2, int), default=4, metavar="N", help="processes, 2 or more (4)")
    number("--keys", type=_at_least(3, int), default=150, metavar="N", help="keys, 3 or more (150)")
    number(
        "--seconds",
        type=_at_least(0.1, float),
        default=10.0,
        metavar="S",
        help="about how long it takes (10)",
    )
    number(
        "--lease",
        type=_at_least(0.2, float),
        default=3.0,
        metavar="S",
        help="a dead owner is replaced after this (3)",
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of a live table")
    return parser


def _at_least(least: N, number: Callable[[str], N]) -> Callable[[str], N]:
    def parse(text: str) -> N:
        value = number(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    parse.__name__ = "number"  # argparse names it in its errors
    return parse
