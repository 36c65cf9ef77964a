"""The state machine, ruling by ruling."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from semel import model
from semel.model import (
    Answer,
    Busy,
    Expired,
    Kind,
    Mismatch,
    Note,
    Policy,
    State,
    Unknown,
    Won,
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
    STRICT,
    THREE,
    TWO,
    ask,
    end,
    noted,
    renewal,
    settled,
    verdict_of,
    won,
    word,
)


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


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.FAILED, Kind.RELEASED])
def test_R13_a_person_decides_on_a_lapsed_run_under_retry_which_strict_callers_hold(kind: Kind) -> None:
    running = won()
    said = word(kind, nonce=running.nonce)
    assert model.settle(running, said, NOW)[0] is Answer.REFUSED
    answer, changed = model.settle(running, said, running.lease_until)
    assert answer is Answer.OK
    assert changed is not None
    assert (changed.state.value, changed.resolved, changed.nonce) == (kind.value, True, THREE)


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


def test_R13_never_on_live_runs_nor_on_done_or_released_records() -> None:
    live = won(asked=ask(policy=Policy.HOLD))
    cases = [(live, NOW), (won(), NOW), (settled(Kind.DONE), NOW)]
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


def test_R16_forget_is_about_the_record_that_was_looked_at_and_no_other() -> None:
    mine, late = end(ONE, Kind.FORGOTTEN), end(TWO, Kind.FORGOTTEN)
    assert model.settle(None, late, NOW) == (Answer.OK, None)
    assert model.settle(won(), late, NOW) == (Answer.LOST, None)  # not REFUSED: it is another one's
    assert model.settle(won(), mine, NOW) == (Answer.REFUSED, None)
    for kind in OWNERS_KINDS:
        assert model.settle(settled(kind), mine, NOW) == (Answer.OK, None)
        assert model.settle(settled(kind), late, NOW) == (Answer.LOST, None)
    assert model.settle(settled(Kind.DONE), late, NOW + RETENTION) == (Answer.OK, None)  # ended by time


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
