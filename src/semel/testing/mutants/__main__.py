"""`python -m semel.testing.mutants`: plant bugs and see whether they are caught."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from semel.testing.mutants import MUTANTS, Catch, catch, search
from semel.testing.mutants.plant import recorded_seeds

_SEEDS = Path(__file__).with_name("seeds.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m semel.testing.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant; all of them by default")
    parser.add_argument("--list", action="store_true", help="say what each one is, and plant nothing")
    parser.add_argument("--search", action="store_true", help="without the recorded seeds")
    parser.add_argument(
        "--most", type=int, default=20_000, help="with --search: schedules per mutant at most"
    )
    parser.add_argument("--record", action="store_true", help="search, and write the seeds down")
    options = parser.parse_args()
    names = options.names or list(MUTANTS)
    if unknown := [name for name in names if name not in MUTANTS]:
        parser.error(f"no mutant {unknown[0]!r}; --list names them all")
    if options.list:
        for name in names:
            print(f"{name}: {MUTANTS[name].what} Caught by {MUTANTS[name].check}.")
        return 0
    if options.record or options.search:
        caught = show(names, lambda name: search(name, most=options.most))
    else:
        caught = show(names, catch)
    if options.record:
        _record(caught)
    return 0 if all(each.caught for each in caught) else 1


def show(names: Iterable[str], hunt: Callable[[str], Catch]) -> list[Catch]:
    """Hunt each one and print a line about it as soon as it is known."""
    caught = []
    for name in names:
        found = hunt(name)
        word = f"caught by {found.check}" if found.caught else f"SURVIVED {found.check}"
        more = f" (also {', '.join(found.others)})" if found.others else ""
        print(f"{name:32s} {word}, {found.schedules} tried, {found.seconds:.1f} s{more}", flush=True)
        caught.append(found)
    return caught


def _record(caught: Iterable[Catch]) -> None:
    seeds = {name: seed for name, seed in recorded_seeds().items() if name in MUTANTS}
    seeds |= {each.name: each.seed for each in caught if each.seed is not None}
    _SEEDS.write_text(json.dumps(dict(sorted(seeds.items())), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
