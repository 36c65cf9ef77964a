"""A store and the reference, played side by side and compared after every move.

The reference is the memory store, which is `model.py` under a lock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec
import pytest

from semel.keys import Scope, make_scope
from semel.model import (
    Answer,
    Ask,
    Busy,
    Event,
    Expired,
    Kind,
    Note,
    Record,
    Renewal,
    Replay,
    Settle,
    State,
    Unknown,
    Won,
    view,
)
from semel.runtime import run_sync
from semel.store import Query, Store
from semel.stores.memory import MemoryStore
from tests.contract.sequences import DRIFT, NONCES, SEEN, Step, Who

TOLERANCE = 2.4
TRIES = 5


def play(store: Store, run: Callable[[Coroutine[Any, Any, Any]], Any], sequence: Sequence[Step]) -> None:
    """Play it, and once more where the machine stood still for longer than the tolerance: the reference's time did not."""
    for left in reversed(range(TRIES)):
        began = time.monotonic()
        try:
            Pair(store, run).play(sequence)
        except AssertionError:
            if left == 0 or time.monotonic() - began < TOLERANCE:
                raise
        else:
            return


@dataclass
class Pair:
    """A store and the reference, played side by side."""

    store: Store
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    def __post_init__(self) -> None:
        self.virtual = 0.0
        self.reference = MemoryStore(clock=lambda: 1_700_000_000.0 + self.virtual)
        self.tenant = f"tenant-{secrets.token_hex(8)}"
        self.scopes = [make_scope("equivalence", self.tenant, "op", f"key-{n}") for n in range(3)]
        self.tokens: dict[bytes, tuple[int, int]] = {}

    def play(self, sequence: Sequence[Step]) -> None:
        try:
            for step in sequence:
                self.take(step)
            for scope in self.scopes:
                self.compare_records(scope)
            self.compare_scans()
        finally:
            self.clear()

    def take(self, step: Step) -> None:
        match step.verb:
            case "jump":
                span = step.span + DRIFT
                self.virtual += span
                self.store._skew += span  # type: ignore[attr-defined]  # the model has one
            case "purge":
                while self.ask(self.store.purge(100)):
                    pass
                for scope in self.scopes:
                    self.compare_tombstone(scope)
            case "claim" | "claims":
                asks = [self.resolve(part) for part in step.parts or (step,)]
                self.both(lambda side: side.claim(asks))
            case "renew":
                self.both(lambda side: side.renew([self.resolve(step)]))
            case "note":
                self.both(lambda side: side.note(self.resolve(step)))
            case _:
                ends = [self.resolve(part) for part in step.parts or (step,)]
                self.both(lambda side: side.settle(self.seen_by(side, ends)))
        for number in sorted({part.scope for part in step.parts or (step,)}):
            self.compare_records(self.scopes[number])

    def ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.run(call)

    def both(self, call: Callable[[Store], Coroutine[Any, Any, Any]]) -> None:
        expected = run_sync(call(self.reference))
        actual = self.ask(call(self.store))
        base = run_sync(self.reference.peek(self.scopes[0]))[1], self.ask(self.store.peek(self.scopes[0]))[1]
        if not isinstance(expected, list):
            expected, actual = [expected], [actual]
        assert len(actual) == len(expected)
        for ours, theirs in zip(expected, actual, strict=True):
            compare_answers(ours, theirs, *base)

    def resolve(self, step: Step) -> Any:
        scope = self.scopes[step.scope]
        nonce = self.nonce(step.who, scope)
        chosen = dict(step.options)
        if not self.has_steps(scope):
            chosen.pop("steps", None)  # only what was noted can be shortened
        match step.verb:
            case "claim":
                return Ask(
                    scope=scope, nonce=nonce or NONCES[0], takeover=self.nonce(step.takeover, scope), **chosen
                )
            case "renew":
                return Renewal(scope=scope, nonce=nonce or NONCES[0], **chosen)
            case "note":
                return Note(scope=scope, nonce=nonce or NONCES[0], **chosen)
            case "forget":
                return Settle(scope=scope, nonce=nonce, kind=Kind.FORGOTTEN, **chosen)
            case "word":
                return Settle(scope=scope, nonce=nonce, **chosen)
            case _:
                return Settle(scope=scope, nonce=nonce or NONCES[0], **chosen)

    def seen_by(self, side: Store, ends: Sequence[Settle]) -> list[Settle]:
        """The time of a note is each side's own."""
        run = run_sync if side is self.reference else self.run
        found = [run(side.peek(end.scope))[0] if end.noted == SEEN else None for end in ends]
        return [
            end if record is None else msgspec.structs.replace(end, noted=record.noted)
            for end, record in zip(ends, found, strict=True)
        ]

    def has_steps(self, scope: Scope) -> bool:
        record = run_sync(self.reference.peek(scope))[0]
        return record is not None and record.noted > 0

    def nonce(self, who: Who, scope: Scope) -> bytes:
        if who == "owner":
            record = run_sync(self.reference.peek(scope))[0]
            return b"" if record is None else record.nonce
        return {"one": NONCES[0], "two": NONCES[1], "three": NONCES[2], "nobody": b""}[who]

    # -------------------------------------------------------------------------------- comparing

    def compare_records(self, scope: Scope) -> None:
        expected, now = run_sync(self.reference.peek(scope))
        actual, then = self.ask(self.store.peek(scope))
        state = view(expected, now)
        assert view(actual, then) is state
        if expected is None or state is None:
            self.tokens.pop(scope.hash, None)
        elif state is not State.EXPIRED:
            compare_records(expected, actual, now, then)
            before = self.tokens.get(scope.hash)
            if before is not None:
                assert (actual.token > before[1]) == (expected.token > before[0])
            self.tokens[scope.hash] = expected.token, actual.token

    def compare_tombstone(self, scope: Scope) -> None:
        """After a purge the body is gone (R19); before it, a store may still have it."""
        record, now = self.ask(self.store.peek(scope))
        if view(record, now) is State.EXPIRED:
            assert (record.result, record.ref, record.error, record.steps) == (b"", None, None, b"")
            assert (record.marker, record.labels or None) == ("", None)

    def compare_scans(self) -> None:
        for query in (
            Query(tenant=self.tenant),
            Query(tenant=self.tenant, states=frozenset({State.UNKNOWN})),
            Query(tenant=self.tenant, states=frozenset({State.RUNNING, State.FAILED})),
            Query(tenant=self.tenant, abandoned=True),
            Query(tenant=self.tenant, ref="ord_1"),
        ):
            expected, actual = run_sync(self.reference.scan(query)), self.ask(self.store.scan(query))
            found = [
                sorted((record.scope.key, view(record, page.now)) for record in page.records if record.scope)
                for page in (expected, actual)
            ]
            assert found[1] == found[0], query
        for scope in self.scopes:
            self.compare_trails(Query(history=scope))

    def compare_trails(self, query: Query) -> None:
        """The reference, which is never purged, remembers all; a store may have dropped what is a retention old."""
        trails: list[Sequence[Event]] = [
            run_sync(self.reference.scan(query)).events,
            self.ask(self.store.scan(query)).events,
        ]
        expected, actual = ([msgspec.structs.replace(event, at=0.0) for event in trail] for trail in trails)
        assert bool(actual) == bool(expected), (actual, expected)
        assert actual == expected[len(expected) - len(actual) :]

    def clear(self) -> None:
        """Leave nothing behind: unknown records would stay for ever and slow the next sequence down."""
        ends = [Settle(scope, b"", Kind.FORGOTTEN, 0.0) for scope in self.scopes]
        self.store._skew += 100.0  # type: ignore[attr-defined]  # the model has one
        self.ask(self.store.settle(ends))


