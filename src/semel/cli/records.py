"""What the commands about keys say of a record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from typing import Any, Final

import msgspec

from semel import steps
from semel.cli.tables import moment, span
from semel.codec import preview
from semel.errors import CodecError
from semel.model import Event, Failure, Kind, Record, State

__all__ = ["COLUMNS", "as_data", "event_data", "lines", "row", "trail"]

COLUMNS: Final = ("state", "tenant", "operation", "key", "attempts", "changed", "lease", "ref", "error")


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
        _failure(error)[:80] if error else "–",
    )


def _failure(error: Failure) -> str:
    return f"{error.type}{f' ({error.code})' if error.code else ''}: {error.message}"


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
    data["error"] = "" if record.error is None else _failure(record.error)
    shown = [(name, str(value)) for name, value in data.items() if value not in (None, "", False)]
    return shown + _steps(record) + trail(events, record.created)


def trail(events: Sequence[Event], since: float = inf) -> list[tuple[str, str]]:
    """Who changed the key by hand, when and why. `since`: when the record that is there now was made."""
    shown, before = [], None
    for event in events:
        who = (
            f"{event.kind.value} by {event.actor}{' (corrected)' if _corrects(event, before, since) else ''}"
        )
        shown.append((f"{moment(event.at)}", who + (f": {event.reason}" if event.reason else "")))
        before = event
    return shown


def _corrects(event: Event, before: Event | None, since: float) -> bool:
    """Whether it stands in place of an outcome: one that is done is decided about in no other way. A failure may be the
    function's own, unless a person told it, of this very record."""
    if event.kind not in (Kind.DONE, Kind.FAILED):
        return False
    told = before is not None and before.kind is Kind.FAILED and before.at >= since
    return event.state is State.DONE or (event.state is State.FAILED and told)


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
