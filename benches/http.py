"""./bench http [goals|floor|peers …] [--loop asyncio|uvloop] [--quick] [--write] [--into FOLDER]

goals: the middleware over FastAPI and Starlette against the bare applications. floor: what the least that anybody can do costs
(benches/http_parts/floor.py), and semel beside it. peers: the same FastAPI route behind every other package for ASGI and
FastAPI (requirements/bench-http.in, in .venv/peers-http). One uvicorn worker each, Redis, wrk with 32 connections, in
turns in one run. Without a section all run; `--write` writes docs/bench/http.*, keeping the figures of a
section that was not run. `--quick` shows in seconds that the program works: its figures mean nothing. The exit code does
not depend on the figures: only a broken program fails.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benches.core_parts import page
from benches.core_parts.measure import Figure, Term, say
from benches.core_parts.peers import environment
from benches.http_parts import floors, peers
from benches.http_parts.load import Rate, Target, compare, serving
from semel.testing import services

_HEAD = """\
# Speed of the HTTP middleware

Written by `./bench http`; do not edit it by hand.

Each figure is a ratio of two applications that were asked in turns in one run: one uvicorn worker each (asyncio,
httptools), wrk with 32 connections, a POST of 55 bytes of JSON, records in Redis on the same machine. *fresh*: every
request has a new key; *replay*: every request repeats one of 100 that are done; *no key*: the middleware is there and
the request has none; *collector set*: both applications have set Python's garbage collector when they started, as
docs/howto/http.md says and why. *trips*, *detached*, *rules*: in semel's place stands what was written by hand as lean as it goes
(benches/http_parts/floor.py), and cannot be used. What a goal was missed by is told, not hidden.

![Each figure as a share of its goal](http.svg)
"""
_PEERS = """
## Peers

`{command}`, {date}, load average {load}. {versions}.

Requests per second as a share of the bare FastAPI route in the same run, and the server's CPU per request (and how many
times the bare route's it is, which a busy machine changes little). Every package is used as its own documentation shows, with
its own defaults and the same redis-py. A figure with a note is not comparable: whoever answers errors, or runs the handler
again, does other work; it is hatched in the plot.

![Requests and CPU of every package](http-peers.svg)

{table}
{left_out}"""
SECTIONS = ("goals", "floor", "peers")


def main() -> int:
    options = _options()
    report = _load(options.into)
    for name in options.section or SECTIONS:
        say(f"== {name}")
        report.sections[name] = _section(name, quick=options.quick, loop=options.loop)
    if options.write or options.into != page.FOLDER:
        _write(report, options.into)
        say(f"written: {options.into}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./bench http", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", nargs="*", help=f"{', '.join(SECTIONS)}; default: all")
    parser.add_argument(
        "--loop",
        choices=("asyncio", "uvloop"),
        default="asyncio",
        help="of goals and floor; default: asyncio",
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; figures mean nothing"
    )
    parser.add_argument("--write", action="store_true", help="write docs/bench/http.*")
    parser.add_argument("--into", type=Path, default=page.FOLDER, help="write there instead of docs/bench")
    options = parser.parse_args()
    if unknown := [name for name in options.section if name not in SECTIONS]:
        parser.error(f"there is no section {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}")
    return options


def _load(folder: Path) -> page.Report:
    file = folder / "http.json"
    return msgspec.json.decode(file.read_bytes(), type=page.Report) if file.exists() else page.Report()


def _section(name: str, *, quick: bool, loop: str) -> page.Section:
    before, left_out = os.getloadavg()[0], dict[str, str]()
    found: Callable[[], list[Figure]] = {
        "goals": lambda: _goals(quick=quick, loop=loop),
        "floor": lambda: floors.bench(quick=quick, loop=loop),
        "peers": lambda: peers.bench(quick=quick, left_out=left_out),
    }[name]
    figures = found()
    for figure in figures:
        print(figure, flush=True)
    for missing, why in left_out.items():
        print(f"left out: {missing}: {why}")
    return page.Section(
        date=dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d"),
        command=f"./bench http {name}{' --loop uvloop' if loop == 'uvloop' else ''}{' --quick' if quick else ''}",
        load=f"{before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores",
        versions={
            "Python": platform.python_version(),
            **page.versions("semel", "fastapi", "starlette", "uvicorn", "httptools", "redis"),
            **(_peer_versions() if name == "peers" else {}),
            "Redis": _redis_version(),
        },
        figures=figures,
        left_out=left_out,
    )


def _redis_version() -> str:
    with services.redis() as server:
        return str(server.info("server")["redis_version"])


def _peer_versions() -> dict[str, str]:
    """As they are installed where they are measured."""
    names = ", ".join(repr(name) for name in peers.PACKAGES)
    code = f"from importlib.metadata import version; [print(n, version(n)) for n in ({names},)]"
    python = environment("bench-http", "peers-http")
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in told.splitlines())


def _write(report: page.Report, folder: Path) -> None:
    head = _HEAD
    if (section := report.sections.get("peers")) is not None:
        used = ", ".join(f"{name} {version}" for name, version in section.versions.items())
        left_out = "".join(f"\n* left out: {name}: {why}" for name, why in section.left_out.items())
        head += _PEERS.format(
            command=section.command,
            date=section.date,
            load=section.load,
            versions=used,
            table=peers.table(section.figures),
            left_out=left_out,
        )
        folder.mkdir(parents=True, exist_ok=True)
        peers.plot(section.figures, folder / "http-peers.svg")
    page.write(
        report, folder, "http", head, {"goals": "Goals, over FastAPI and Starlette", "floor": "The floor"}
    )


def _goals(*, quick: bool, loop: str) -> list[Figure]:
    figures: list[Figure] = []
    for kind, goals in (("fastapi", (0.75, 1.5)), ("starlette", (0.6, 0.8))):
        say(f"{kind}")
        with services.redis() as server:
            figures += _measured(kind, server.url, goals, quick=quick, loop=loop)
    return figures


def _measured(kind: str, store: str, goals: tuple[float, float], *, quick: bool, loop: str) -> list[Figure]:
    with ExitStack() as stack:
        bare = stack.enter_context(serving(kind, loop=loop))
        kept = stack.enter_context(serving(kind, store, loop=loop))
        frozen = stack.enter_context(serving(kind, frozen=True, loop=loop))
        frozen_kept = stack.enter_context(serving(kind, store, frozen=True, loop=loop))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = [
            Target("bare", *bare, "none"),
            Target("no key", *kept, "none"),
            Target("fresh", *kept, "fresh"),
            Target("replay", *kept, "replay"),
            Target("frozen bare", *frozen, "none"),
            Target("frozen fresh", *frozen_kept, "fresh"),
        ]
        rounds, seconds = (1, 1) if quick else (10, 3)
        rates = compare(targets, rounds, seconds, folder / "load.lua")
    plain = rates["bare"]
    figures = [
        _figure(f"{kind}, fresh key: requests/s", rates["fresh"], plain, goals[0]),
        _figure(f"{kind}, replay: requests/s", rates["replay"], plain, goals[1]),
        _figure(f"{kind}, no key: requests/s", rates["no key"], plain, None),
        _figure(
            f"{kind}, fresh key, collector set in both: requests/s",
            rates["frozen fresh"],
            rates["frozen bare"],
            None,
        ),
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
