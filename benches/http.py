"""./bench http [--quick] [--write] [--into FOLDER]

Measures the middleware over FastAPI and Starlette against the bare applications: one uvicorn worker each, Redis, wrk
with 32 connections, in turns in one run. `--quick` shows in seconds that the program works: its figures mean nothing.
The exit code does not depend on the figures: only a broken program fails.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benches.core_parts import page
from benches.core_parts.measure import Figure, Term, say
from benches.http_parts.load import Rate, Target, compare, serving
from semel.testing import services

_HEAD = """\
# Speed of the HTTP middleware

Written by `./bench http`; do not edit it by hand.

Each figure is a ratio of two applications that were asked in turns in one run: one uvicorn worker each (asyncio,
httptools), wrk with 32 connections, a POST of 55 bytes of JSON, records in Redis on the same machine. *fresh*: every
request has a new key; *replay*: every request repeats one of 100 that are done; *no key*: the middleware is there and
the request has none. What a goal was missed by is told, not hidden.

![Each figure as a share of its goal](http.svg)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./bench http", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; figures mean nothing"
    )
    parser.add_argument("--write", action="store_true", help="write docs/bench/http.*")
    parser.add_argument("--into", type=Path, default=page.FOLDER, help="write there instead of docs/bench")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    figures: list[Figure] = []
    version = ""
    for kind, goals in (("fastapi", (0.75, 1.5)), ("starlette", (0.6, 0.8))):
        say(f"== {kind}")
        with services.redis() as server:
            version = server.info("server")["redis_version"]
            found = _measured(kind, server.url, goals, quick=options.quick)
        for figure in found:
            print(figure, flush=True)
        figures += found
    section = page.Section(
        date=dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d"),
        command=f"./bench http{' --quick' if options.quick else ''}",
        load=f"{before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores",
        versions={
            "Python": platform.python_version(),
            **page.versions("semel", "fastapi", "starlette", "uvicorn", "httptools", "redis"),
            "Redis": version,
        },
        figures=figures,
    )
    if options.write or options.into != page.FOLDER:
        page.write(
            page.Report({"http": section}), options.into, "http", _HEAD, {"http": "FastAPI and Starlette"}
        )
        say(f"written: {options.into}")
    return 0


def _measured(kind: str, store: str, goals: tuple[float, float], *, quick: bool) -> list[Figure]:
    with ExitStack() as stack:
        bare = stack.enter_context(serving(kind))
        kept = stack.enter_context(serving(kind, store))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = [
            Target("bare", *bare, "none"),
            Target("no key", *kept, "none"),
            Target("fresh", *kept, "fresh"),
            Target("replay", *kept, "replay"),
        ]
        rounds, seconds = (1, 1) if quick else (10, 3)
        rates = compare(targets, rounds, seconds, folder / "load.lua")
    plain = rates["bare"]
    figures = [
        _figure(f"{kind}, fresh key: requests/s", rates["fresh"], plain, goals[0]),
        _figure(f"{kind}, replay: requests/s", rates["replay"], plain, goals[1]),
        _figure(f"{kind}, no key: requests/s", rates["no key"], plain, None),
    ]
    cpu = Term("with the middleware", rates["no key"].cpu, "µs"), Term("bare", plain.cpu, "µs")
    limit = 1.05 if kind == "fastapi" else 0.0
    figures.append(Figure(f"{kind}, no key: server CPU per request", *cpu, "≤" if limit else "", limit))
    return figures


def _figure(what: str, ours: Rate, bare: Rate, goal: float | None) -> Figure:
    note = f"p50/p99 {ours.p50:.1f}/{ours.p99:.1f} against {bare.p50:.1f}/{bare.p99:.1f} ms, CPU {ours.cpu:.0f} against {bare.cpu:.0f} µs"
    terms = Term("semel", ours.per_second, "/s"), Term("bare", bare.per_second, "/s")
    return Figure(what, *terms, "≥" if goal else "", goal or 0.0, note)


if __name__ == "__main__":
    sys.exit(main())
