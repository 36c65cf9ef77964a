"""The state machine: claims, settles and tables. Its rulings are in test_model_rulings.py, properties in test_model_properties.py."""

from __future__ import annotations

from math import inf

import pytest

from semel import model
from semel.model import (
    Answer,
    Busy,
    Event,
    Kind,
    Mismatch,
    Note,
    Policy,
    Record,
    Replay,
    State,
)
from tests.unit.model_lab import (
    FAILURE,
    LEASE,
    MINE,
    NOW,
    ONE,
    OTHER,
    OWNERS_KINDS,
    RETENTION,
    SCOPE,
    THREE,
    TWO,
    ask,
    end,
    noted,
    settled,
    verdict_of,
    won,
    word,
)

# ------------------------------------------------------------------------------------------- claims


def test_a_fresh_claim_wins_and_the_record_says_everything_that_was_asked() -> None:
    record = won(
        asked=ask(
            fingerprint=MINE, fingerprint_version=2, labels={"a": "b"}, secret_id="k1", policy=Policy.HOLD
        )
    )
    assert record == Record(
        state=State.RUNNING,
        nonce=ONE,
        attempts=1,
        token=int(NOW * 1_000_000),
        created=NOW,
        updated=NOW,
        lease_until=NOW + LEASE,
        expires=inf,
        policy=Policy.HOLD,
        fingerprint=MINE,
        fingerprint_version=2,
        labels={"a": "b"},
        secret_id="k1",
        scope=SCOPE,
    )


def test_a_claim_sent_again_is_granted_again_as_the_same_attempt_with_a_full_lease() -> None:
    first = won(asked=ask(fingerprint=MINE))
    again = won(first, ask(fingerprint=MINE), NOW + 5)
    assert (again.attempts, again.token, again.created) == (1, first.token, NOW)
    assert (again.lease_until, again.expires) == (NOW + 5 + LEASE, NOW + 5 + LEASE + RETENTION)


def test_a_claim_sent_again_is_granted_even_after_its_lease() -> None:
    for policy in Policy:
        first = won(asked=ask(policy=policy))
        assert won(first, ask(policy=policy), NOW + LEASE + 1).attempts == 1


def test_somebody_elses_live_run_is_busy_until_its_lease_ends() -> None:
    assert verdict_of(won(), ask(TWO), NOW + 4) == Busy(6.0, 1)
    assert verdict_of(won(), ask(TWO), NOW + LEASE - 0.001) == Busy(pytest.approx(0.001), 1)  # type: ignore[arg-type]  # equal to any number near it
    assert won(won(), ask(TWO), NOW + LEASE).attempts == 2


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.FAILED])
def test_an_outcome_is_replayed_until_retention_ends(kind: Kind) -> None:
    record = settled(kind, NOW, error=FAILURE, result=b"r")
    assert verdict_of(record, ask(TWO), NOW + RETENTION - 0.001) == Replay(record)
    fresh = won(record, ask(TWO, fingerprint=OTHER), NOW + RETENTION)
    assert (fresh.attempts, fresh.result, fresh.error, fresh.created) == (1, b"", None, NOW + RETENTION)


def test_another_request_is_a_mismatch_in_every_state_but_a_bare_release() -> None:
    running = won(asked=ask(fingerprint=MINE))
    other = ask(TWO, fingerprint=OTHER)
    assert verdict_of(running, other, NOW) == Mismatch()
    assert verdict_of(running, other, NOW + LEASE + 1) == Mismatch()
    for kind in (Kind.DONE, Kind.FAILED, Kind.UNKNOWN):
        assert verdict_of(settled(kind, record=running), other, NOW) == Mismatch()
    held = won(asked=ask(fingerprint=MINE, policy=Policy.HOLD))
    assert verdict_of(held, other, NOW + LEASE + 1) == Mismatch()


def test_R22_no_conflict_without_both_fingerprints_or_between_versions() -> None:
    for stored, asked in ((MINE, b""), (b"", MINE), (b"", b"")):
        record = settled(Kind.DONE, record=won(asked=ask(fingerprint=stored)))
        assert isinstance(verdict_of(record, ask(TWO, fingerprint=asked), NOW), Replay)
    versioned = settled(Kind.DONE, record=won(asked=ask(fingerprint=MINE, fingerprint_version=1)))
    newer = ask(TWO, fingerprint=OTHER, fingerprint_version=2)
    assert isinstance(verdict_of(versioned, newer, NOW), Replay)


# ----------------------------------------------------------------------------------------- settling


def test_an_owner_cannot_change_what_it_settled() -> None:
    for first in (Kind.DONE, Kind.FAILED, Kind.RELEASED):
        record = settled(first)
        for second in set(OWNERS_KINDS) - {first}:
            assert model.settle(record, end(kind=second), NOW) == (Answer.REFUSED, None)
        assert model.note(record, Note(SCOPE, ONE, b"x"), NOW) == (Answer.REFUSED, None)


