"""Bugs in what decides about a record: the model, scopes, fingerprints, the memory store's purge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec

from semel import face, keeping, keys, model
from semel.keys import Scope
from semel.model import Answer, Ask, Busy, Kind, Policy, Record, Settle, State, Won
from semel.run import Run
from semel.stores.memory import MemoryStore
from semel.testing.mutants.plant import Patch, mutant

__all__: list[str] = []

replace = msgspec.structs.replace


@mutant("settle-unfenced", check="I5")
def _settle_unfenced() -> Sequence[Patch]:
    """A settle does not compare the nonce: whoever comes last decides."""
    real = model.settle

    def settle(record: Record | None, end: Settle, now: float) -> Any:
        if record is not None and not end.new_nonce and end.kind is not Kind.FORGOTTEN:
            end = replace(end, nonce=record.nonce)
        return real(record, end, now)

    return [(model, "settle", settle)]


@mutant("settle-over-done", check="I5")
def _settle_over_done() -> Sequence[Patch]:
    """A zombie overwrites the result of the owner that came after it."""
    real = model.settle

    def settle(record: Record | None, end: Settle, now: float) -> Any:
        if record is not None and record.state is State.DONE and end.kind is Kind.DONE and not end.new_nonce:
            return Answer.OK, model._settled(record, end, now)
        return real(record, end, now)

    return [(model, "settle", settle)]


@mutant("claim-forgets-its-sender", check="R16")
def _claim_forgets_its_sender() -> Sequence[Patch]:
    """A claim that is sent again after a lost reply is answered Busy to its own sender."""
    real = model.claim

    def claim(record: Record | None, ask: Ask, now: float) -> Any:
        mine = record is not None and record.state is State.RUNNING and record.nonce == ask.nonce
        if mine and record is not None and now < record.lease_until:
            return Busy(record.lease_until - now, record.attempts), None
        return real(record, ask, now)

    return [(model, "claim", claim)]


@mutant("takeover-within-the-lease", check="I4")
def _takeover_within_the_lease() -> Sequence[Patch]:
    """A running key is taken over without a look at its lease."""
    real = model.claim

    def claim(record: Record | None, ask: Ask, now: float) -> Any:
        if record is not None and record.state is State.RUNNING and record.nonce != ask.nonce:
            record = replace(record, lease_until=now)
        return real(record, ask, now)

    return [(model, "claim", claim)]


@mutant("record-dies-before-its-lease", check="I4")
def _record_dies_before_its_lease() -> Sequence[Patch]:
    """The record of a run expires after half of its lease."""

    def running_expiry(policy: Policy, lease: float, retention: float, now: float) -> float:
        del retention
        return now + lease / 2 if policy is Policy.RETRY else inf

    return [(model, "_running_expiry", running_expiry)]


@mutant("released-key-is-refused", check="R14")
def _released_key_is_refused() -> Sequence[Patch]:
    """A key that its owner gave back is refused to others for the length of a lease."""
    real = model._reclaim_released

    def reclaim(record: Record, ask: Ask, now: float) -> Any:
        left = record.updated + ask.lease - now
        return (Busy(left, record.attempts), None) if left > 0 else real(record, ask, now)

    return [(model, "_reclaim_released", reclaim)]


@mutant("mismatch-unseen-while-running", check="I6")
def _mismatch_unseen_while_running() -> Sequence[Patch]:
    """Fingerprints are compared with settled records only."""
    real = model.conflicts

    def conflicts(record: Record, ask: Ask) -> bool:
        return record.state is not State.RUNNING and real(record, ask)

    return [(model, "conflicts", conflicts)]


@mutant("expiry-after-conflict", check="I11")
def _expiry_after_conflict() -> Sequence[Patch]:
    """A record whose time is over still refuses another request."""
    real = model.claim

    def claim(record: Record | None, ask: Ask, now: float) -> Any:
        if record is not None and record.state is State.DONE and model.conflicts(record, ask):
            return model.Mismatch(), None
        return real(record, ask, now)

    return [(model, "claim", claim)]


@mutant("unknown-fails-by-time", check="I10")
def _unknown_fails_by_time() -> Sequence[Patch]:
    """A lost outcome becomes a failure after a while."""
    real = model.claim

    def claim(record: Record | None, ask: Ask, now: float) -> Any:
        verdict, changed = real(record, ask, now)
        if isinstance(verdict, model.Unknown) and record is not None and now > record.lease_until + ask.lease:
            return model.Replay(replace(record, state=State.FAILED)), None
        return verdict, changed

    return [(model, "claim", claim)]


@mutant("unknown-freed-by-time", check="I10")
def _unknown_freed_by_time() -> Sequence[Patch]:
    """A lost outcome is run again after a while, whatever the policy says."""
    real = model.claim

    def claim(record: Record | None, ask: Ask, now: float) -> Any:
        verdict, changed = real(record, ask, now)
        if isinstance(verdict, model.Unknown) and record is not None and now > record.lease_until + ask.lease:
            taken = model._take_over(record, ask, now)
            return Won(taken), taken
        return verdict, changed

    return [(model, "claim", claim)]


@mutant("weaker-policy-wins", check="I10")
def _weaker_policy_wins() -> Sequence[Patch]:
    """Of the stored and the caller's policy the more lenient one counts."""
    real = model.stricter

    def stricter(first: Policy, second: Policy) -> Policy:
        return second if real(first, second) is first else first

    return [(model, "stricter", stricter)]


