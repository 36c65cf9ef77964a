"""Lengths of time, as people write them: `30s`, `7d`, or seconds, with the units that a configuration takes."""

from __future__ import annotations

from math import inf
from typing import Any

import typer

from semel.configuring import SETTINGS

__all__ = ["lasting", "seconds"]


def seconds(text: str) -> float:
    """For an option of a command. A number may be anything that Python takes for one: whoever gets it judges it."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        said = SETTINGS["retention"](text)
    except ValueError as problem:
        raise typer.BadParameter(f"{text!r}: {problem}") from problem
    return inf if said is None else float(said)


def lasting(said: str) -> Any:
    """An option that is a length of time; `said` is its help."""
    return typer.Option(parser=seconds, metavar="DURATION", help=said)
