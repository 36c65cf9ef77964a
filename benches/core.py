"""./bench core [redis|postgres|sqlite|waiters|growth|peers …] [--quick] [--write] [--into FOLDER]

Measures every figure of the core's speed goals on private servers and prints it: value, goal, verdict, both terms.
Without a section all of them run (about ten minutes) and docs/bench is written; `--write` writes it also after some of
them, keeping the others' figures. `--quick` shows in seconds that the program works: its figures mean nothing, and
docs/bench is left alone. The exit code does not depend on the figures: only a broken program fails.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benches.core_parts import page
from benches.core_parts.measure import Effort, Figure, say
from semel.testing import services

# section → (module, packages whose versions matter, server)
SECTIONS = {
    "redis": ("on_redis", ("redis", "hiredis"), "redis-server"),
    "postgres": ("on_postgres", ("asyncpg",), "postgres"),
    "sqlite": ("on_sqlite", ("aiosqlite",), ""),
    "waiters": ("waiters", ("redis", "asyncpg"), ""),
    "growth": ("growth", ("redis", "hiredis"), "redis-server"),
    "peers": ("peers", (), ""),
}


def main() -> int:
    options = _options()
    effort = Effort.of(quick=options.quick)
    chosen = options.section or list(SECTIONS)
    report = page.load(options.into) if options.section else page.Report()
    for name in chosen:
        print(f"== {page.TITLES[name]}", flush=True)
        report.sections[name] = _run(name, effort)
    if options.write or options.into != page.FOLDER or not (options.section or options.quick):
        page.write(report, options.into)
        say(f"written: {options.into}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./bench core", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", nargs="*", help=f"{', '.join(SECTIONS)}; default: all")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; figures mean nothing"
    )
    parser.add_argument("--write", action="store_true", help="write docs/bench also after some sections")
    parser.add_argument("--into", type=Path, default=page.FOLDER, help="write there instead of docs/bench")
    options = parser.parse_args()
    if unknown := [name for name in options.section if name not in SECTIONS]:
        parser.error(f"there is no section {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}")
    return options


def _run(name: str, effort: Effort) -> page.Section:
    module, packages, server = SECTIONS[name]
    part = import_module(f"benches.core_parts.{module}")
    before = os.getloadavg()[0]
    bench: Callable[[Effort], list[Figure]] = part.bench
    figures = bench(effort)
    for figure in figures:
        print(figure, flush=True)
    left_out: dict[str, str] = getattr(part, "LEFT_OUT", {})
    for missing, why in left_out.items():
        print(f"left out: {missing}: {why}")
    return page.Section(
        date=dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d"),
        command=f"./bench core {name}{' --quick' if effort.quick else ''}",
        load=f"{before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores",
        versions={
            "Python": platform.python_version(),
            **page.versions("semel", *packages),
            **getattr(part, "VERSIONS", {}),
            **_server(server),
        },
        figures=figures,
        left_out=dict(left_out),
    )


def _server(name: str) -> dict[str, str]:
    if name == "redis-server":
        with services.redis() as server:
            return {"Redis": server.info("server")["redis_version"]}
    if name == "postgres":
        with services.postgres() as database:
            return {"PostgreSQL": database.execute("show server_version")[0][0].split()[0]}
    return {}


if __name__ == "__main__":
    sys.exit(main())
