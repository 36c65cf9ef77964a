"""./bench messaging [drain|redis|peers|latency|storm|inbox …] [--quick] [--write] [--into FOLDER]

drain: a backlog from PostgreSQL to a Redis stream, beside the database's own limit and a loop written by hand. redis: the
same from an outbox in Redis. peers: the same through faststream-outbox, pgqueuer and procrastinate (installed into an
environment of their own by the first run; about five minutes). latency: from commit to visible under a steady load. storm: relays
are killed while a writer writes. inbox: what admission adds to a handler.
Without a section all run; `--write` writes docs/bench/messaging.*, keeping the figures of a section that was not run. `--quick`
shows in seconds that the program works: its figures mean nothing. The exit code does not depend on the figures.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from benches.core_parts import page
from benches.core_parts.measure import Figure, say
from benches.messaging_parts import drain, inbox, peers, redis_drain, steady

_HEAD = """\
# Speed of messaging

Written by `./bench messaging`; do not edit it by hand.

Outbox in PostgreSQL (fsync on), in one section in a second Redis; sink a Redis stream, bodies of about 256 bytes, everything on one machine. Each figure is a ratio of
two terms that were measured in turns in one run, or a count. What a goal was missed by is told, not hidden.

The peers do the same job from databases of their own on the same servers: as many messages with the same body, one worker process
each, timed from the worker's start to the time stamp of the last entry. They are set up as their documentation recommends for
throughput; of the sizes that it leaves open the fastest here was taken, and stands beside the figure. None of them promises what the
relay does: all are at least once, none keeps the order of a key. Of faststream-outbox there are two lines, because its batched
deletes are an option for those who may see up to a batch again after a crash.

The inbox is measured beside the bare handler, each in a session and a transaction of its own with fsync on. One handler inserts a row of about
300 bytes; the other reads a row by its key, updates it and inserts such a row, the least that a handler of an order does. *By hand* is the same
session with an insert into a table of ids first (one primary key and a time), which is what the protocol costs without us: it finds duplicates, and
has no conflict of bodies, tenants, consumers, log or attempts.

![Each figure as a share of its goal](messaging.svg)
"""
SECTIONS: dict[str, tuple[str, Callable[..., list[Figure]]]] = {
    "drain": ("Draining a backlog", drain.bench),
    "redis": ("Draining an outbox in Redis", redis_drain.bench),
    "peers": ("Peers: the same backlog, ours by theirs", peers.bench),
    "latency": ("From commit to visible", steady.latency),
    "storm": ("Relays killed", steady.storm),
    "inbox": ("The inbox", inbox.bench),
}


def main() -> int:
    options = _options()
    file = options.into / "messaging.json"
    report = msgspec.json.decode(file.read_bytes(), type=page.Report) if file.exists() else page.Report()
    for name in options.section or SECTIONS:
        say(f"== {name}")
        report.sections[name] = _section(name, quick=options.quick)
    if options.write or options.into != page.FOLDER:
        titles = {name: title for name, (title, _) in SECTIONS.items()}
        page.write(report, options.into, "messaging", _HEAD, titles)
        say(f"written: {options.into}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./bench messaging", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", nargs="*", help=f"{', '.join(SECTIONS)}; default: all")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; figures mean nothing"
    )
    parser.add_argument("--write", action="store_true", help="write docs/bench/messaging.*")
    parser.add_argument("--into", type=Path, default=page.FOLDER, help="write there instead of docs/bench")
    options = parser.parse_args()
    if unknown := [name for name in options.section if name not in SECTIONS]:
        parser.error(f"there is no section {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}")
    return options


def _section(name: str, *, quick: bool) -> page.Section:
    before = os.getloadavg()[0]
    figures = SECTIONS[name][1](quick=quick)
    versions = peers.VERSIONS if name == "peers" else page.versions("semel", "sqlalchemy", "psycopg", "redis")
    for figure in figures:
        print(figure, flush=True)
    return page.Section(
        date=dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d"),
        command=f"./bench messaging {name}{' --quick' if quick else ''}",
        load=f"{before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores",
        versions={"Python": platform.python_version(), **versions},
        figures=figures,
        left_out=peers.LEFT_OUT if name == "peers" else {},
    )


if __name__ == "__main__":
    sys.exit(main())
