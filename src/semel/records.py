"""What stores and the flow tell each other: states, records, claims, settles, verdicts. Data only; `model` decides."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from semel.keys import Scope

__all__ = [
    "GIVEN_BACK",
    "NOBODY",
    "Answer",
    "Ask",
    "Busy",
    "Event",
    "Expired",
    "Failure",
    "Kind",
    "Mismatch",
    "Note",
    "Policy",
    "Record",
    "Renewal",
    "Replay",
    "Settle",
    "State",
    "Unknown",
    "Verdict",
    "Won",
]

NOBODY: Final = bytes(16)
"""A nonce that no claim has: a `forget` under it removes what cannot be read, and nothing else."""

GIVEN_BACK: Final = "given back"
"""The marker of a release by whoever never ran what was granted to him. If that was a take-over, the attempt before it may have
had its effect: the key stays bound to its request."""


class State(StrEnum):
    """What a record says. `EXPIRED` is a tombstone: the key is known as used, the body is gone."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"
    RELEASED = "released"
    EXPIRED = "expired"


class Policy(StrEnum):
    """What to do about a lost outcome. Order of strictness: hold > probe > retry."""

    RETRY = "retry"
    PROBE = "probe"
    HOLD = "hold"


class Kind(StrEnum):
    """How a run is settled."""

    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"
    RELEASED = "released"
    FORGOTTEN = "forgotten"


class Answer(StrEnum):
    """What a store says to a write: accepted, another nonce holds it, no record, or not allowed in this state."""

    OK = "ok"
    LOST = "lost"
    GONE = "gone"
    REFUSED = "refused"


class Failure(msgspec.Struct, frozen=True):
    """A stored error: enough to show and to match on, never a live exception."""

    type: str
    code: str | None = None
    message: str = ""


class Record(msgspec.Struct, frozen=True, gc=False):
    """One scope's record as a store keeps it. Times are the store's clock in seconds; `inf` means never."""

    state: State
    nonce: bytes
    attempts: int
    token: int
    created: float
    updated: float
    lease_until: float
    expires: float
    policy: Policy = Policy.RETRY
    fingerprint: bytes = b""
    fingerprint_version: int = 1
    settled: float | None = None
    tombstone: float = 0.0
    not_before: float = 0.0
    noted: float = 0.0
    resolved: bool = False
    marker: str = ""
    result: bytes = b""
    ref: str | None = None
    error: Failure | None = None
    labels: Mapping[str, str] | None = None
    steps: bytes = b""
    secret_id: str = ""
    scope: Scope | None = None

    def __repr__(self) -> str:
        kept = f", {len(self.result)} bytes" if self.result else ""
        ref = f", ref={self.ref!r}" if self.ref else ""
        error = f", error={self.error.type}" if self.error else ""
        return f"<Record {self.state.value} {self.scope!r}, attempts={self.attempts}{ref}{error}{kept}>"


class Ask(msgspec.Struct, frozen=True, gc=False):
    """A claim on its way to the store. The nonce makes it repeatable: sent twice, it is granted once."""

    scope: Scope
    nonce: bytes
    lease: float
    retention: float
    policy: Policy = Policy.RETRY
    fingerprint: bytes = b""
    fingerprint_version: int = 1
    labels: Mapping[str, str] | None = None
    secret_id: str = ""
    takeover: bytes = b""
    """The nonce of an unknown record that a probe has cleared for a re-run."""


class Settle(msgspec.Struct, frozen=True, gc=False):
    """The end of a run, or a person's or a probe's word on it (`new_nonce` set), on its way to the store.

    FORGOTTEN removes the record that has this nonce, or cannot be read, and is LOST on any other; with no nonce, whatever
    is there.
    """

    scope: Scope
    nonce: bytes
    kind: Kind
    retention: float
    tombstone: float = 0.0
    result: bytes = b""
    marker: str = ""
    ref: str | None = None
    error: Failure | None = None
    after: float = 0.0
    policy: Policy | None = None
    steps: bytes | None = None
    new_nonce: bytes = b""
    repair: bool = False
    actor: str = ""
    reason: str = ""
    noted: float | None = None
    """When the last note was taken that `steps`, a person's word, was made of: another one since then is not overwritten."""


class Renewal(msgspec.Struct, frozen=True, gc=False):
    """One heartbeat: the lease counts from the store's clock when it arrives."""

    scope: Scope
    nonce: bytes
    lease: float
    retention: float


class Note(msgspec.Struct, frozen=True, gc=False):
    """A step's mark: `entry` is appended to the record's steps."""

    scope: Scope
    nonce: bytes
    entry: bytes


class Event(msgspec.Struct, frozen=True):
    """One line of the audit trail: who changed what, from which state, and why."""

    at: float
    kind: Kind
    state: State | None
    actor: str
    reason: str
    attempt: int = 0


class Won(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The caller owns the key: run the effect, then settle with the same nonce."""

    record: Record


class Replay(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The key is settled (done or failed): give back what is stored."""

    record: Record


class Busy(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Somebody runs the key, or a released key may not be tried before `retry_after` seconds."""

    retry_after: float
    attempt: int
    delayed: bool = False


class Mismatch(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The key belongs to another request."""


class Expired(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The key was used; only its tombstone is left, until `until`."""

    until: float = 0.0


class Unknown(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The outcome was lost and policy (the stricter of the stored and the caller's) forbids a plain re-run."""

    record: Record | None
    policy: Policy
    unreadable: bool = False
    reason: str = ""
    """Why it cannot be read, and what to do about it, where more is known than that."""


Verdict = Won | Replay | Busy | Mismatch | Expired | Unknown
