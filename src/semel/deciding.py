"""What a known failure of a function means for its key (R9)."""

from __future__ import annotations

from typing import Any

from semel.calls import Unawaited, add_note
from semel.errors import ConfigurationError
from semel.model import Policy
from semel.options import Release, release_delay
from semel.run import Run
from semel.shown import shown

__all__ = ["decision_of"]


def decision_of(run: Run, error: Exception) -> tuple[str | Release, float]:
    """What `on_error` says. One that fails itself decides nothing: then the careful answer is to hold."""
    if isinstance(error, Unawaited) and error.scope == run.scope and not run.lease_lost:
        return "hold", 0.0
    try:
        decision = Release() if run.lease_lost else _decide(run, error)
        return decision, release_delay(decision) if isinstance(decision, Release) else 0.0
    except Exception as problem:  # noqa: BLE001 - whatever it is, the run must be settled
        add_note(error, f"on_error could not decide ({shown(problem)}); the key is held as unknown")
        return "hold", 0.0


def _decide(run: Run, error: Exception) -> str | Release:
    """What a known failure means, by the caller's word or by the default that fits `on_unknown`."""
    if run.stuck:
        return "hold"
    decision = run.call.options.on_error
    lost = "release" if run.policy is Policy.RETRY else "hold"
    if decision is None:
        return lost
    answer: Any = decision(error) if callable(decision) else decision
    if answer == "replay" and error is run.unheard:
        # The store did not answer a step: that is no failure of the function, and never its outcome.
        return lost
    if isinstance(answer, Release) or answer in ("release", "hold", "replay"):
        return answer  # type: ignore[no-any-return]  # checked in the line above
    raise ConfigurationError(
        f'on_error answered {shown(answer)} for {shown(error)}; it must answer "release", "hold", "replay" or Release(after=…)'
    )
