"""What the tests of the state machine share: asks, ends, and records that came to be by them."""

from __future__ import annotations

import msgspec

from semel import model
from semel.keys import make_scope
from semel.model import (
    Answer,
    Ask,
    Failure,
    Kind,
    Note,
    Policy,
    Record,
    Renewal,
    Settle,
    Verdict,
    Won,
)

NOW = 1_000_000.0
LEASE, RETENTION = 10.0, 100.0
SCOPE = make_scope("semel", "acme", "pay", "key-1")
ONE, TWO, THREE = b"1" * 16, b"2" * 16, b"3" * 16
MINE, OTHER = b"m" * 32, b"o" * 32
OWNERS_KINDS = (Kind.DONE, Kind.FAILED, Kind.UNKNOWN, Kind.RELEASED)
STRICT = (Policy.HOLD, Policy.PROBE)
FAILURE = Failure("Declined", "card", "no")


def ask(nonce: bytes = ONE, **more: object) -> Ask:
    base = Ask(SCOPE, nonce, LEASE, RETENTION)
    return msgspec.structs.replace(base, **more)


def end(nonce: bytes = ONE, kind: Kind = Kind.DONE, **more: object) -> Settle:
    base = Settle(SCOPE, nonce, kind, RETENTION)
    return msgspec.structs.replace(base, **more)


def word(kind: Kind = Kind.DONE, new_nonce: bytes = THREE, nonce: bytes = b"", **more: object) -> Settle:
    return end(nonce, kind, new_nonce=new_nonce, **{"actor": "ada", **more})


def won(record: Record | None = None, asked: Ask | None = None, now: float = NOW) -> Record:
    verdict, changed = model.claim(record, asked or ask(), now)
    assert isinstance(verdict, Won)
    assert changed is verdict.record
    return changed


def settled(kind: Kind, now: float = NOW, record: Record | None = None, **more: object) -> Record:
    record = record or won(now=now)
    answer, changed = model.settle(record, end(record.nonce, kind, **more), now)
    assert answer is Answer.OK
    assert changed is not None
    return changed


def noted(record: Record, now: float = NOW, entry: bytes = b"step") -> Record:
    answer, changed = model.note(record, Note(SCOPE, record.nonce, entry), now)
    assert answer is Answer.OK
    assert changed is not None
    return changed


def verdict_of(record: Record | None, asked: Ask, now: float) -> Verdict:
    """A verdict that leaves the record as it is."""
    verdict, changed = model.claim(record, asked, now)
    assert changed is None, verdict
    return verdict


def renewal(nonce: bytes = ONE) -> Renewal:
    return Renewal(SCOPE, nonce, LEASE, RETENTION)
