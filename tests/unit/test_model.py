"""The state machine, ruling by ruling. Properties over all sequences are in test_model_properties.py."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from semel import model
from semel.keys import make_scope
from semel.model import (
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
    assert verdict_of(won(), ask(TWO), NOW + LEASE - 0.001) == Busy(pytest.approx(0.001), 1)  # type: ignore[arg-type]
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


# ------------------------------------------------------------------------------------------- rulings


def test_R9_a_delayed_release_is_busy_until_its_time() -> None:
    record = settled(Kind.RELEASED, after=30.0)
    assert verdict_of(record, ask(TWO), NOW + 10) == Busy(20.0, 1, delayed=True)
    assert won(record, ask(TWO), NOW + 30).not_before == 0.0


@pytest.mark.parametrize("stored", Policy)
@pytest.mark.parametrize("asked", Policy)
def test_R10_of_stored_and_asked_policy_the_stricter_decides(stored: Policy, asked: Policy) -> None:
    order = (Policy.RETRY, Policy.PROBE, Policy.HOLD)
    expected = max(stored, asked, key=order.index)
    record = won(asked=ask(policy=stored))
    verdict, changed = model.claim(record, ask(TWO, policy=asked), NOW + LEASE)
    if expected is Policy.RETRY:
        assert isinstance(verdict, Won)
    else:
        assert verdict == Unknown(record, expected)
        assert changed is None


def test_R10_a_takeover_keeps_the_stricter_policy() -> None:
    record = won(asked=ask(policy=Policy.PROBE))
    taken = won(record, ask(TWO, takeover=ONE), NOW + LEASE)
    assert (taken.policy, taken.expires) == (Policy.PROBE, inf)


def test_R11_a_probe_takes_over_exactly_the_attempt_it_looked_at() -> None:
    record = won(asked=ask(policy=Policy.PROBE))
    assert isinstance(verdict_of(record, ask(TWO, takeover=THREE), NOW + LEASE), Unknown)
    assert isinstance(verdict_of(record, ask(TWO, takeover=ONE), NOW + LEASE - 1), Busy)
    taken = won(record, ask(TWO, takeover=ONE), NOW + LEASE)
    assert (taken.nonce, taken.attempts) == (TWO, 2)
    assert isinstance(verdict_of(taken, ask(THREE, takeover=ONE), NOW + LEASE), Busy)


def test_R11_a_probe_may_clear_an_outcome_that_was_declared_unknown() -> None:
    record = settled(Kind.UNKNOWN, policy=Policy.PROBE)
    assert won(record, ask(TWO, takeover=ONE), NOW).attempts == 2


def test_R11_what_a_strict_callers_probe_found_settles_a_lapsed_run_under_retry_but_no_live_one() -> None:
    running = won()
    found = word(actor="", nonce=running.nonce, result=b"found")
    assert model.settle(running, found, NOW)[0] is Answer.REFUSED
    answer, changed = model.settle(running, found, running.lease_until)
    assert answer is Answer.OK
    assert changed is not None
    assert (changed.state, changed.result, changed.nonce) == (State.DONE, b"found", THREE)
    assert model.settle(running, word(nonce=running.nonce), running.lease_until)[0] is Answer.REFUSED


@pytest.mark.parametrize("policy", STRICT)
def test_R12_unknown_is_read_not_written(policy: Policy) -> None:
    record = won(asked=ask(policy=policy))
    assert record.state is State.RUNNING
    assert model.view(record, NOW + LEASE - 1) is State.RUNNING
    assert model.view(record, NOW + LEASE) is State.UNKNOWN
    assert model.view(record, NOW + 1e9) is State.UNKNOWN
    assert verdict_of(record, ask(TWO), NOW + 1e9) == Unknown(record, policy)


@pytest.mark.parametrize("policy", Policy)
def test_R12_the_late_owner_may_settle_until_a_word_changes_the_nonce(policy: Policy) -> None:
    record = won(asked=ask(policy=policy))
    assert settled(Kind.DONE, NOW + LEASE + 1, record).state is State.DONE
    held = won(asked=ask(policy=Policy.HOLD))
    answer, changed = model.settle(held, word(), NOW + LEASE + 1)
    assert answer is Answer.OK
    assert model.settle(changed, end(ONE), NOW + LEASE + 1) == (Answer.LOST, None)


@pytest.mark.parametrize("policy", Policy)
def test_R12_a_declared_unknown_never_ends_by_time_whatever_the_policy(policy: Policy) -> None:
    record = settled(Kind.UNKNOWN, record=won(asked=ask(policy=policy)))
    assert record.expires == inf
    assert verdict_of(record, ask(TWO), NOW + 1e9) == Unknown(record, policy)


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.FAILED, Kind.RELEASED])
def test_R13_a_word_decides_unknown_and_failed_records_once(kind: Kind) -> None:
    held = won(asked=ask(policy=Policy.HOLD))
    for record in (settled(Kind.UNKNOWN), settled(Kind.FAILED), held):
        later = NOW + LEASE
        answer, changed = model.settle(record, word(kind, result=b"r"), later)
        assert answer is Answer.OK
        assert changed is not None
        assert (changed.state, changed.nonce, changed.resolved) == (State(kind.value), THREE, True)
        assert model.settle(changed, word(kind), later) == (Answer.OK, None)  # sent again
        assert model.settle(changed, word(kind, TWO), later) == (Answer.REFUSED, None)  # a second one


def test_R13_never_on_live_or_takeable_runs_nor_on_done_or_released_records() -> None:
    live = won(asked=ask(policy=Policy.HOLD))
    cases = [(live, NOW), (won(), NOW), (won(), NOW + LEASE), (settled(Kind.DONE), NOW)]
    cases.append((settled(Kind.RELEASED), NOW))
    for record, now in cases:
        for kind in (Kind.DONE, Kind.FAILED, Kind.RELEASED):
            assert model.settle(record, word(kind), now) == (Answer.REFUSED, None)
    assert model.settle(settled(Kind.UNKNOWN), word(Kind.UNKNOWN), NOW) == (Answer.REFUSED, None)


def test_R13_a_word_may_name_the_attempt_it_is_about() -> None:
    record = settled(Kind.UNKNOWN)
    assert model.settle(record, word(nonce=TWO), NOW) == (Answer.LOST, None)
    assert model.settle(record, word(nonce=ONE), NOW)[0] is Answer.OK
    assert model.settle(None, word(), NOW) == (Answer.GONE, None)


def test_R14_a_bare_release_binds_nobody_and_starts_again_at_attempt_one() -> None:
    second = won(won(asked=ask(fingerprint=MINE)), ask(TWO, fingerprint=MINE), NOW + LEASE)
    record = settled(Kind.RELEASED, record=second, error=FAILURE)
    assert (record.state, record.error, record.attempts) == (State.RELEASED, FAILURE, 2)
    fresh = won(record, ask(THREE, fingerprint=OTHER), NOW)
    assert (fresh.attempts, fresh.fingerprint, fresh.error) == (1, OTHER, None)
    assert fresh.token > record.token


def test_R14_a_release_with_steps_keeps_fingerprint_attempts_and_labels() -> None:
    first = noted(won(asked=ask(fingerprint=MINE, labels={"a": "b"}, secret_id="k1")))
    record = settled(Kind.RELEASED, record=first, error=FAILURE, ref="ord_1")
    assert verdict_of(record, ask(TWO, fingerprint=OTHER), NOW) == Mismatch()
    again = won(record, ask(TWO, labels={"c": "d"}, secret_id="k2"), NOW)
    assert (again.attempts, again.steps, again.fingerprint) == (2, b"step", MINE)
    assert (again.labels, again.secret_id, again.error) == ({"a": "b"}, "k1", None)
    assert (again.settled, again.created, again.ref) == (None, NOW, "ord_1")


def test_R14_a_release_ends_by_retention_and_leaves_no_tombstone() -> None:
    record = settled(Kind.RELEASED, tombstone=1000.0)
    assert model.view(record, NOW + RETENTION - 1) is State.RELEASED
    assert model.view(record, NOW + RETENTION) is None


def test_R14_a_release_with_steps_ends_one_retention_after_the_last_note() -> None:
    first = noted(won(asked=ask(lease=50.0)), NOW + 5)
    record = settled(Kind.RELEASED, NOW + 40, first)
    assert record.expires == NOW + 5 + RETENTION


def test_R14_a_release_with_steps_that_comes_later_than_that_ends_one_retention_after_it() -> None:
    late = NOW + 5 + RETENTION
    first = noted(won(asked=ask(lease=500.0)), NOW + 5)
    assert settled(Kind.RELEASED, late - 1, first).expires == late
    for now in (late, late + 50):
        assert settled(Kind.RELEASED, now, first).expires == now + RETENTION
    held = settled(Kind.UNKNOWN, record=first)
    for actor in ("ada", ""):
        answer, changed = model.settle(held, word(Kind.RELEASED, actor=actor), late + 50)
        assert answer is Answer.OK
        assert changed is not None
        assert (changed.steps, changed.expires) == (b"step", late + 50 + RETENTION)
    assert settled(Kind.RELEASED, late, first, retention=0.0).expires == late
    assert settled(Kind.RELEASED, late, first, retention=inf).expires == inf


def test_R26_a_word_does_not_overwrite_a_step_that_was_noted_since_it_was_read() -> None:
    first = noted(won(asked=ask(policy=Policy.HOLD)), NOW + 1)
    release = word(Kind.RELEASED, steps=b"", noted=first.noted)
    assert model.settle(noted(first, NOW + 20), release, NOW + 30) == (Answer.LOST, None)
    answer, changed = model.settle(first, release, NOW + 30)
    assert answer is Answer.OK
    assert changed is not None
    assert (changed.state, changed.steps) == (State.RELEASED, b"")
    assert model.settle(changed, release, NOW + 31) == (Answer.OK, None)


def test_R15_a_repair_overrules_any_settled_record_but_no_run() -> None:
    for kind in OWNERS_KINDS:
        answer, changed = model.settle(settled(kind), word(Kind.FAILED, repair=True), NOW)
        assert answer is Answer.OK
        assert changed is not None
        assert changed.state is State.FAILED
    assert model.settle(won(), word(repair=True), NOW) == (Answer.REFUSED, None)


def test_R17_lost_is_answered_only_when_another_nonce_holds_the_key() -> None:
    record = won()
    assert model.renew(record, renewal(TWO), NOW) == (Answer.LOST, None)
    assert model.renew(None, renewal(), NOW) == (Answer.GONE, None)
    assert model.renew(record, renewal(), NOW + LEASE + RETENTION) == (Answer.GONE, None)
    for kind in OWNERS_KINDS:
        answer, changed = model.renew(settled(kind), renewal(), NOW)
        assert answer is not Answer.LOST
        assert changed is None


@pytest.mark.parametrize("policy", Policy)
def test_R17_a_lapsed_lease_that_nobody_took_can_be_renewed(policy: Policy) -> None:
    answer, changed = model.renew(won(asked=ask(policy=policy)), renewal(), NOW + LEASE + 1)
    assert answer is Answer.OK
    assert changed is not None
    assert changed.lease_until == NOW + LEASE + 1 + LEASE
    assert changed.expires == (inf if policy in STRICT else NOW + 1 + 2 * LEASE + RETENTION)
    assert model.view(changed, NOW + LEASE + 1) is State.RUNNING


def test_R17_nothing_that_an_overtaken_owner_writes_is_accepted() -> None:
    record = won(won(), ask(TWO), NOW + LEASE)
    for kind in OWNERS_KINDS:
        assert model.settle(record, end(ONE, kind), NOW + LEASE) == (Answer.LOST, None)
    assert model.renew(record, renewal(ONE), NOW + LEASE) == (Answer.LOST, None)
    assert model.note(record, Note(SCOPE, ONE, b"x"), NOW + LEASE) == (Answer.LOST, None)


def test_R18_a_run_under_retry_lives_lease_and_retention_past_its_last_renewal() -> None:
    record = won()
    assert model.view(record, NOW + LEASE + RETENTION - 1) is State.RUNNING
    assert model.view(record, NOW + LEASE + RETENTION) is None
    assert model.settle(record, end(), NOW + LEASE + RETENTION) == (Answer.GONE, None)
    assert won(record, ask(TWO, fingerprint=OTHER), NOW + LEASE + RETENTION).attempts == 1


def test_R18_a_result_may_be_kept_for_ever() -> None:
    record = settled(Kind.DONE, retention=inf)
    assert model.view(record, NOW + 1e12) is State.DONE


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.FAILED])
def test_R19_a_tombstone_knows_the_key_as_used_until_it_ends(kind: Kind) -> None:
    record = settled(kind, tombstone=50.0)
    assert model.view(record, NOW + RETENTION - 1) is State(kind.value)
    assert model.view(record, NOW + RETENTION) is State.EXPIRED
    assert verdict_of(record, ask(TWO, fingerprint=OTHER), NOW + RETENTION) == Expired(NOW + RETENTION + 50)
    assert model.view(record, NOW + RETENTION + 50) is None
    assert won(record, ask(TWO), NOW + RETENTION + 50).tombstone == 0.0


def test_R19_a_stored_tombstone_reads_as_expired() -> None:
    record = msgspec.structs.replace(settled(Kind.DONE), state=State.EXPIRED, expires=NOW, tombstone=NOW + 50)
    assert model.view(record, NOW + 1) is State.EXPIRED
    assert verdict_of(record, ask(TWO), NOW + 1) == Expired(NOW + 50)


def test_R7_forget_refuses_a_live_run_and_nothing_else() -> None:
    forget = end(b"", Kind.FORGOTTEN)
    assert model.settle(None, forget, NOW) == (Answer.OK, None)
    for policy in Policy:
        record = won(asked=ask(policy=policy))
        assert model.settle(record, forget, NOW + LEASE - 1) == (Answer.REFUSED, None)
        assert model.settle(record, forget, NOW + LEASE) == (Answer.OK, None)
    for kind in OWNERS_KINDS:
        assert model.settle(settled(kind), forget, NOW) == (Answer.OK, None)


def test_R9_a_delay_outlasts_retention() -> None:
    for record, attempts in ((won(), 1), (noted(won()), 2)):  # steps are there when it may be tried (R26)
        released = settled(Kind.RELEASED, record=record, after=RETENTION + 50)
        assert model.view(released, NOW + RETENTION + 49) is State.RELEASED
        assert verdict_of(released, ask(TWO), NOW + RETENTION + 49) == Busy(1.0, 1, delayed=True)
        taken = won(released, ask(TWO), NOW + RETENTION + 50)
        assert (taken.attempts, taken.steps) == (attempts, record.steps)


def test_R11_a_probe_that_found_nothing_leaves_a_stored_hold_unknown() -> None:
    record = won(asked=ask(policy=Policy.HOLD))
    probing = ask(TWO, takeover=ONE, policy=Policy.PROBE)
    assert verdict_of(record, probing, NOW + LEASE) == Unknown(record, Policy.HOLD)


def test_R16_a_late_copy_of_a_claim_that_was_given_up_is_not_granted() -> None:
    record = settled(Kind.RELEASED, record=won(asked=ask(policy=Policy.HOLD)))
    assert verdict_of(record, ask(), NOW) == Busy(0.0, 1)
    assert won(record, ask(TWO), NOW).attempts == 1


def test_R18_a_result_kept_for_ever_needs_no_tombstone() -> None:
    assert settled(Kind.DONE, retention=inf, tombstone=10.0).tombstone == 0.0


def test_R19_a_tombstone_takes_no_write_from_anybody() -> None:
    record = settled(Kind.DONE, tombstone=50.0)
    buried = NOW + RETENTION
    for nonce in (ONE, TWO):
        assert model.settle(record, end(nonce), buried) == (Answer.GONE, None)
        assert model.settle(record, word(nonce=nonce, repair=True), buried) == (Answer.GONE, None)
        assert model.renew(record, renewal(nonce), buried) == (Answer.GONE, None)
        assert model.note(record, Note(SCOPE, nonce, b"x"), buried) == (Answer.GONE, None)


def test_R19_a_buried_record_has_no_body_and_stays_expired_whatever_the_clock_says() -> None:
    running = noted(won(asked=ask(fingerprint=MINE, labels={"a": "b"})))
    record = settled(
        Kind.FAILED, record=running, result=b"r", ref="o", error=FAILURE, marker="m", tombstone=5.0
    )
    buried = model.bury(record)
    assert (buried.result, buried.ref, buried.error, buried.marker) == (b"", None, None, "")
    assert (buried.labels, buried.steps) == (None, b"")
    assert (buried.attempts, buried.expires, buried.tombstone) == (1, 0.0, record.tombstone)


def test_R24_a_key_tried_again_after_a_release_keeps_its_secret() -> None:
    record = settled(Kind.RELEASED, record=won(asked=ask(secret_id="old")))
    assert won(record, ask(TWO, secret_id="new"), NOW).secret_id == "old"
    assert won(record, ask(TWO, secret_id="new"), NOW + RETENTION).secret_id == "new"


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
