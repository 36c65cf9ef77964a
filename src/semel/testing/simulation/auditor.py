"""Watches every change of the server's records and says which promise it breaks, without asking `model`.

It keeps its own few facts about each key (who was granted it last, until when, under which policy, what was settled), so
that a mistake in the model is seen as well as one in a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import msgspec

from semel import steps
from semel.keys import Scope
from semel.model import (
    Answer,
    Ask,
    Busy,
    Expired,
    Kind,
    Mismatch,
    Note,
    Policy,
    Record,
    Renewal,
    Replay,
    Settle,
    Unknown,
    Verdict,
    Won,
)
from semel.records import GIVEN_BACK

__all__ = ["Auditor", "Grant", "name_of"]

_STRICT = {Policy.RETRY: 0, Policy.PROBE: 1, Policy.HOLD: 2}
_STEP = msgspec.msgpack.Decoder(steps.Step).decode


def name_of(scope: Scope) -> str:
    return f"{scope.tenant}/{scope.operation}/{scope.key}"


class Grant(msgspec.Struct):
    """What is known of a key from the grants and ends that were accepted."""

    nonce: bytes
    lease_until: float
    policy: Policy
    fingerprint: bytes
    ended: Kind | None = None
    """None while it runs; UNKNOWN when its owner said so."""
    resolved: bool = False
    result: bytes = b""
    known_until: float = inf
    keeps: bool = False
    """Steps were noted: a release binds the next caller to the same request."""
    noted_at: float = 0.0
    not_before: float = 0.0
    buried_until: float = 0.0
    """An outcome whose time is over is still known as used until then."""
    labels: Mapping[str, str] | None = None
    ref: str | None = None
    token: int = 0
    follows: bool = False
    """An attempt before it was lost, and may have had its effect."""
    bound: bool = False
    """Such a one was given back before it ran: the key is nobody's, and yet bound to its request (R14)."""