_TIMES = ("created", "updated", "lease_until", "expires", "settled", "tombstone", "not_before", "noted")


def compare_records(expected: Record, actual: Record, now: float, then: float) -> None:
    for name in Record.__struct_fields__:
        ours, theirs = getattr(expected, name), getattr(actual, name)
        if name == "token":
            continue
        if name in _TIMES and ours not in {None, 0.0, inf}:
            assert theirs is not None, name
            assert theirs - then == pytest.approx(ours - now, abs=TOLERANCE), name
        elif name == "labels":
            assert (theirs or None) == (ours or None)
        else:
            assert theirs == ours, name


def compare_answers(ours: Any, theirs: Any, now: float, then: float) -> None:
    if isinstance(ours, Answer):
        assert theirs is ours
        return
    assert type(theirs) is type(ours), (ours, theirs)
    match ours:
        case Won() | Replay() | Unknown():
            assert ours.record is not None
            compare_records(ours.record, theirs.record, now, then)
            if isinstance(ours, Unknown):
                assert (theirs.policy, theirs.unreadable) == (ours.policy, ours.unreadable)
        case Busy():
            assert (theirs.attempt, theirs.delayed) == (ours.attempt, ours.delayed)
            assert theirs.retry_after == pytest.approx(ours.retry_after, abs=TOLERANCE)
        case Expired():
            assert theirs.until - then == pytest.approx(ours.until - now, abs=TOLERANCE)
        case _:
            assert theirs == ours
