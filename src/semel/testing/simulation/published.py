"""The figures of simulations and mutants as files: `simulation.json`, `mutants.json`, and a page made of both.

`--report FOLDER` of the two commands writes them. Each run replaces the figures of its own workload and leaves the others.
An object's plain values are facts, its lists of objects are tables: the report of `semel chaos` shows them as well.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from semel.testing.simulation.invariants import CHECKS
from semel.testing.simulation.reach import ended_share
from semel.testing.simulation.runner import Report
from semel.testing.simulation.workloads import workload_of

__all__ = ["PAGE", "page", "publish", "publish_mutants"]

PAGE = "simulation.md"


def publish(folder: Path, workload: str, first: int, report: Report, *, command: str) -> None:
    """Write the figures of one run into `simulation.json`, and the page."""
    known = _read(folder / "simulation.json")
    runs = [run for run in known.get("runs", ()) if run["workload"] != workload]
    windows: dict[str, dict[str, Any]] = {each["window"]: each for each in known.get("windows", ())}
    for row in windows.values():
        row.pop(workload, None)  # of an earlier run, whose windows may have been others
    for name in workload_of(workload).windows:
        windows.setdefault(name, {"window": name})[workload] = report.reached.get(name, 0)
    told = {
        "title": "The simulator",
        **_made(),
        "workloads": len(runs) + 1,
        "checks": len(CHECKS),
        "schedules": sum(run["schedules"] for run in runs) + report.schedules,
        "runs": sorted([*runs, _run(workload, first, report, command)], key=lambda run: -run["schedules"]),
        "windows": [windows[name] for name in sorted(windows) if len(windows[name]) > 1],
    }
    _write(folder, "simulation.json", told)


def _run(workload: str, first: int, report: Report, command: str) -> dict[str, Any]:
    return {
        "workload": workload,
        **_made(),
        "schedules": report.schedules,
        "first seed": first,
        "last seed": first + report.schedules - 1,
        "without a fault": report.faultless,
        "struck by none": report.untouched,
        "broken promises": len(report.failures),
        "calls after the faults": sum(report.after.values()),
        "of these ended": f"{ended_share(report.after):.1%}",
        "with a value": report.after.get("value", 0),
        "with a final word": report.after.get("ruled", 0),
        "refused": report.after.get("refused", 0),
        "histories": report.histories,
        "undecided": report.undecided,
        "keys doubled, by mode": _by_mode(report.doubled),
        "keys unknown, by mode": _by_mode(report.unknown),
        "seconds": round(report.seconds),
        "command": command,
    }


def _by_mode(numbers: dict[str, int]) -> str:
    return ", ".join(f"{mode} {number}" for mode, number in sorted(numbers.items()) if number) or "none"


def publish_mutants(folder: Path, caught: Sequence[dict[str, Any]], *, command: str) -> None:
    """Write `mutants.json`, and the page. Each entry: mutant, caught by, seed, schedules tried, also seen by, what."""
    told = {
        "title": "Planted bugs",
        **_made(),
        "planted": len(caught),
        "checks": len({each["caught by"].partition(" ")[0] for each in caught} - {""}),
        "caught": sum(bool(each["caught by"]) for each in caught),
        "command": command,
        "mutants": list(caught),
    }
    _write(folder, "mutants.json", told)


def _made() -> dict[str, str]:
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "semel": version("semel"),
        "python": platform.python_version(),
    }


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    known: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return known


def _write(folder: Path, name: str, told: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(msgspec.json.format(msgspec.json.encode(told)) + b"\n")
    (folder / PAGE).write_text(page(folder), "utf-8")


def page(folder: Path) -> str:
    """The page that belongs to the two files of this folder."""
    return "\n".join(_lines(_read(folder / "simulation.json"), _read(folder / "mutants.json"))) + "\n"


def _lines(simulation: dict[str, Any], mutants: dict[str, Any]) -> Iterator[str]:
    yield "# Simulations and planted bugs"
    yield ""
    yield (
        "The figures of the last published runs of [the simulator and its mutants](../reference/simulation.md), written by the"
        " commands below. The same as data: `simulation.json`, `mutants.json`."
    )
    for told, tables in ((simulation, ("runs", "windows")), (mutants, ("mutants",))):
        if not told:
            continue
        yield from ("", f"## {told['title']}", "")
        facts = {name: value for name, value in told.items() if not isinstance(value, list)}
        yield from (
            f"* {name}: {_cell(value)}" for name, value in facts.items() if name not in ("title", "command")
        )
        commands = [told["command"]] if "command" in told else [run["command"] for run in told["runs"]]
        yield from ("", "```sh", *commands, "```")
        for name in tables:
            yield from ("", f"### {name.capitalize()}", "", *_table(told[name]))


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    heads = [head for head in dict.fromkeys(head for row in rows for head in row) if head != "command"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(head, '–')) for head in heads)} |"


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|")