class Auditor:
    def __init__(self, *, lossy: bool = False) -> None:
        self._lossy = lossy
        self.expected: dict[bytes, tuple[Kind, float]] = {}
        """What `on_error` said about a run that failed, by nonce: the kind of its end, and its delay."""
        self.replays: set[bytes] = set()
        """Runs that failed under the word "replay": their failure is the outcome, also in a store that forgot their claim."""
        self.ids: dict[bytes, bytes] = {}
        self.begun: dict[tuple[bytes, str], bytes] = {}
        """Steps that were marked as started, and by which nonce."""
        self.grants: dict[bytes, Grant] = {}
        self.noted: dict[bytes, frozenset[str]] = {}
        self.broken: list[str] = []
        self.owners: dict[str, set[bytes]] = {}
        """Every nonce that ever held a key, by name."""
        self.freed: set[str] = set()
        """Keys that a person forgot or released: they may rightly run again."""
        self.probed: set[str] = set()
        """Keys whose lost run was released or taken over because a probe found nothing of it: another request may have them (R14)."""
        self.failed: set[str] = set()
        """Keys that a person, or the word "replay", declared as failed."""
        self.words: set[bytes] = set()
        """Results that a person gave."""
        self.forgotten: dict[tuple[str, bytes], float] = {}
        """Outcomes that were forgotten or replaced, by name and result, and when."""
        self.settled: dict[tuple[str, bytes], float] = {}
        self.over_at: dict[str, float] = {}
        """When the first outcome of a key that leaves a tombstone is no longer kept."""
        self.overtaken: set[str] = set()
        """Keys that were taken from an owner whose lease had lapsed."""
        self.lapsed: list[tuple[str, bytes]] = []
        """Whom they were taken from: name and nonce."""
        self.doubtful: set[str] = set()
        """Keys that the store has rightly told as unknown."""
        self.noted_by: set[tuple[bytes, str]] = set()
        """Steps that were noted as done, and by which nonce."""
        self.ended_at: dict[bytes, float] = {}
        """When the end of an owner was accepted first, by nonce."""

    def save(self) -> Any:
        grants = {key: msgspec.structs.replace(grant) for key, grant in self.grants.items()}
        return grants, dict(self.noted), dict(self.ids), dict(self.begun)

    def restore(self, saved: Any) -> None:
        self.grants = {key: msgspec.structs.replace(grant) for key, grant in saved[0].items()}
        self.noted, self.ids, self.begun = (dict(each) for each in saved[1:])

    def _say(self, name: str, text: str, scope: Scope) -> None:
        self.broken.append(f"{name}: {text} ({name_of(scope)})")

    # ---------------------------------------------------------------------------------------------------- claims

    def claimed(self, ask: Ask, verdict: Verdict | Exception, now: float) -> None:
        grant = self.grants.get(ask.scope.hash)
        if isinstance(verdict, Won):
            self._won(ask, verdict, grant, now)
        elif grant is not None:
            self._refused(ask, verdict, grant, now)
        elif isinstance(verdict, Busy | Replay | Mismatch | Expired | Unknown):
            self._say("I4", f"{type(verdict).__name__} for a key that nobody was granted", ask.scope)

    def _won(self, ask: Ask, won: Won, grant: Grant | None, now: float) -> None:
        key = ask.scope.hash
        self.owners.setdefault(name_of(ask.scope), set()).add(ask.nonce)
        policy, fingerprint, keeps, labels, ref = ask.policy, ask.fingerprint, False, ask.labels, None
        follows = False
        if grant is not None and now < grant.known_until:
            self._check_takeover(ask, grant, now)
            lost = grant.ended is None or grant.ended is Kind.UNKNOWN
            if lost or grant.keeps or grant.bound:
                follows = grant.follows or (lost and grant.nonce != ask.nonce)
                policy = max(ask.policy, grant.policy, key=_STRICT.__getitem__)
                fingerprint, keeps = grant.fingerprint or ask.fingerprint, grant.keeps
                labels, ref = grant.labels, grant.ref
        elif grant is not None and now < grant.buried_until:
            self._say("R19", "granted though its tombstone stands", ask.scope)
        if won.record.attempts == 1 and (grant is None or grant.nonce != ask.nonce):
            self._wipe(key)
        if won.record.labels != labels:
            self._say("R7", "a record lost the labels of its first claim", ask.scope)
        if grant is not None and grant.nonce != ask.nonce and won.record.token <= grant.token:
            self._say("I4", "a new owner's token is not above that of the one before", ask.scope)
        noted_at = grant.noted_at if grant is not None and keeps else 0.0
        known = now + ask.lease + ask.retention if policy is Policy.RETRY else inf
        self.grants[key] = Grant(
            ask.nonce,
            now + ask.lease,
            policy,
            fingerprint,
            keeps=keeps,
            noted_at=noted_at,
            known_until=known,
            labels=labels,
            ref=ref,
            token=won.record.token,
            follows=follows,
        )

    def _wipe(self, key: bytes) -> None:
        """A new life of the key: nothing is known of its steps."""
        self.noted.pop(key, None)
        self.ids.pop(key, None)
        for begun in [begun for begun in self.begun if begun[0] == key]:
            del self.begun[begun]

    def _check_takeover(self, ask: Ask, grant: Grant, now: float) -> None:
        ended = grant.ended
        if grant.nonce == ask.nonce:
            if grant.ended is not None:
                self._say("I5", "a claim that had ended was granted again", ask.scope)
            return
        if now < grant.not_before:
            self._say("R9", "granted before the delay of its release was over", ask.scope)
        if ended is Kind.DONE or ended is Kind.FAILED:
            self._say("I1", f"granted although it is {ended.value}", ask.scope)
        elif grant.ended is None and now < grant.lease_until:
            self._say("I4", "granted to a second owner within the lease of the first", ask.scope)
        elif grant.ended is None or grant.ended is Kind.UNKNOWN:
            cleared = ask.takeover == grant.nonce and grant.policy is not Policy.HOLD
            free = grant.ended is None and grant.policy is ask.policy is Policy.RETRY
            if cleared:
                self.probed.add(name_of(ask.scope))  # whoever gets it may free it, for any request
            if grant.ended is None:
                self.overtaken.add(name_of(ask.scope))
                self.lapsed.append((name_of(ask.scope), grant.nonce))
            if not (cleared or free):
                self._say("I10", f"a lost run under {grant.policy.value} was granted to the next", ask.scope)
        if self._differs(ask, grant) and (grant.ended is not Kind.RELEASED or grant.keeps or grant.bound):
            self._say("I6", "granted to another request", ask.scope)

    def _refused(self, ask: Ask, verdict: Verdict | Exception, grant: Grant, now: float) -> None:
        if isinstance(verdict, Busy) and grant.ended is None and grant.nonce == ask.nonce:
            self._say("R16", "a claim that was sent again was refused to its own sender", ask.scope)
        if isinstance(verdict, Replay):
            if grant.ended not in (Kind.DONE, Kind.FAILED) or verdict.record.result != grant.result:
                self._say("I3", "a replay of what was never settled", ask.scope)
            if (verdict.record.labels, verdict.record.ref) != (grant.labels, grant.ref):
                self._say("R7", "a replay with other labels, or another ref, than were stored", ask.scope)
            if self._differs(ask, grant):
                self._say("I6", "a replay for another request", ask.scope)
        if isinstance(verdict, Busy) and self._differs(ask, grant) and grant.ended is not Kind.RELEASED:
            self._say("I6", "another request was told to wait for this one", ask.scope)
        released = grant.ended is Kind.RELEASED and now >= grant.not_before
        if isinstance(verdict, Busy) and released and grant.nonce != ask.nonce:
            self._say("R14", "a released key was refused to the next", ask.scope)
        if now >= grant.known_until and isinstance(verdict, Replay | Mismatch):
            self._say("I11", f"{type(verdict).__name__} for a key whose time was over", ask.scope)
        if isinstance(verdict, Unknown):
            self._told_unknown(ask, grant, now)
        if isinstance(verdict, Expired) and not grant.known_until <= now < grant.buried_until:
            self._say("R19", "told as expired outside the time of its tombstone", ask.scope)

    def _told_unknown(self, ask: Ask, grant: Grant, now: float) -> None:
        strict = max(ask.policy, grant.policy, key=_STRICT.__getitem__) is not Policy.RETRY
        lapsed = grant.ended is None and now >= grant.lease_until and strict
        if grant.ended is Kind.UNKNOWN or lapsed:
            self.doubtful.add(name_of(ask.scope))
        else:
            self._say("I10", "told as unknown, though nobody has lost it", ask.scope)

    @staticmethod
    def _differs(ask: Ask, grant: Grant) -> bool:
        return bool(ask.fingerprint and grant.fingerprint and ask.fingerprint != grant.fingerprint)

    # ---------------------------------------------------------------------------------------------------- writes

    def renewed(self, renewal: Renewal, answer: Answer | Exception, changed: bool, now: float) -> None:
        grant = self.grants.get(renewal.scope.hash)
        mine = grant is not None and grant.nonce == renewal.nonce
        if changed and not mine:
            self._say("I5", "a fenced owner changed the record by renew", renewal.scope)
        if answer is Answer.LOST and mine:
            self._say("R17", "the owner was told that its lease is lost", renewal.scope)
        if changed and grant is not None and mine:
            grant.lease_until = now + renewal.lease
            retried = grant.policy is Policy.RETRY
            grant.known_until = now + renewal.lease + renewal.retention if retried else inf

    def noted_down(self, note: Note, changed: bool, now: float) -> None:
        grant = self.grants.get(note.scope.hash)
        if not changed:
            return
        if grant is None or grant.nonce != note.nonce:
            self._say("I5", "a fenced owner changed the record by note", note.scope)
            return
        grant.keeps, grant.noted_at = True, now
        self._remember(note.scope, note.nonce, _STEP(note.entry[4:]))

    def _remember(self, scope: Scope, nonce: bytes, step: steps.Step) -> None:
        key = scope.hash
        if step.phase == "done":
            self.noted[key] = self.noted.get(key, frozenset()) | {step.name}
            self.noted_by.add((nonce, step.name))
        elif step.is_taken_back:
            self.begun.pop((key, step.name), None)
        elif step.phase == "started":
            self.begun[key, step.name] = nonce
        elif self.ids.setdefault(key, step.value) != step.value:
            self._say("R25", "a second id was minted for one scope", scope)

    def settled_by(
        self, end: Settle, answer: Answer | Exception, before: Record | None, after: Record | None, now: float
    ) -> bool:
        """True when this very end took effect."""
        if end.kind is Kind.FORGOTTEN:
            if answer is Answer.OK and before is not None:
                self._forgot(end, before, now)
            return False
        if answer is not Answer.OK or after is before:
            return False
        grant = self.grants.get(end.scope.hash)
        if grant is None:
            self._say("I5", "a key that nobody was granted was settled", end.scope)
            return True
        if end.new_nonce:
            self._check_word(end, grant, now)
        elif grant.nonce != end.nonce:
            self._say("I5", "a fenced owner changed the record by settle", end.scope)
        elif grant.ended not in (None, Kind.UNKNOWN):
            self._say("I5", "an outcome was overwritten", end.scope)
        else:
            self._check_decision(end)
        self._ends(end, grant, now)
        return True

    def _check_decision(self, end: Settle) -> None:
        wanted = self.expected.get(end.nonce)
        if wanted is not None and wanted != (end.kind, end.after) and not self._lossy:
            said, told = (
                f"{kind.value} after {after:g} s" for kind, after in (wanted, (end.kind, end.after))
            )
            self._say("R9", f"on_error said {said}, the key is {told}", end.scope)

    def _check_word(self, end: Settle, grant: Grant, now: float) -> None:
        live = grant.ended is None and now < grant.lease_until
        if live or grant.ended in (Kind.DONE, Kind.RELEASED) or (end.actor and grant.resolved):
            self._say("R13", "a word was taken on a key that is live, done or resolved", end.scope)

    def _ends(self, end: Settle, grant: Grant, now: float) -> None:
        name = name_of(end.scope)
        self.ended_at.setdefault(grant.nonce, now)
        if grant.ended in (Kind.DONE, Kind.FAILED):
            self.forgotten[name, grant.result] = now
        if end.new_nonce and end.kind is Kind.DONE:
            self.words.add(end.result)
        if end.actor and end.kind is Kind.RELEASED:
            self.freed.add(name)
        if end.new_nonce and not end.actor and end.kind is Kind.RELEASED:
            self.probed.add(name)
        if end.kind is Kind.FAILED and (end.actor or end.nonce in self.replays):
            self.failed.add(name)
        if end.new_nonce:
            self.owners.setdefault(name, set()).add(end.new_nonce)
        if end.kind is Kind.DONE:
            self.settled[name, end.result] = now
        self._tells_steps(end, grant)
        grant.nonce = end.new_nonce or grant.nonce
        grant.ended, grant.result = end.kind, end.result
        grant.bound = grant.follows and end.marker == GIVEN_BACK
        grant.resolved = bool(end.actor) or grant.resolved
        grant.policy = end.policy or grant.policy
        grant.ref = end.ref if end.ref is not None else grant.ref
        grant.not_before = now + end.after if end.after else 0.0
        if end.actor and end.kind is Kind.RELEASED:
            self._lets_go(end, grant)
        free = max(now, grant.not_before)
        grant.known_until = inf if end.kind is Kind.UNKNOWN else max(now + end.retention, grant.not_before)
        if end.kind is Kind.RELEASED and grant.keeps:
            # After the last of the steps, not after the release (R14), but never before the next one may try (R26).
            kept = grant.noted_at + end.retention
            grant.known_until = kept if kept > free else free + end.retention
        outcome = end.kind in (Kind.DONE, Kind.FAILED) and grant.known_until != inf
        grant.buried_until = grant.known_until + end.tombstone if outcome else 0.0
        if outcome and end.tombstone:
            self.over_at[name] = min(grant.known_until, self.over_at.get(name, inf))

    def _tells_steps(self, end: Settle, grant: Grant) -> None:
        """The store had lost the record: its owner, who has claimed it again, tells what he knows with the end."""
        if end.steps and not end.new_nonce and end.kind in (Kind.RELEASED, Kind.UNKNOWN):
            grant.keeps = True
            for step in steps.decode(end.steps).values():
                self._remember(end.scope, end.nonce, step)

    def _lets_go(self, end: Settle, grant: Grant) -> None:
        """A person's release: what was only begun may be made again, what is finished is remembered (R26)."""
        key = end.scope.hash
        for begun in [begun for begun in self.begun if begun[0] == key]:
            del self.begun[begun]
        grant.keeps = grant.keeps and bool(self.noted.get(key) or key in self.ids)

    def _forgot(self, end: Settle, before: Record, now: float) -> None:
        grant = self.grants.pop(end.scope.hash, None)
        self._wipe(end.scope.hash)
        name = name_of(end.scope)
        self.freed.add(name)
        self.forgotten[name, before.result] = now
        if grant is not None and grant.ended is None and now < grant.lease_until:
            self._say("R7", "a live run was forgotten", end.scope)

    def purged(self, gone: dict[bytes, Record], left: Mapping[bytes, Record], now: float) -> None:
        """I14: what is swept away is over, whoever held it. R19: of what is used up, a purge leaves no body."""
        for key, record in left.items():
            known = self.grants.get(key)
            used_up = known is not None and known.buried_until and now >= known.known_until
            if used_up and (record.result or record.steps or record.labels) and record.scope is not None:
                self._say("R19", "a purge left the body of a key that is used up", record.scope)
        for key, record in gone.items():
            grant = self.grants.pop(key, None)
            self._wipe(key)
            if grant is None or record.scope is None:
                continue
            lost = grant.ended is Kind.UNKNOWN or (grant.ended is None and grant.policy is not Policy.RETRY)
            live = grant.ended is None and now < grant.lease_until
            kept = grant.ended in (Kind.DONE, Kind.FAILED) and now < grant.known_until
            if lost or live or kept:
                self._say("I14", "a purge removed a record that was not over", record.scope)
            elif now < grant.buried_until:
                self._say("R19", "a purge removed a tombstone that stands", record.scope)
