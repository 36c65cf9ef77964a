"""Known failures of simulated functions, and what their callers say about them (R9)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.model import Kind, Policy
from semel.options import Release
from semel.testing.simulation.plans import Op

if TYPE_CHECKING:
    from semel.run import Run
    from semel.testing.simulation.world import World

__all__ = ["Flaw", "on_error_of", "will_fail"]

_KINDS = {
    "release": Kind.RELEASED,
    "after": Kind.RELEASED,
    "callable": Kind.RELEASED,
    "replay": Kind.FAILED,
    "hold": Kind.UNKNOWN,
    "broken": Kind.UNKNOWN,
}


class Flaw(Exception):
    """A known failure of the simulated function."""


def _delay(op: Op, lease: float) -> float:
    return lease * 0.75 if op.on_error in ("after", "callable") else 0.0


def on_error_of(op: Op, lease: float) -> Any:
    """The `on_error` of a call: a word, a delayed release, a function that says one, or a function that fails."""
    if op.on_error == "after":
        return Release(after=_delay(op, lease))
    if op.on_error == "callable":
        return lambda error: Release(after=_delay(op, lease)) if isinstance(error, Flaw) else "hold"
    return _undecided if op.on_error == "broken" else op.on_error


def _undecided(error: Exception) -> Any:
    raise LookupError(f"nobody knows what {error!r} means")


def will_fail(world: World, op: Op, run: Run) -> Flaw:
    """The failure to raise. What it must mean for the key is told to the auditor first."""
    auditor = world.server.auditor
    if op.on_error == "replay":
        auditor.replays.add(run.ask.nonce)
    grant = auditor.grants.get(run.scope.hash)
    if grant is not None and grant.nonce == run.ask.nonce:
        default = Kind.RELEASED if grant.policy is Policy.RETRY else Kind.UNKNOWN
        auditor.expected[run.ask.nonce] = _KINDS.get(op.on_error, default), _delay(op, world.plan.lease)
    return Flaw()
