"""What the commands about keys say of a record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from semel import steps
from semel.cli.tables import moment, span
from semel.codec import preview
from semel.errors import CodecError
from semel.model import Event, Policy, Record, State

__all__ = ["COLUMNS", "as_data", "event_data", "explained", "lines", "row"]

COLUMNS: Final = ("state", "tenant", "operation", "key", "attempts", "changed", "lease", "ref", "error")

# For each state: what it means, and what a caller with this key gets now.
_MEANING: Final = {
    State.DONE: "The function ran and its outcome is recorded. Whoever calls with this key gets that outcome; nothing runs.",
    State.FAILED: "The function raised and the failure is kept. Whoever calls with this key gets PreviousFailure; nothing runs.",
    State.RELEASED: "An attempt ended without an outcome and the key is free. The next caller runs it.",
    State.EXPIRED: "The outcome was kept for its time and is gone; the key is remembered as used. Callers get KeyExpired; nothing runs.",
}
_VANISHED: Final = "The worker was lost in the middle: the effect may have happened or not."
_RAISED: Final = "The function raised, and whether its effect happened is not known."
_HELD: Final = "Callers get OutcomeUnknown; nothing runs."
_PROBED: Final = (
    "The next caller asks its probe whether the effect happened; one without a probe gets OutcomeUnknown."
)
_DELAYED: Final = "An attempt ended without an outcome, and the key is free in {left}. Until then callers wait, or get InProgress."
_LIVE: Final = "A worker has it and renews its lease. Callers wait, or get InProgress."
_LOST: Final = {
    Policy.RETRY: "Its worker has not renewed its lease. The next caller takes it over and runs it again; one with on_unknown= hold or a "
    "probe gets OutcomeUnknown, or asks its probe.",
    Policy.PROBE: "Its worker has not renewed its lease. The next caller asks its probe whether the effect happened.",
    Policy.HOLD: "Its worker has not renewed its lease. Nobody runs it again: callers get OutcomeUnknown.",
}
_REMEDY: Final = {
    State.FAILED: "To let it run again: semel release. To give callers another outcome: semel resolve --value or --error.",
    State.UNKNOWN: "Look whether the effect happened. If it did: semel resolve --value JSON. If it did not: semel release.",
    State.EXPIRED: "To let the key be used anew: semel forget. Its retention is the retention= of the program.",
}
_DECIDED: Final = "It is decided once, and stays so. To let the key be used anew: semel forget."


def row(record: Record) -> tuple[str, ...]:
    """One line of `semel ls`, in the order of COLUMNS."""
    scope, error = record.scope, record.error
    return (
        record.state.value,
        scope.tenant if scope else "–",
        scope.operation if scope else "–",
        scope.key if scope else "–",
        str(record.attempts),
        _ago(record.updated),
        _lease(record),
        record.ref or "–",
        f"{error.type}: {error.message}"[:80] if error else "–",
    )


def _ago(at: float) -> str:
    return f"{span(max(0.0, time.time() - at))} ago"


def _lease(record: Record) -> str:
    if record.state is not State.RUNNING:
        return "–"
    left = record.lease_until - time.time()
    return f"{span(left)} left" if left > 0 else f"over, {span(-left)} ago"


def as_data(record: Record) -> dict[str, Any]:
    """Everything of a record that another program can use; times in ISO 8601."""
    scope = record.scope
    error = None if record.error is None else msgspec.to_builtins(record.error)
    return {
        "state": record.state.value,
        "tenant": scope.tenant if scope else None,
        "operation": scope.operation if scope else None,
        "key": scope.key if scope else None,
        "scope": scope.hex if scope else None,
        "attempts": record.attempts,
        "policy": record.policy.value,
        "ref": record.ref,
        "labels": dict(record.labels or {}),
        "error": error,
        "marker": record.marker or None,
        "resolved": record.resolved,
        "fingerprint": record.fingerprint.hex() or None,
        "bytes": len(record.result),
        "created": moment(record.created),
        "updated": moment(record.updated),
        "settled": moment(record.settled),
        "lease_until": moment(record.lease_until) if record.state is State.RUNNING else None,
        "expires": moment(record.expires or None),  # a purge takes it from under a tombstone
        "tombstone": moment(record.tombstone or None),
        "not_before": moment(record.not_before or None),
    }


def event_data(event: Event) -> dict[str, Any]:
    """One line of the audit trail."""
    return {**msgspec.to_builtins(event), "at": moment(event.at)}


def lines(record: Record, events: Sequence[Event]) -> list[tuple[str, str]]:
    """What `semel show` prints: names and values, without what there is not."""
    data = as_data(record)
    data["value"] = _value(record)
    data["labels"] = ", ".join(f"{name}={value}" for name, value in data["labels"].items())
    data["error"] = "" if record.error is None else f"{record.error.type}: {record.error.message}"
    shown = [(name, str(value)) for name, value in data.items() if value not in (None, "", False)]
    shown += _steps(record)
    for event in events:
        who = f"{event.kind.value} by {event.actor}" + (f": {event.reason}" if event.reason else "")
        shown.append((f"{moment(event.at)}", who))
    return shown


def _steps(record: Record) -> list[tuple[str, str]]:
    """Names and times of the steps; not where they are encrypted."""
    try:
        known = steps.decode(record.steps) if record.steps else {}
    except CodecError:
        return [("steps", f"{len(record.steps)} bytes that cannot be read here: encrypted, or damaged")]
    return [(f"step {name}", f"{step.phase}, {moment(step.at)}") for name, step in known.items()]


def _value(record: Record) -> str:
    """The stored result for people; not where it is encrypted."""
    if record.state is not State.DONE or not record.result:
        return ""
    try:
        said = repr(preview(record.result))
    except CodecError:
        return f"{len(record.result)} bytes that cannot be read here: encrypted, or compressed by a layer"
    return said if len(said) <= 2_000 else said[:2_000] + "…"


def explained(record: Record | None) -> str:
    """What the state means, what callers get, what to do about it."""
    if record is None:
        return (
            "There is no such record: the key was never used under this tenant and operation, or its time is over.\n"
            "The next caller runs it."
        )
    if record.state is State.RUNNING:
        live = record.lease_until > time.time()
        said = [_LIVE if live else _LOST[record.policy], "" if live else _lost_remedy(record.policy)]
    else:
        said = [_meaning(record), _remedy(record)]
    if record.resolved:
        said.append("A person decided this: semel show has who and why.")
    return "\n".join(line for line in said if line)


def _meaning(record: Record) -> str:
    if record.state is State.UNKNOWN:
        next_caller = _PROBED if record.policy is Policy.PROBE else _HELD
        return f"{_VANISHED if record.error is None else _RAISED} {next_caller}"
    if record.state is State.RELEASED and (left := record.not_before - time.time()) > 0:
        return _DELAYED.format(left=span(left))
    return _MEANING[record.state]


def _remedy(record: Record) -> str:
    if record.state is State.FAILED and record.resolved:
        return _DECIDED
    if record.state is State.UNKNOWN and record.policy is Policy.PROBE:
        return _lost_remedy(record.policy)
    return _REMEDY.get(record.state, "")


def _lost_remedy(policy: Policy) -> str:
    if policy is Policy.RETRY:
        return (
            "Nothing has to be done; once.reconcile() takes such runs over without waiting for a caller. Where callers hold "
            "such keys, decide by yourself: semel resolve, semel release."
        )
    return "once.reconcile() asks its registered probe; or decide by yourself: semel resolve, semel release."
