"""`python -m semel.testing.mutants`: plant bugs and see whether they are caught."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from semel.errors import ConfigurationError
from semel.testing.folders import see_to
from semel.testing.mutants import MUTANTS, Catch, catch, search, story
from semel.testing.mutants.hunt import replayed
from semel.testing.mutants.plant import recorded_seeds
from semel.testing.simulation.plans import plan_from
from semel.testing.simulation.published import publish_mutants

_SEEDS = Path(__file__).with_name("seeds.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m semel.testing.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant; all of them by default")
    parser.add_argument("--list", action="store_true", help="say what each one is, and plant nothing")
    parser.add_argument("--search", action="store_true", help="without the recorded seeds")
    parser.add_argument(
        "--most", type=int, default=20_000, help="with --search: schedules per mutant at most"
    )
    parser.add_argument("--first", type=int, default=0, help="with --search: the first seed")
    parser.add_argument(
        "--record",
        action="store_true",
        help="write down a seed where it is stale or missing; with --search, for each of them",
    )
    parser.add_argument(
        "--plan", metavar="JSON", help="with one NAME: what it does in this very plan, as a story prints it"
    )
    parser.add_argument(
        "--story", action="store_true", help="show what it does, in the smallest plan that is still caught"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="write the figures into mutants.json and simulation.md there",
    )
    options = parser.parse_args()
    names = options.names or list(MUTANTS)
    if unknown := [name for name in names if name not in MUTANTS]:
        parser.error(f"no mutant {unknown[0]!r}; --list names them all")
    if options.plan:
        return _replay(parser, names, options.plan)
    if options.list:
        for name in names:
            print(f"{name}: {MUTANTS[name].what} Caught by {MUTANTS[name].check}.")
        return 0
    if options.report is not None:
        try:
            see_to(options.report)
        except ConfigurationError as error:
            parser.error(str(error))
    caught = []
    for name in names:
        found = search(name, first=options.first, most=options.most) if options.search else catch(name)
        caught.append(found)
        _show(found, told=options.story)
        if options.record:
            _record(found)
    if options.report is not None:
        searched = f" --search --first {options.first} --most {options.most}" if options.search else ""
        command = f"python -m semel.testing.mutants{searched} --report {options.report}"
        publish_mutants(options.report, [_row(each) for each in caught], command=command)
    survived = [each.name for each in caught if not each.caught]
    stale = [each.name for each in caught if each.stale is not None]
    print(f"{len(caught) - len(survived)} of {len(caught)} caught; {len(stale)} recorded seeds were stale")
    if stale and not options.record:
        print(f"python -m semel.testing.mutants --record {' '.join(stale)}")
    return 1 if survived or (stale and not options.record) else 0


def _replay(parser: argparse.ArgumentParser, names: list[str], text: str) -> int:
    if len(names) != 1:
        parser.error("--plan shows one mutant: name it")
    try:
        told = replayed(names[0], plan_from(text))
    except ValueError as error:
        parser.error(f"--plan: {error}")
    print(told)
    return 0 if told.endswith("nothing was broken") else 1


def _show(found: Catch, *, told: bool) -> None:
    """A line about it as soon as it is known, and its story if that is wanted."""
    word = f"caught by {found.check}" if found.caught else f"SURVIVED {found.check}"
    more = f" (also {', '.join(found.others)})" if found.others else ""
    stale = "" if found.stale is None else f"; its seed {found.stale} is stale"
    print(f"{found.name:32s} {word}, {found.schedules} tried, {found.seconds:.1f} s{more}{stale}", flush=True)
    if told and found.seed is not None:
        print(f"\n{MUTANTS[found.name].what}\n{story(found.name, found.seed)}\n", flush=True)


def _row(found: Catch) -> dict[str, Any]:
    mutant = MUTANTS[found.name]
    return {
        "mutant": found.name,
        "caught by": f"{found.check} ({mutant.store})" * found.caught
        if mutant.store
        else found.check * found.caught,
        "seed": "–" if found.seed is None else str(found.seed),
        "schedules tried": found.schedules,
        "also seen by": " ".join(found.others),
        "what": mutant.what,
    }


def _record(found: Catch) -> None:
    seeds = {name: seed for name, seed in recorded_seeds().items() if name in MUTANTS}
    if found.seed is not None:
        seeds[found.name] = found.seed
    _SEEDS.write_text(json.dumps(dict(sorted(seeds.items())), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
