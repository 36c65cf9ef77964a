"""What holds for every sequence of claims, writes and clock movements on one key, found by search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from semel import model
from semel.keys import make_scope
from semel.model import (
    Answer,
    Ask,
    Busy,
    Expired,
    Failure,
    Kind,
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

SCOPE = make_scope("semel", "acme", "pay", "key-1")
START = 1_000_000.0
NONCES = [bytes([n]) * 16 for n in range(1, 5)]
WORDS = [bytes([n]) * 16 for n in range(11, 14)]
Op = Ask | Settle | Renewal | Note | float

spans = st.sampled_from([0.5, 5.0, 20.0])
retentions = st.sampled_from([0.0, 1.0, 30.0, inf])
nonces = st.sampled_from(NONCES)
asks = st.builds(
    Ask,
    scope=st.just(SCOPE),
    nonce=nonces,
    lease=spans,
    retention=retentions,
    policy=st.sampled_from(Policy),
    fingerprint=st.sampled_from([b"", b"f", b"g"]),
    fingerprint_version=st.sampled_from([1, 1, 1, 2]),
    labels=st.sampled_from([None, {"a": "b"}]),
    secret_id=st.sampled_from(["", "k1", "k2"]),
    takeover=st.sampled_from([b"", b"", *NONCES, *WORDS]),
)
ends = st.builds(
    Settle,
    scope=st.just(SCOPE),
    nonce=nonces,
    kind=st.sampled_from(Kind),
    retention=retentions,
    tombstone=st.sampled_from([0.0, 0.0, 7.0]),
    result=st.sampled_from([b"", b"r"]),
    ref=st.sampled_from([None, "ord_1"]),
    error=st.sampled_from([None, Failure("E")]),
    after=st.sampled_from([0.0, 0.0, 3.0]),
    policy=st.sampled_from([None, None, *Policy]),
    steps=st.sampled_from([None, None, b""]),
)
words = st.builds(
    lambda end, nonce, new_nonce, repair: msgspec.structs.replace(
        end, nonce=nonce, new_nonce=new_nonce, repair=repair, actor="ada"
    ),
    ends,
    st.sampled_from([b"", *NONCES]),
    st.sampled_from(WORDS),
    st.sampled_from([False, False, False, True]),
)
renewals = st.builds(Renewal, scope=st.just(SCOPE), nonce=nonces, lease=spans, retention=retentions)
notes = st.builds(Note, scope=st.just(SCOPE), nonce=nonces, entry=st.sampled_from([b"x", b"yy"]))
jumps = st.sampled_from([0.0, 0.25, 1.0, 6.0, 25.0, 60.0])
ops: st.SearchStrategy[Op] = st.one_of(asks, asks, ends, words, renewals, notes, jumps)
histories = st.lists(ops, max_size=25)


@dataclass
class Key:
    """One key under the model: the record, the time, and what was answered."""

    record: Record | None = None
    now: float = START
    log: list[tuple[Op, Record | None, Verdict | Answer | None, Record | None]] = field(default_factory=list)

    def apply(self, op: Op) -> Verdict | Answer | None:
        before = self.record
        answer: Verdict | Answer | None
        match op:
            case Ask():
                answer, changed = model.claim(before, op, self.now)
            case Settle():
                answer, changed = model.settle(before, op, self.now)
                if op.kind is Kind.FORGOTTEN and answer is Answer.OK:
                    self.record = None
            case Renewal():
                answer, changed = model.renew(before, op, self.now)
            case Note():
                answer, changed = model.note(before, op, self.now)
            case _:
                self.now += op
                answer = changed = None
        if changed is not None:
            self.record = changed
        self.log.append((op, before, answer, self.record))
        return answer


def play(history: Sequence[Op]) -> Key:
    key = Key()
    for op in history:
        key.apply(op)
    return key


@given(histories)
def test_no_write_by_a_nonce_that_was_overtaken_is_ever_accepted(history: list[Op]) -> None:
    key = Key()
    overtaken: set[bytes] = set()
    for op in history:
        before = key.record
        answer = key.apply(op)
        after = key.record
        if isinstance(op, Ask) and isinstance(answer, Won):
            overtaken.discard(op.nonce)  # it owns the key again
        if (
            isinstance(op, Settle | Renewal | Note)
            and op.nonce in overtaken
            and not getattr(op, "new_nonce", b"")
        ):
            ended = before is None or model.view(before, key.now) is None  # then there is nothing to forget
            forgets = isinstance(op, Settle) and op.kind is Kind.FORGOTTEN and ended
            assert forgets or (answer is not Answer.OK and after == before)
        if before is not None and after is not None and after.nonce != before.nonce:
            overtaken.add(before.nonce)


@given(histories, asks)
def test_a_claim_sent_again_changes_nothing_but_the_lease(history: list[Op], ask: Ask) -> None:
    key = play(history)
    first = key.apply(ask)
    granted = key.record
    second = key.apply(ask)
    assert type(second) is type(first)
    if isinstance(first, Won):
        assert key.record == granted
        key.now += 0.25
        third = key.apply(ask)
        assert granted is not None
        if model.view(granted, key.now) is not None:
            assert isinstance(third, Won)
            times = {"updated": 0.0, "lease_until": 0.0, "expires": 0.0}
            assert msgspec.structs.replace(third.record, **times) == msgspec.structs.replace(granted, **times)


@given(histories, st.one_of(ends, words))
def test_a_settle_sent_again_is_accepted_and_changes_nothing(history: list[Op], end: Settle) -> None:
    key = play(history)
    if key.apply(end) is not Answer.OK:
        return
    stored = key.record
    assert key.apply(end) in {Answer.OK, Answer.GONE}
    assert key.record == stored


@given(histories, jumps)
def test_unknown_never_ends_by_time(history: list[Op], jump: float) -> None:
    key = play(history)
    if model.view(key.record, key.now) is State.UNKNOWN:
        assert model.view(key.record, key.now + jump * 1e9) is State.UNKNOWN


@given(histories, st.lists(jumps, min_size=1, max_size=6))
def test_time_alone_moves_a_record_only_forward(history: list[Op], waits: list[float]) -> None:
    key = play(history)
    legal: dict[State | None, set[State | None]] = {
        None: {None},
        State.RUNNING: {State.RUNNING, State.UNKNOWN, None},
        State.UNKNOWN: {State.UNKNOWN},
        State.DONE: {State.DONE, State.EXPIRED, None},
        State.FAILED: {State.FAILED, State.EXPIRED, None},
        State.RELEASED: {State.RELEASED, None},
        State.EXPIRED: {State.EXPIRED, None},
    }
    for wait in waits:
        before = model.view(key.record, key.now)
        key.now += wait
        assert model.view(key.record, key.now) in legal[before]


@given(histories, asks)
def test_expiry_is_looked_at_before_conflict(history: list[Op], ask: Ask) -> None:
    key = play(history)
    if model.view(key.record, key.now) is None:
        answer = key.apply(ask)
        assert isinstance(answer, Won)
        assert (answer.record.attempts, answer.record.fingerprint) == (1, ask.fingerprint)
        assert answer.record.steps == b""


@given(histories, asks)
def test_only_a_win_writes_and_a_winner_holds_a_live_lease(history: list[Op], ask: Ask) -> None:
    key = play(history)
    before = key.record
    seen = model.view(before, key.now)
    answer = key.apply(ask)
    if isinstance(answer, Won):
        assert key.record == answer.record
        assert (answer.record.state, answer.record.nonce) == (State.RUNNING, ask.nonce)
        assert answer.record.lease_until == key.now + ask.lease
        assert seen in {None, State.RUNNING, State.UNKNOWN, State.RELEASED}
    else:
        assert key.record == before
    if isinstance(answer, Replay):
        assert seen in {State.DONE, State.FAILED}
    if isinstance(answer, Expired):
        assert seen is State.EXPIRED
    if isinstance(answer, Busy):
        assert answer.retry_after > 0 or seen is State.RELEASED


@given(histories, asks)
def test_a_live_owner_is_never_displaced(history: list[Op], ask: Ask) -> None:
    key = play(history)
    record = key.record
    if record is None or model.view(record, key.now) is not State.RUNNING or key.now >= record.lease_until:
        return
    key.apply(ask)
    assert key.record is not None
    assert key.record.nonce == record.nonce


@given(histories)
def test_tokens_grow_with_every_owner_and_attempts_count_takeovers(history: list[Op]) -> None:
    key = play(history)
    for op, before, answer, after in key.log:
        if not (isinstance(op, Ask) and isinstance(answer, Won)):
            continue
        assert after is not None
        if before is None:
            assert after.attempts == 1
        elif before.state is State.RUNNING and before.nonce == op.nonce and after.attempts == before.attempts:
            assert after.token >= before.token
        else:
            assert after.token > before.token
            assert after.attempts in {1, before.attempts + 1}


@given(histories, asks)
def test_policy_decides_lost_outcomes_by_the_stricter_of_two(history: list[Op], ask: Ask) -> None:
    key = play(history)
    record = key.record
    answer = key.apply(ask)
    if isinstance(answer, Unknown):
        assert record is not None
        assert answer.record == record
        assert answer.policy is model.stricter(record.policy, ask.policy)
        assert record.state is State.UNKNOWN or answer.policy is not Policy.RETRY


@given(st.sampled_from(Policy), st.sampled_from(Policy), st.sampled_from(Policy))
def test_strictness_is_an_order(a: Policy, b: Policy, c: Policy) -> None:
    assert model.stricter(a, a) is a
    assert model.stricter(a, b) is model.stricter(b, a)
    assert model.stricter(a, model.stricter(b, c)) is model.stricter(model.stricter(a, b), c)


@given(histories, words, words)
def test_R13_a_word_is_accepted_once(history: list[Op], first: Settle, second: Settle) -> None:
    key = play(history)
    plain = [msgspec.structs.replace(word, repair=False, nonce=b"") for word in (first, second)]
    decided = {Kind.DONE, Kind.FAILED, Kind.RELEASED}
    if (
        plain[0].new_nonce == plain[1].new_nonce
        or plain[0].kind not in decided
        or plain[1].kind not in decided
    ):
        return
    if key.record is not None and key.record.nonce in WORDS:
        return  # a word of the history itself; sent again it would be accepted
    if key.apply(plain[0]) is Answer.OK:
        stored = key.record
        assert key.apply(plain[1]) in {Answer.REFUSED, Answer.GONE}
        assert key.record == stored


@given(histories, words)
def test_R13_a_word_never_touches_a_run_that_may_still_go_on(history: list[Op], word: Settle) -> None:
    key = play(history)
    record = key.record
    if record is None or model.view(record, key.now) is not State.RUNNING or word.kind is Kind.FORGOTTEN:
        return
    if record.nonce == word.new_nonce:
        return
    assert key.apply(word) in {Answer.REFUSED, Answer.LOST}
    assert key.record == record


@given(histories)
def test_R7_forget_refuses_exactly_the_live_runs(history: list[Op]) -> None:
    key = play(history)
    record = key.record
    live = (
        record is not None
        and record.state is State.RUNNING
        and key.now < record.lease_until
        and model.view(record, key.now) is State.RUNNING
    )
    answer = key.apply(Settle(SCOPE, b"", Kind.FORGOTTEN, 1.0))
    assert answer is (Answer.REFUSED if live else Answer.OK)
    assert (key.record is None) == (not live)


@given(histories, asks)
def test_R14_a_release_blocks_nobody_after_its_delay(history: list[Op], ask: Ask) -> None:
    key = play(history)
    record = key.record
    if record is None or model.view(record, key.now) is not State.RELEASED or record.nonce == ask.nonce:
        return
    key.now = max(key.now, record.not_before)
    still = model.view(record, key.now) is not None
    answer = key.apply(ask)
    if record.steps and still and model.conflicts(record, ask):
        assert isinstance(answer, model.Mismatch)
    else:
        assert isinstance(answer, Won)
        assert answer.record.steps == (record.steps if still else b"")
        assert answer.record.attempts == (record.attempts + 1 if record.steps and still else 1)


@given(histories)
def test_R19_only_outcomes_leave_tombstones(history: list[Op]) -> None:
    key = play(history)
    for _, _, _, after in key.log:
        if after is not None and after.tombstone:
            assert after.state in {State.DONE, State.FAILED}
            assert after.tombstone >= after.expires


@given(histories)
def test_R18_what_has_no_expiry_is_unknown_strict_or_kept_for_ever(history: list[Op]) -> None:
    for op, _, _, after in play(history).log:
        if after is None or isinstance(op, float):
            continue
        strict = after.state is State.RUNNING and after.policy is not Policy.RETRY
        if after.state is State.UNKNOWN or strict:
            assert after.expires == inf


@given(histories, renewals)
def test_R17_a_renewal_says_lost_only_to_a_nonce_that_does_not_hold_the_key(
    history: list[Op], renewal: Renewal
) -> None:
    key = play(history)
    record = key.record
    answer = key.apply(renewal)
    if answer is Answer.LOST:
        assert record is not None
        assert record.nonce != renewal.nonce
    if answer is Answer.OK and record is not None and key.record is not None:
        times = {"updated": 0.0, "lease_until": 0.0, "expires": 0.0}
        assert msgspec.structs.replace(key.record, **times) == msgspec.structs.replace(record, **times)


@given(histories, notes)
def test_R26_a_note_appends_and_touches_nothing_else(history: list[Op], note: Note) -> None:
    key = play(history)
    record = key.record
    if key.apply(note) is Answer.OK:
        assert record is not None
        assert key.record == msgspec.structs.replace(
            record, steps=record.steps + note.entry, noted=key.now, updated=key.now
        )
    else:
        assert key.record == record