@mutant("given-back-binds-nobody", check="I6", workload="stragglers")
def _given_back_binds_nobody() -> Sequence[Patch]:
    """A take-over that was given back before it ran frees its key for any request, though the attempt before it was lost."""
    return [
        (model, "_is_bare_release", lambda record: record.state is State.RELEASED and not record.steps),
    ]


@mutant("renew-by-order", check="I5")
def _renew_by_order() -> Sequence[Patch]:
    """The fence of a heartbeat compares nonces by order, not for equality."""
    real = model.renew

    def renew(record: Record | None, renewal: Any, now: float) -> Any:
        if record is not None and renewal.nonce > record.nonce:
            renewal = replace(renewal, nonce=record.nonce)
        return real(record, renewal, now)

    return [(model, "renew", renew)]


@mutant("note-unfenced", check="I5")
def _note_unfenced() -> Sequence[Patch]:
    """A step is noted for whoever sends it."""
    real = model.note

    def note(record: Record | None, entry: Any, now: float) -> Any:
        return real(record, entry if record is None else replace(entry, nonce=record.nonce), now)

    return [(model, "note", note)]


@mutant("steps-lost-at-takeover", check="R26")
def _steps_lost_at_takeover() -> Sequence[Patch]:
    """A new owner does not inherit the steps."""
    real = model._take_over

    def take_over(record: Record, ask: Ask, now: float) -> Record:
        return replace(real(record, ask, now), steps=b"")

    return [(model, "_take_over", take_over)]


@mutant("word-on-a-live-run", check="R13")
def _word_on_a_live_run() -> Sequence[Patch]:
    """Resolve is accepted while the owner is at work."""
    anything = frozenset(State)
    lenient = {kind: (owner, anything) for kind, (owner, _) in model.TRANSITIONS.items()}
    return [(model, "TRANSITIONS", lenient), (keeping, "_check_resolvable", lambda *_: None)]


@mutant("forget-a-live-run", check="R7")
def _forget_a_live_run() -> Sequence[Patch]:
    """Forget removes a record whatever its state."""
    return [(model, "_forget", lambda *_: (Answer.OK, None))]


@mutant("purge-by-age", check="I14")
def _purge_by_age() -> Sequence[Patch]:
    """The clean-up goes by age alone: runs and unknown outcomes too."""

    async def purge(self: MemoryStore, limit: int) -> int:
        now = self._clock()
        old = [key for key, record in self._records.items() if record.created < now - 0.5][:limit]
        for key in old:
            del self._records[key]
        return len(old)

    return [(MemoryStore, "purge", purge)]


@mutant("tenant-left-out", check="I7")
def _tenant_left_out() -> Sequence[Patch]:
    """The scope hash does not cover the tenant."""
    real = keys.make_scope

    def make_scope(prefix: str, tenant: str, operation: str, key: str, readable: Any = "full") -> Scope:
        shared = real(prefix, "everybody", operation, key, readable)
        return replace(shared, tenant=tenant)

    return [(face, "make_scope", make_scope)]


@mutant("scope-joined", check="I7")
def _scope_joined() -> Sequence[Patch]:
    """The parts of a scope are joined by a separator instead of being length-prefixed."""
    real = keys.make_scope

    def make_scope(prefix: str, tenant: str, operation: str, key: str, readable: Any = "full") -> Scope:
        text = f"{prefix}:{tenant}:{operation}:{key}"
        return replace(
            real(prefix, tenant, operation, key, readable), hash=hashlib.sha256(text.encode()).digest()
        )

    return [(face, "make_scope", make_scope)]


