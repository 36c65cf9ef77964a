"""The section `floor` of `./bench http`: the hand-written floors, semel beside them, and all of them against the bare route."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from benches.core_parts.measure import Figure, Term, say
from benches.http_parts import steps
from benches.http_parts.floor import FLOORS
from benches.http_parts.load import Rate, Target, compare, serving
from semel.testing import services

__all__ = ["bench"]

_COLLECTED = ("trips", "rules", "semel")
"""What is measured with Python's garbage collector set, too: see docs/howto/http.md."""


def bench(*, quick: bool, loop: str) -> list[Figure]:
    say("in process")
    figures = steps.bench(quick=quick)
    for kind in ("fastapi", "starlette"):
        say(f"{kind}")
        with services.redis() as server:
            figures += _measured(kind, server.url, quick=quick, loop=loop)
    return figures


def _measured(kind: str, store: str, *, quick: bool, loop: str) -> list[Figure]:
    rounds, seconds = (1, 1) if quick else (10, 2)
    rates: dict[tuple[str, str], Rate] = {}
    for frozen in (
        False,
        True,
    ):  # one after the other: a process for each of nine applications would be too many
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            targets = [Target("bare", *stack.enter_context(serving(kind, loop=loop, frozen=frozen)), "none")]
            for name in _COLLECTED if frozen else (*FLOORS, "semel"):
                level = "" if name == "semel" else name
                served = stack.enter_context(serving(kind, store, floor=level, loop=loop, frozen=frozen))
                targets.append(Target(f"{name}, fresh", *served, "fresh"))
                if not frozen and name != "detached":  # a replay runs nothing, and leaves nothing to collect
                    targets.append(Target(f"{name}, replay", *served, "replay"))
            found = compare(targets, rounds, seconds, folder / "load.lua")
        how = ", collector set in both" if frozen else ""
        rates |= {(name, how): rate for name, rate in found.items()}
    return [
        _figure(f"{kind}, {name}{how}", rate, rates["bare", how])
        for (name, how), rate in sorted(rates.items(), key=_order)
        if name != "bare"
    ]


def _order(item: tuple[tuple[str, str], Rate]) -> tuple[str, str]:
    """Fresh keys, the same with the collector set, replays."""
    (name, how), _ = item
    return name.partition(", ")[2], how


def _figure(what: str, rate: Rate, bare: Rate) -> Figure:
    note = f"CPU {rate.cpu:.0f} against {bare.cpu:.0f} µs: {bare.cpu / rate.cpu:.2f}"
    return Figure(
        what, Term("with it", rate.per_second, "/s"), Term("bare", bare.per_second, "/s"), note=note
    )
