"""What a bench writes: docs/bench/NAME.json (the figures), NAME.md (the table) and NAME.svg (the plot)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from benches.core_parts.measure import Figure

__all__ = ["Report", "Section", "load", "versions", "write"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "bench"
TITLES = {
    "redis": "Redis",
    "postgres": "PostgreSQL (fsync and synchronous_commit on)",
    "sqlite": "SQLite (write-ahead log, synchronous=FULL)",
    "waiters": "Waiters",
    "growth": "Growth (Redis)",
    "peers": "Peers: ops/s, ours by theirs",
}


class Section(msgspec.Struct, frozen=True):
    """One section's figures, and the circumstances in which they were taken."""

    date: str
    command: str
    load: str
    versions: dict[str, str]
    figures: list[Figure]
    left_out: dict[str, str] = {}


class Report(msgspec.Struct):
    sections: dict[str, Section] = {}


def load(folder: Path = FOLDER) -> Report:
    file = folder / "core.json"
    return msgspec.json.decode(file.read_bytes(), type=Report) if file.exists() else Report()


def versions(*packages: str) -> dict[str, str]:
    return {name: metadata.version(name) for name in packages}


def write(
    report: Report,
    folder: Path = FOLDER,
    name: str = "core",
    head: str | None = None,
    titles: Mapping[str, str] = TITLES,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / f"{name}.json").write_bytes(encoded + b"\n")
    (folder / f"{name}.md").write_text(_markdown(report, head or _HEAD, titles), "utf-8")
    _plot(report, folder / f"{name}.svg")


# ------------------------------------------------------------------------------------------------- the table
_HEAD = """\
# Speed of the core

Written by `./bench core`; do not edit it by hand. `./bench core --help` tells how to run a part of it.

Every figure is a ratio of two terms that were measured in turns in one run (a few are counts, or times in
milliseconds). Ratios travel between machines, absolute rates do not. The work is an empty function that
returns a dict of 1 KB; *first* is a first execution (claim, run, settle), *replay* a call of a key that is
done. With 64 callers each caller makes its next call when its last one was answered, all in one process.
One caller of PostgreSQL is timed with client and server on cores of their own: left to the scheduler, the same
statement takes 30 µs or 110, for minutes. The goals are those of that arrangement. With both on one core, where
nobody has to be woken on another, the ratios are others; those lines stand below without a goal. First
executions have a face that meets new keys only; where known ones are frequent among them, each is looked up
before it is inserted, and costs more. What a goal was missed by is told, not hidden.

![Each figure as a share of its goal](core.svg)
"""


def _markdown(report: Report, head: str, titles: Mapping[str, str]) -> str:
    parts = [head]
    judged = [figure for one in report.sections.values() for figure in one.figures if figure.met is not None]
    missed = [figure for figure in judged if not figure.met]
    parts.append(f"{len(judged) - len(missed)} of {len(judged)} goals are met.\n")
    for name, title in titles.items():
        if name in report.sections:
            parts += _section(title, report.sections[name])
    return "\n".join(parts)


def _section(title: str, section: Section) -> list[str]:
    used = ", ".join(f"{name} {version}" for name, version in section.versions.items())
    lines = [
        f"## {title}\n",
        f"`{section.command}`, {section.date}, load average {section.load}. {used}.\n",
        "| figure | measured | goal | verdict | terms |",
        "|---|---|---|---|---|",
        *(_row(figure) for figure in section.figures),
        "",
    ]
    if section.left_out:
        lines += ["Left out:\n", *(f"* {name}: {why}" for name, why in section.left_out.items()), ""]
    return lines


def _row(figure: Figure) -> str:
    terms = str(figure.ours) if figure.theirs is None else f"{figure.ours}; {figure.theirs}"
    note = f" ({figure.note})" if figure.note else ""
    verdict = "**missed**" if figure.met is False else figure.verdict
    return f"| {figure.what} | {figure.value:.3g} | {figure.goal} | {verdict} | {terms}{note} |"


# -------------------------------------------------------------------------------------------------- the plot
def _plot(report: Report, file: Path) -> None:
    """How far each figure is from its goal, on one scale: 1 is the goal itself, right of it is better."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "semel"
    from matplotlib import pyplot as plt

    bars = [
        (f"{name}: {figure.what} ({figure.value:.3g}, goal {figure.goal})", _better_by(figure))
        for name, section in report.sections.items()
        for figure in section.figures
        if figure.sign in {"≤", "≥"}
    ]
    figure_, axes = plt.subplots(figsize=(10, 0.9 + 0.24 * len(bars)), layout="constrained")
    for at, (_, better) in enumerate(reversed(bars)):
        axes.plot([1, better], [at, at], color="#4878a8" if better >= 1 else "#c2543d", linewidth=5)
    axes.set_yticks(range(len(bars)), [label for label, _ in reversed(bars)], fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128) if _within(tick, bars)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("times better than the goal (1 is the goal; left of it the goal is missed)", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure_.savefig(file, metadata={"Date": None})
    plt.close(figure_)


def _better_by(figure: Figure) -> float:
    value = max(figure.value, 1e-9)
    return figure.limit / value if figure.sign == "≤" else value / figure.limit


def _within(tick: float, bars: list[tuple[str, float]]) -> bool:
    values: list[Any] = [better for _, better in bars] or [1.0]
    return tick == 1 or min(values) / 1.5 <= tick <= max(values) * 1.5 or math.isclose(tick, 1)