@mutant("fingerprint-of-text", check="I6")
def _fingerprint_of_text() -> Sequence[Patch]:
    """The request is hashed as its JSON text: the order of fields and 5.0 for 5 make it another one."""

    def fingerprint(obj: object, fields: Any = None) -> str:
        del fields
        return hashlib.sha256(json.dumps(obj).encode()).hexdigest()

    return [(face, "fingerprint", fingerprint)]


@mutant("downstream-key-of-the-attempt", check="I1")
def _downstream_key_of_the_attempt() -> Sequence[Patch]:
    """The key for an outside service changes with every attempt."""
    real = Run.downstream_key

    def downstream_key(self: Run, name: str) -> str:
        return real(self, f"{name}/{self.attempt}/{self.ask.nonce.hex()}")

    return [(Run, "downstream_key", downstream_key)]


@mutant("delay-not-looked-at", check="R9")
def _delay_not_looked_at() -> Sequence[Patch]:
    """A released key is granted before its delay is over."""
    real = model._reclaim_released

    def reclaim(record: Record, ask: Ask, now: float) -> Any:
        return real(replace(record, not_before=0.0), ask, now)

    return [(model, "_reclaim_released", reclaim)]


@mutant("straggler-granted", check="I5")
def _straggler_granted() -> Sequence[Patch]:
    """A late copy of a claim that its caller has given up, and released, is granted: to nobody."""
    real = model.claim

    def claim(record: Record | None, ask: Ask, now: float) -> Any:
        if record is not None and record.state is State.RELEASED and record.nonce == ask.nonce:
            record = replace(record, nonce=b"somebody else")
        return real(record, ask, now)

    return [(model, "claim", claim)]


@mutant("tombstone-unseen", check="R19")
def _tombstone_unseen() -> Sequence[Patch]:
    """A key whose retention is over is as good as never used, tombstone or not."""
    real = model.view

    def view(record: Record | None, now: float) -> State | None:
        seen = real(record, now)
        return None if seen is State.EXPIRED else seen

    return [(model, "view", view)]


@mutant("tombstone-for-ever", check="R19")
def _tombstone_for_ever() -> Sequence[Patch]:
    """A tombstone stands after its end."""
    real = model.view

    def view(record: Record | None, now: float) -> State | None:
        seen = real(record, now)
        return State.EXPIRED if seen is None and record is not None and record.tombstone else seen

    return [(model, "view", view)]


@mutant("tombstone-purged", check="R19")
def _tombstone_purged() -> Sequence[Patch]:
    """A purge sweeps tombstones away before their end."""
    real = MemoryStore.purge

    async def purge(self: MemoryStore, limit: int) -> int:
        now = self._clock()
        for key in [key for key, each in self._records.items() if model.view(each, now) is State.EXPIRED]:
            del self._records[key]
        return await real(self, limit)

    return [(MemoryStore, "purge", purge)]


@mutant("labels-of-the-last", check="R7")
def _labels_of_the_last() -> Sequence[Patch]:
    """Whoever takes a run over puts his own labels on it."""
    real = model._take_over

    def take_over(record: Record, ask: Ask, now: float) -> Record:
        return replace(real(record, ask, now), labels=ask.labels)

    return [(model, "_take_over", take_over)]


@mutant("trail-ends-with-forget", check="R7")
def _trail_ends_with_forget() -> Sequence[Patch]:
    """The audit trail is forgotten with its key."""
    real = MemoryStore._settle

    def settle(self: MemoryStore, end: Settle) -> Answer:
        answer = real(self, end)
        if end.kind is Kind.FORGOTTEN:
            self._audit.pop(end.scope.hash, None)
        return answer

    return [(MemoryStore, "_settle", settle)]


@mutant("peek-from-a-replica", check="H1")
def _peek_from_a_replica() -> Sequence[Patch]:
    """A peek is answered by a replica that lags behind."""

    async def peek(self: MemoryStore, scope: Scope) -> Any:
        replica = self.__dict__.setdefault("replica", {})
        there = replica.get(scope.hash)
        replica[scope.hash] = self._records.get(scope.hash)
        return there, self._clock()

    return [(MemoryStore, "peek", peek)]