def test_done_keeps_what_was_claimed_and_ends_the_lease() -> None:
    running = noted(won(asked=ask(fingerprint=MINE, labels={"a": "b"})), NOW + 1)
    record = settled(Kind.DONE, NOW + 2, running, result=b"r", marker="m", ref="ord_1", tombstone=5.0)
    assert (record.state, record.result, record.marker, record.ref) == (State.DONE, b"r", "m", "ord_1")
    assert (record.settled, record.updated, record.lease_until) == (NOW + 2, NOW + 2, NOW + 2)
    assert (record.expires, record.tombstone) == (NOW + 2 + RETENTION, NOW + 7 + RETENTION)
    assert (record.fingerprint, record.labels, record.steps) == (MINE, {"a": "b"}, b"step")
    assert (record.created, record.noted, record.token) == (NOW, NOW + 1, running.token)


def test_a_settle_sent_again_is_accepted_and_writes_nothing() -> None:
    for kind in (Kind.DONE, Kind.FAILED, Kind.RELEASED):
        assert model.settle(settled(kind), end(kind=kind), NOW + 1) == (Answer.OK, None)


def test_strangers_are_lost_and_absent_keys_gone() -> None:
    for kind in OWNERS_KINDS:
        assert model.settle(won(), end(TWO, kind), NOW) == (Answer.LOST, None)
        assert model.settle(None, end(ONE, kind), NOW) == (Answer.GONE, None)
    assert model.note(won(), Note(SCOPE, TWO, b"x"), NOW) == (Answer.LOST, None)
    assert model.note(None, Note(SCOPE, ONE, b"x"), NOW) == (Answer.GONE, None)


def test_an_owner_may_still_say_what_it_declared_unknown() -> None:
    unknown = settled(Kind.UNKNOWN, ref="ord_1", policy=Policy.HOLD)
    assert (unknown.policy, unknown.ref) == (Policy.HOLD, "ord_1")
    for kind in (Kind.DONE, Kind.FAILED, Kind.RELEASED):
        record = settled(kind, NOW + 1, unknown)
        assert (record.state, record.ref) == (State(kind.value), "ord_1")


def test_R26_notes_are_appended_and_a_settle_may_shorten_them() -> None:
    record = noted(noted(won(), NOW + 1, b"a"), NOW + 2, b"b")
    assert (record.steps, record.noted, record.lease_until) == (b"ab", NOW + 2, NOW + LEASE)
    assert settled(Kind.DONE, record=record, steps=b"").steps == b""
    assert settled(Kind.DONE, record=record).steps == b"ab"


def test_R26_steps_survive_a_takeover() -> None:
    taken = won(noted(won()), ask(TWO), NOW + LEASE)
    assert (taken.steps, taken.noted, taken.attempts) == (b"step", NOW, 2)


def test_a_takeover_adopts_a_fingerprint_only_where_there_is_none() -> None:
    bare = won(won(), ask(TWO, fingerprint=MINE, fingerprint_version=2), NOW + LEASE)
    assert (bare.fingerprint, bare.fingerprint_version) == (MINE, 2)
    kept = won(won(asked=ask(fingerprint=MINE)), ask(TWO, fingerprint_version=2), NOW + LEASE)
    assert (kept.fingerprint, kept.fingerprint_version) == (MINE, 1)


def test_tokens_grow_even_when_the_clock_goes_back() -> None:
    first = won()
    second = won(first, ask(TWO), NOW + LEASE)
    assert second.token == int((NOW + LEASE) * 1_000_000)
    released = settled(Kind.RELEASED, NOW - 500, second)
    assert won(released, ask(THREE), NOW - 500).token == second.token + 1


# ------------------------------------------------------------------------------------------- tables


def test_stricter_orders_hold_above_probe_above_retry() -> None:
    assert model.stricter(Policy.RETRY, Policy.PROBE) is Policy.PROBE
    assert model.stricter(Policy.HOLD, Policy.PROBE) is Policy.HOLD
    assert model.stricter(Policy.RETRY, Policy.RETRY) is Policy.RETRY


def test_every_kind_of_settle_but_forget_has_its_transitions() -> None:
    assert set(model.TRANSITIONS) == set(Kind) - {Kind.FORGOTTEN}
    for owner, person in model.TRANSITIONS.values():
        assert State.RUNNING in owner
        assert State.RUNNING not in person


def test_a_record_that_is_not_there_reads_as_nothing() -> None:
    assert model.view(None, NOW) is None


def test_R13_an_audit_line_says_who_changed_what_from_which_state() -> None:
    held = won(asked=ask(policy=Policy.HOLD))
    line = model.event_of(held, word(reason="asked the bank"), NOW + LEASE)
    assert line == Event(NOW + LEASE, Kind.DONE, State.UNKNOWN, "ada", "asked the bank", 1)
    assert model.event_of(None, word(), NOW) == Event(NOW, Kind.DONE, None, "ada", "", 0)


def test_the_public_names_are_all_there() -> None:
    assert all(hasattr(model, name) for name in model.__all__)
