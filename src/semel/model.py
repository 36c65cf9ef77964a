"""The state machine of a record: data and pure functions, nothing else.

Rule 1: everything that decides what a store may do to a record lives in this file. Memory and SQL stores call
        these functions under a lock or row lock; the Redis scripts restate them and are proved equal by test.
Rule 2: no I/O, no clock, no randomness, no await. `now` is the *store's* clock, in seconds, and an argument.
Rule 3: expiry is looked at before anything else; the fence is equality of the nonce, never an order of numbers.

    absent ──claim──▶ running ──settle──▶ done | failed | released | unknown
                        │  ▲                                 │          │
         lease over,    │  └────────── claim ────────────────┘          │
         policy retry ──┘                                               ▼
         lease over, policy hold/probe: *reads* as unknown ──▶ resolve / probe ──▶ done | failed | released
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import msgspec

from semel.records import (
    Answer,
    Ask,
    Busy,
    Event,
    Expired,
    Failure,
    Kind,
    Mismatch,
    Note,
    Policy,
    Record,
    Renewal,
    Replay,
    Settle,
    State,
    Unknown,
    Verdict,
    Won,
)

__all__ = [
    "TRANSITIONS",
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
    "bury",
    "claim",
    "conflicts",
    "event_of",
    "note",
    "renew",
    "settle",
    "stricter",
    "view",
]


# From which *viewed* state each kind of settle may move, by the owner and by a person or probe (docs draw this).
TRANSITIONS: Mapping[Kind, tuple[frozenset[State], frozenset[State]]] = {
    Kind.DONE: (frozenset({State.RUNNING, State.UNKNOWN}), frozenset({State.UNKNOWN, State.FAILED})),
    Kind.FAILED: (frozenset({State.RUNNING, State.UNKNOWN}), frozenset({State.UNKNOWN, State.FAILED})),
    Kind.UNKNOWN: (frozenset({State.RUNNING, State.UNKNOWN}), frozenset()),
    Kind.RELEASED: (frozenset({State.RUNNING, State.UNKNOWN}), frozenset({State.UNKNOWN, State.FAILED})),
}

_STRICTNESS: Mapping[Policy, int] = {Policy.RETRY: 0, Policy.PROBE: 1, Policy.HOLD: 2}


def stricter(first: Policy, second: Policy) -> Policy:
    return first if _STRICTNESS[first] >= _STRICTNESS[second] else second


def view(record: Record | None, now: float) -> State | None:
    """What a record reads as at `now`; None when the key is as good as never used.

    `unknown` is read, not written (R12): a run past its lease under hold or probe reads as unknown.
    """
    if record is None:
        return None
    state = record.state
    if state is State.UNKNOWN:
        return state
    if state is State.RUNNING:
        if record.policy is not Policy.RETRY:
            return State.RUNNING if now < record.lease_until else State.UNKNOWN
        return State.RUNNING if now < record.expires else None
    if now < record.expires:
        return state
    # Only an outcome leaves a tombstone: a released key was never used up.
    if state is not State.RELEASED and now < record.tombstone:
        return State.EXPIRED
    return None


def claim(record: Record | None, ask: Ask, now: float) -> tuple[Verdict, Record | None]:
    """Decide a claim. Returns the verdict and the record to write (None: write nothing; a replay never writes)."""
    if record is None:
        return _won(_fresh(ask, now, None))
    seen = view(record, now)
    if seen is None:
        return _won(_fresh(ask, now, record))
    if seen is State.EXPIRED:
        return Expired(record.tombstone), None
    if record.state is State.RUNNING and record.nonce == ask.nonce:
        # The same claim again: its reply was lost. Grant it again, with a full lease.
        return _won(_extend(record, ask.lease, ask.retention, now))
    if record.state is State.RELEASED and record.nonce == ask.nonce:
        # A late copy of a claim that its caller has given up: granted, it would have no owner.
        return Busy(0.0, record.attempts), None
    if conflicts(record, ask) and not _is_bare_release(record):
        return Mismatch(), None
    match seen:
        case State.DONE | State.FAILED:
            return Replay(record), None
        case State.RELEASED:
            return _reclaim_released(record, ask, now)
        case State.RUNNING if now < record.lease_until:
            return Busy(record.lease_until - now, record.attempts), None
        case _:
            return _reclaim_lapsed(record, ask, now)


def _reclaim_released(record: Record, ask: Ask, now: float) -> tuple[Verdict, Record | None]:
    if now < record.not_before:
        return Busy(record.not_before - now, record.attempts, delayed=True), None
    if _is_bare_release(record):
        # A downstream key in use never changes, though the secret was rotated meanwhile (R24).
        return _won(msgspec.structs.replace(_fresh(ask, now, record), secret_id=record.secret_id))
    return _won(_take_over(record, ask, now))


def _reclaim_lapsed(record: Record, ask: Ask, now: float) -> tuple[Verdict, Record | None]:
    """The lease is over, or the outcome was declared unknown."""
    if ask.takeover and ask.takeover == record.nonce and record.policy is not Policy.HOLD:
        return _won(_take_over(record, ask, now))
    policy = stricter(record.policy, ask.policy)
    if record.state is State.RUNNING and policy is Policy.RETRY:
        return _won(_take_over(record, ask, now))
    return Unknown(record, policy), None


def renew(record: Record | None, renewal: Renewal, now: float) -> tuple[Answer, Record | None]:
    """Extend a lease. LOST only when another nonce holds the key (R17)."""
    if record is None or _is_gone(record, now):
        return Answer.GONE, None
    if record.nonce != renewal.nonce:
        return Answer.LOST, None
    if record.state is not State.RUNNING:
        # Settled under this very nonce while the heartbeat was on its way: nothing is lost, nothing to extend.
        return Answer.OK, None
    return Answer.OK, _extend(record, renewal.lease, renewal.retention, now)


def note(record: Record | None, entry: Note, now: float) -> tuple[Answer, Record | None]:
    """Remember a step. Fenced like every write after the claim; the lease is not touched."""
    if record is None or _is_gone(record, now):
        return Answer.GONE, None
    if record.nonce != entry.nonce:
        return Answer.LOST, None
    if record.state is not State.RUNNING:
        return Answer.REFUSED, None
    changed = msgspec.structs.replace(record, steps=record.steps + entry.entry, noted=now, updated=now)
    return Answer.OK, changed


def settle(record: Record | None, end: Settle, now: float) -> tuple[Answer, Record | None]:
    """Decide a settle. Returns the answer and the record to write; for an accepted FORGOTTEN, delete instead."""
    seen = view(record, now)
    if end.kind is Kind.FORGOTTEN:
        return _forget(record, seen, end, now)
    if record is None or seen is None or seen is State.EXPIRED:
        return Answer.GONE, None
    if end.new_nonce:
        return _decide(record, seen, end, now)
    if record.nonce != end.nonce:
        return Answer.LOST, None
    if record.state not in TRANSITIONS[end.kind][0]:
        # Settled already under this very nonce: fine if the same settle was sent again because its reply was lost.
        return (Answer.OK if record.state.value == end.kind.value else Answer.REFUSED), None
    return Answer.OK, _settled(record, end, now)


def _is_gone(record: Record, now: float) -> bool:
    return view(record, now) in (None, State.EXPIRED)


def bury(record: Record) -> Record:
    """What a tombstone keeps: that the key was used, by how many attempts and when. The body is gone (R19).

    So is the time of expiry: a clock that is set back must not make an outcome without a body of it again.
    """
    return msgspec.structs.replace(
        record, result=b"", error=None, steps=b"", ref=None, labels=None, marker="", expires=0.0
    )


def _decide(record: Record, seen: State, end: Settle, now: float) -> tuple[Answer, Record | None]:
    """A person or a probe speaks: only on unknown or failed records and lapsed runs, and only once (R13)."""
    if record.nonce == end.new_nonce:
        return Answer.OK, None
    if end.nonce and record.nonce != end.nonce:
        return Answer.LOST, None
    if end.noted is not None and record.noted != end.noted:
        # The late owner has noted another step since `end.steps` was read: it must not be lost.
        return Answer.LOST, None
    if seen is State.RUNNING and now >= record.lease_until:
        # Whoever speaks was asked because a caller's policy is the stricter one: for it, a lapsed run under retry is unknown.
        seen = State.UNKNOWN
    repairable = end.repair and seen is not State.RUNNING
    if not repairable and (record.resolved or seen not in TRANSITIONS[end.kind][1]):
        return Answer.REFUSED, None
    changed = _settled(record, end, now)
    return Answer.OK, msgspec.structs.replace(changed, nonce=end.new_nonce, resolved=bool(end.actor))


def _forget(
    record: Record | None, seen: State | None, end: Settle, now: float
) -> tuple[Answer, Record | None]:
    if record is None or seen is None:
        return Answer.OK, None
    if end.nonce and record.nonce != end.nonce:
        # The record that was looked at is gone: sent again, or late, this meets one that was made since.
        return Answer.LOST, None
    if seen is State.RUNNING and now < record.lease_until:
        return Answer.REFUSED, None
    return Answer.OK, None


def _settled(record: Record, end: Settle, now: float) -> Record:
    kind = end.kind
    steps = record.steps if end.steps is None else end.steps
    not_before = now + end.after if end.after else 0.0
    if kind is Kind.UNKNOWN:
        expires = inf
    elif kind is Kind.RELEASED and steps:
        expires = _kept_with_steps(record.noted, end.retention, max(now, not_before))
    else:
        expires = max(now + end.retention, not_before)
    buried = kind in (Kind.DONE, Kind.FAILED) and end.tombstone and expires != inf
    return msgspec.structs.replace(
        record,
        state=State(kind.value),
        updated=now,
        settled=now,
        lease_until=now,
        expires=expires,
        tombstone=expires + end.tombstone if buried else 0.0,
        not_before=not_before,
        policy=end.policy or record.policy,
        marker=end.marker,
        result=end.result,
        ref=end.ref if end.ref is not None else record.ref,
        error=end.error,
        steps=steps,
    )


def _kept_with_steps(noted: float, retention: float, free: float) -> float:
    """Steps are remembered for one retention after the last of them, however often the run is retried (R14).

    Where that is over by the time `free` at which the next one may try, he would make them again, although they survive a
    release (R26): then for one retention from there.
    """
    kept = noted + retention
    return kept if kept > free else free + retention


def _won(record: Record) -> tuple[Verdict, Record | None]:
    return Won(record), record


def _fresh(ask: Ask, now: float, previous: Record | None) -> Record:
    return Record(
        state=State.RUNNING,
        nonce=ask.nonce,
        attempts=1,
        token=_next_token(previous, now),
        created=now,
        updated=now,
        lease_until=now + ask.lease,
        expires=_running_expiry(ask.policy, ask.lease, ask.retention, now),
        policy=ask.policy,
        fingerprint=ask.fingerprint,
        fingerprint_version=ask.fingerprint_version,
        labels=ask.labels,
        secret_id=ask.secret_id,
        scope=ask.scope,
    )


def _take_over(record: Record, ask: Ask, now: float) -> Record:
    """A new owner for the same run: steps, ids, labels, fingerprint and secret id stay; attempts count on."""
    policy = stricter(record.policy, ask.policy)
    return msgspec.structs.replace(
        record,
        state=State.RUNNING,
        nonce=ask.nonce,
        attempts=record.attempts + 1,
        token=_next_token(record, now),
        updated=now,
        lease_until=now + ask.lease,
        expires=_running_expiry(policy, ask.lease, ask.retention, now),
        policy=policy,
        fingerprint=record.fingerprint or ask.fingerprint,
        fingerprint_version=record.fingerprint_version if record.fingerprint else ask.fingerprint_version,
        settled=None,
        tombstone=0.0,
        not_before=0.0,
        resolved=False,
        marker="",
        result=b"",
        error=None,
    )


def _extend(record: Record, lease: float, retention: float, now: float) -> Record:
    return msgspec.structs.replace(
        record,
        updated=now,
        lease_until=now + lease,
        expires=_running_expiry(record.policy, lease, retention, now),
    )


def _running_expiry(policy: Policy, lease: float, retention: float, now: float) -> float:
    """A run under retry may be forgotten one retention after its lease; hold and probe never forget (R18)."""
    return now + lease + retention if policy is Policy.RETRY else inf


def _next_token(previous: Record | None, now: float) -> int:
    """A number for people and logs that grows with every owner of a key. The fence is the nonce, not this."""
    micros = int(now * 1_000_000)
    return micros if previous is None else max(micros, previous.token + 1)


def conflicts(record: Record, ask: Ask) -> bool:
    """A call without a fingerprint never conflicts; fingerprints of two versions cannot be compared (R22)."""
    if not ask.fingerprint or not record.fingerprint:
        return False
    return record.fingerprint_version == ask.fingerprint_version and record.fingerprint != ask.fingerprint


def _is_bare_release(record: Record) -> bool:
    """A released record that holds no steps or ids binds nobody to its request (R14).

    A take-over that was given back before it ran (its marker) does: the attempt before it may have had its effect.
    """
    given_back = record.marker and record.attempts > 1
    return record.state is State.RELEASED and not record.steps and not given_back


def event_of(record: Record | None, end: Settle, now: float) -> Event:
    """The audit line for an accepted settle that names an actor."""
    attempt = 0 if record is None else record.attempts
    return Event(now, end.kind, view(record, now), end.actor, end.reason, attempt)
