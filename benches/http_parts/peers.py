"""Every package for ASGI and FastAPI that could be found, around one route, asked in turns with semel and the bare route."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benches.core_parts.measure import Figure, Term, say
from benches.core_parts.peers import environment
from benches.http_parts.load import Rate, Target, answer, compare, serving
from benches.http_parts.peer_apps import APPS
from semel.testing import services

__all__ = ["KINDS", "PACKAGES", "bench", "plot", "table"]

KINDS = {"none": "no key", "fresh": "fresh key", "replay": "replay"}
PACKAGES = (
    "idemkit", "ichido", "asgi-idempotency-header", "fastapi-idempotency", "fastapi-idempotency-key",
    "mobius-idempotence-library", "idempot", "idemptx", "pyidempotent",
)  # fmt: skip
_COLOURS = ("#b9c4cf", "#4878a8", "#2f8f6b")
_FEW = 0.01  # of requests: what is over it is told


def bench(*, quick: bool, left_out: dict[str, str]) -> list[Figure]:
    """What could not be run is put into `left_out`, with the reason."""
    python = environment("bench-http", "peers-http")
    with ExitStack() as stack:
        server = stack.enter_context(services.redis())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets: list[Target] = []
        for number, name in enumerate(APPS):
            say(f"starting {name}")
            try:
                at = stack.enter_context(serving(name, f"{server.url.rpartition('/')[0]}/{number}", python))
            except RuntimeError as error:
                left_out[name] = str(error)
                continue
            kinds = ("none",) if name == "bare" else tuple(KINDS)
            targets += [Target(f"{name}, {kind}", *at, kind) for kind in kinds]
        rounds, seconds = (1, 1) if quick else (3, 2)
        rates = compare(targets, rounds, seconds, folder / "load.lua", strict=False)
        notes = {target.name: _note(target, rates[target.name]) for target in targets}
    bare = rates["bare, none"]
    plain = Term("bare", bare.per_second, "/s")
    return [
        Figure(
            f"{KINDS[target.keys]}: {target.name.rpartition(', ')[0]}",
            Term("with it", rates[target.name].per_second, "/s"),
            plain,
            note="; ".join(
                filter(
                    None, (notes[target.name], f"CPU {rates[target.name].cpu:.0f} against {bare.cpu:.0f} µs")
                )
            ),
        )
        for target in targets
        if not target.name.startswith("bare")
    ]


def _note(target: Target, rate: Rate) -> str:
    """What a reader must know before he believes a figure."""
    if rate.errors > _FEW:
        key = {"none": None, "fresh": f"one-more-{target.port}", "replay": "done-1"}[target.keys]
        return f"answers {answer(target.port, key)}"
    if target.keys == "replay" and rate.ran > _FEW:
        return f"runs the handler for {rate.ran:.0%}"
    if target.keys != "replay" and rate.ran < 1 - _FEW:
        return f"runs the handler for {rate.ran:.0%} only"
    return ""


# ------------------------------------------------------------------------------------------------------ what is told
def _cells(figures: list[Figure]) -> dict[str, dict[str, Figure]]:
    rows: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        kind, _, name = figure.what.partition(": ")
        rows.setdefault(name, {})[kind] = figure
    return rows


def _told(figure: Figure) -> tuple[str, float, float]:
    """What is wrong with it; its CPU and the bare route's, in µs per request."""
    *wrong, cpu = figure.note.split("; ")
    ours, bare = re.findall(r"\d+", cpu)
    return "; ".join(wrong), float(ours), float(bare)


def table(figures: list[Figure]) -> str:
    """Share of the bare route's requests per second; the server's CPU per request beside it."""
    kinds = list(KINDS.values())
    lines = [f"| | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name, cells in _cells(figures).items():
        lines.append(f"| {name} | {' | '.join(_shown(cells[kind]) for kind in kinds)} |")
    return "\n".join(lines)


def _shown(figure: Figure) -> str:
    wrong, ours, bare = _told(figure)
    said = f"{figure.value:.2f} · {ours:.0f} µs ({ours / bare:.2f} ×)"
    return f"{wrong}: {said}" if wrong else said


def plot(figures: list[Figure], file: Path) -> None:
    """Requests and CPU, a bar for each kind of request. What does other work (errors, handlers run again) is hatched."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "semel"
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    rows = list(reversed(_cells(figures).items()))
    drawn, sides = plt.subplots(1, 2, figsize=(11, 0.9 + 0.55 * len(rows)), layout="constrained", sharey=True)
    for axes, label, value in (
        (sides[0], "requests per second, bare route = 1 (more is better)", lambda figure: figure.value),
        (sides[1], "server CPU per request, bare route = 1 (less is better)", _cpu_ratio),
    ):
        _bars(axes, rows, value)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel(label, fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles = [Patch(color=colour, label=kind) for kind, colour in zip(KINDS.values(), _COLOURS, strict=True)]
    drawn.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    drawn.savefig(file, metadata={"Date": None})
    plt.close(drawn)


def _cpu_ratio(figure: Figure) -> float:
    _, ours, bare = _told(figure)
    return ours / bare


def _bars(axes: Any, rows: list[tuple[str, dict[str, Figure]]], value: Callable[[Figure], float]) -> None:
    for at, (kind, colour) in enumerate(zip(KINDS.values(), _COLOURS, strict=True)):
        for place, (_, cells) in enumerate(rows):
            wrong = bool(_told(cells[kind])[0])
            axes.barh(
                place + (1 - at) * 0.27,
                value(cells[kind]),
                height=0.25,
                color="white" if wrong else colour,
                edgecolor=colour,
                hatch="////" if wrong else None,
            )
