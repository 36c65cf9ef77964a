"""What `semel explain` says of a record: what its state means, what callers get, what to do about it."""

from __future__ import annotations

import time
from typing import Final

from semel.cli.places import Place
from semel.cli.tables import span
from semel.flow import UNENCODABLE
from semel.model import Policy, Record, State
from semel.seals import has_sealed_steps, is_sealed

__all__ = ["explained"]

# For each state: what it means, and what a caller with this key gets now.
_MEANING: Final = {
    State.DONE: "The function ran and its outcome is recorded. Whoever calls with this key gets that outcome; nothing runs.",
    State.FAILED: "The function raised and the failure is kept. Whoever calls with this key gets PreviousFailure; nothing runs.",
    State.RELEASED: "An attempt ended without an outcome and the key is free. The next caller runs it.",
    State.EXPIRED: "The outcome was kept for its time and is gone; the key is remembered as used. Callers get KeyExpired; nothing runs.",
}
# The same where a person decided.
_TOLD: Final = {
    State.DONE: "A person said that it happened, and gave this outcome. Callers get it; nothing runs.",
    State.FAILED: "A person said that it failed. Callers get PreviousFailure; nothing runs.",
    State.RELEASED: "A person said that it did not happen: the next caller runs it.",
}
_UNENCODABLE: Final = "It happened; its result could not be encoded and was not kept. Callers get CodecError, which tells the ref; nothing runs."
_NOT_KEPT: Final = "It happened; its result was not kept ({marker}). Callers get the ref, and CodecError at .value; nothing runs."
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
_RESUMED: Final = (
    "Nothing has to be done: the next caller does it. once.reconcile() does so without a caller, where "
    "once.recovery(operation, resume=…) is registered."
)
_LOOKED_UP: Final = "once.reconcile() asks a probe, where once.recovery(operation, probe=…) is registered."
_LOOK: Final = "Look whether the effect happened."
_OWNER: Final = "It belongs to a program with encrypt=: {what} there."


def explained(record: Record | None, place: Place) -> str:
    """What the state means, what callers get, what to do about it: commands stand at the end of their lines."""
    if record is None:
        return (
            "There is no such record: the key was never used under this tenant and operation, or its time is over.\n"
            "The next caller runs it."
        )
    said = [_meaning(record), *_remedies(record, place)]
    if record.resolved:
        said.append(f"Who decided this, and why: {place.command('show')}")
    return "\n".join(said)


def _is_live(record: Record) -> bool:
    return record.state is State.RUNNING and record.lease_until > time.time()


def _meaning(record: Record) -> str:
    state = record.state
    if state is State.RUNNING:
        return _LIVE if _is_live(record) else _LOST[record.policy]
    if state is State.UNKNOWN:
        next_caller = _PROBED if record.policy is Policy.PROBE else _HELD
        return f"{_VANISHED if record.error is None else _RAISED} {next_caller}"
    if state is State.RELEASED and (left := record.not_before - time.time()) > 0:
        return _DELAYED.format(left=span(left))
    if state is State.DONE and record.marker:
        return _UNENCODABLE if record.marker == UNENCODABLE else _NOT_KEPT.format(marker=record.marker)
    return _TOLD[state] if record.resolved and state in _TOLD else _MEANING[state]


def _remedies(record: Record, place: Place) -> list[str]:
    state = record.state
    anew = f"To let the key be used anew: {place.command('forget')}"
    if state in (State.RUNNING, State.UNKNOWN):
        return [] if _is_live(record) else _of_the_lost(record, place)
    if state is State.EXPIRED:
        return [f"Its retention is the retention= of the program. {anew}"]
    if record.resolved and state in (State.DONE, State.FAILED):
        return [*_corrections(record, place), anew]
    if state is not State.FAILED:
        return []
    if is_sealed(record):
        return _of_the_sealed(record, place)
    return [
        f"To let it run again: {place.command('release')}",
        f"To give callers another outcome: {place.command('resolve', '--value', 'JSON')}",
        f"Or another failure: {place.command('resolve', '--error', 'TEXT')}",
    ]


def _of_the_lost(record: Record, place: Place) -> list[str]:
    if record.policy is Policy.PROBE:
        said = [_LOOKED_UP, f"Or decide by yourself. {_LOOK}"]
    elif record.state is State.RUNNING and record.policy is Policy.RETRY:
        said = [_RESUMED, f"Where callers hold such keys, decide by yourself. {_LOOK}"]
    else:
        said = [_LOOK]
    if is_sealed(record):
        return said + _of_the_sealed(record, place)
    return [
        *said,
        f"If it did: {place.command('resolve', '--value', 'JSON')}",
        f"If it did not: {place.command('release')}",
    ]


def _of_the_sealed(record: Record, place: Place) -> list[str]:
    """The command has no keys: what needs them is refused."""
    said = [_OWNER.format(what="call once.resolve(…)"), "These work from here as well:"]
    said.append(f"  It failed: {place.command('resolve', '--error', 'TEXT')}")
    if not has_sealed_steps(record):
        said.append(f"  It did not happen: {place.command('release')}")
    return [*said, f"  To let the key be used anew: {place.command('forget')}"]


def _corrections(record: Record, place: Place) -> list[str]:
    """What was told by mistake. A sealed value is overwritten by nobody who has no keys."""
    if is_sealed(record):
        said = [_OWNER.format(what="what was told by mistake is replaced with once.resolve(…, correct=True)")]
        words = [] if record.result else [("From here as well, if it failed", "--error", "TEXT")]
    else:
        said = []
        words = [("Told by mistake? If it happened", "--value", "JSON"), ("If it failed", "--error", "TEXT")]
    return said + [f"{when}: {place.command('resolve', '--correct', *word)}" for when, *word in words]
