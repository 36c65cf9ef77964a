"""Owners who are gone, and owners who gave the key back: who may go on, and who may not."""

# ruff: noqa: N802, S105, S106 - a test bears the number of its ruling; a secret's id is no secret

from __future__ import annotations

from semel.model import Answer, Busy, Kind, Mismatch, Policy, Replay, State, Unknown, Won
from semel.records import GIVEN_BACK
from semel.testing.contract.bench import FAILURE, LABELS, LEASE, RETENTION, Bench, SkipTest, clause, step

__all__ = ["ReleaseClauses", "TakeoverClauses"]

ONE, TWO = b"\x01" * 32, b"\x02" * 32


class TakeoverClauses:
    """The owner is gone."""

    @clause
    async def test_a_lapsed_run_under_retry_is_taken_over(self, bench: Bench) -> None:
        await bench.win(fingerprint=ONE, labels=LABELS, secret_id="s1")
        first = await bench.record(bench.scope())
        await bench.wait(LEASE + 2)
        second = await bench.win(fingerprint=ONE, labels={"other": "label"}, secret_id="s2")
        record = await bench.record(second.scope)
        assert (record.nonce, record.attempts, record.state) == (second.nonce, 2, State.RUNNING)
        assert (record.labels, record.secret_id, record.created) == (LABELS, "s1", first.created)
        assert record.token > first.token
        assert bench.near(record.updated, await bench.now())
        assert bench.near(record.expires, await bench.now() + second.lease + second.retention)

    @clause
    async def test_a_takeover_by_another_request_is_a_mismatch(self, bench: Bench) -> None:
        await bench.win(fingerprint=ONE)
        await bench.wait(LEASE + 2)
        assert isinstance(await bench.claim(bench.ask(fingerprint=TWO)), Mismatch)

    @clause
    async def test_a_run_without_fingerprint_takes_that_of_its_next_owner(self, bench: Bench) -> None:
        await bench.win()
        await bench.wait(LEASE + 2)
        await bench.win(fingerprint=TWO, fingerprint_version=2)
        record = await bench.record(bench.scope())
        assert (record.fingerprint, record.fingerprint_version) == (TWO, 2)
        await bench.wait(LEASE + 2)
        await bench.win(fingerprint=ONE, fingerprint_version=3)
        record = await bench.record(bench.scope())
        assert (record.fingerprint, record.fingerprint_version) == (TWO, 2)

    @clause
    async def test_a_run_taken_over_shows_nothing_of_the_outcome_that_was_lost(self, bench: Bench) -> None:
        first = await bench.win()
        await bench.note(first, b"step")
        lost = {"result": b"r", "marker": "m", "error": FAILURE, "ref": "ord_1"}
        await bench.finish(first, Kind.UNKNOWN, **lost)
        await bench.wait(5)
        second = await bench.win(takeover=first.nonce, policy=Policy.PROBE)
        record, now = await bench.record(second.scope), await bench.now()
        assert (record.state, record.attempts, record.policy) == (State.RUNNING, 2, Policy.PROBE)
        assert (record.result, record.marker, record.error, record.settled) == (b"", "", None, None)
        assert (record.ref, record.steps, record.expires) == ("ord_1", step(b"step"), float("inf"))
        assert bench.near(record.updated, now)

    @clause
    async def test_R13_a_run_resumed_after_a_word_can_be_resolved_again(self, bench: Bench) -> None:
        first = await bench.win()
        await bench.note(first, b"step")
        await bench.finish(first, Kind.UNKNOWN)
        assert await bench.settle(bench.word(first, Kind.RELEASED)) is Answer.OK
        second = await bench.win()
        assert not (await bench.record(second.scope)).resolved
        await bench.finish(second, Kind.UNKNOWN)
        assert await bench.settle(bench.word(second, Kind.DONE)) is Answer.OK

    @clause
    async def test_nothing_that_an_overtaken_owner_writes_is_accepted(self, bench: Bench) -> None:
        late = await bench.win()
        await bench.wait(LEASE + 2)
        await bench.win()
        before = await bench.record(late.scope)
        for kind in (Kind.DONE, Kind.FAILED, Kind.UNKNOWN, Kind.RELEASED):
            assert await bench.settle(bench.end(late, kind, result=b"late")) is Answer.LOST, kind
        assert await bench.renew(late) is Answer.LOST
        assert await bench.note(late, b"late") is Answer.LOST
        assert await bench.record(late.scope) == before

    @clause
    async def test_an_overtaken_owner_is_still_refused_after_the_new_one_is_done(self, bench: Bench) -> None:
        late = await bench.win()
        await bench.wait(LEASE + 2)
        await bench.finish(await bench.win(), result=b"new")
        assert await bench.settle(bench.end(late, result=b"late")) is Answer.LOST
        assert (await bench.record(late.scope)).result == b"new"

    @clause
    async def test_R17_a_lapsed_owner_whom_nobody_overtook_may_still_settle(self, bench: Bench) -> None:
        for policy in Policy:
            ask = await bench.win(bench.scope(policy), policy=policy)
            await bench.wait(LEASE + 2)
            await bench.finish(ask, result=b"late but ours")
            assert isinstance(await bench.claim(bench.ask(ask.scope)), Replay), policy

    @clause
    async def test_R18_a_run_under_retry_ends_one_retention_after_its_lease(self, bench: Bench) -> None:
        ask = await bench.win(fingerprint=ONE)
        await bench.wait(LEASE + RETENTION + 4)
        assert await bench.peek(ask.scope) is None
        assert await bench.settle(bench.end(ask)) is Answer.GONE
        assert await bench.renew(ask) is Answer.GONE
        verdict = await bench.claim(bench.ask(fingerprint=TWO))
        assert isinstance(verdict, Won)
        assert verdict.record.attempts == 1

    @clause
    async def test_R12_a_lapsed_run_under_hold_or_probe_reads_as_unknown_and_never_ends(
        self, bench: Bench
    ) -> None:
        for policy in (Policy.HOLD, Policy.PROBE):
            ask = await bench.win(bench.scope(policy), policy=policy)
            assert await bench.state(ask.scope) is State.RUNNING
            for span in (LEASE + 2, 2 * RETENTION):
                await bench.wait(span)
                verdict = await bench.claim(bench.ask(ask.scope))
                assert isinstance(verdict, Unknown), policy
                assert (verdict.policy, verdict.unreadable) == (policy, False)
                assert verdict.record is not None
                assert verdict.record.nonce == ask.nonce
                assert await bench.state(ask.scope) is State.UNKNOWN

    @clause
    async def test_R10_of_the_stored_and_the_callers_policy_the_stricter_wins(self, bench: Bench) -> None:
        order = (Policy.RETRY, Policy.PROBE, Policy.HOLD)
        for stored in order:
            await bench.win(bench.scope(stored), policy=stored)
        await bench.wait(LEASE + 2)
        for stored in order:
            for asked in order[1:]:
                verdict = await bench.claim(bench.ask(bench.scope(stored), policy=asked))
                assert isinstance(verdict, Unknown), (stored, asked)
                assert verdict.policy is max(stored, asked, key=order.index)

    @clause
    async def test_R12_an_outcome_declared_unknown_stays_so_whatever_the_policy(self, bench: Bench) -> None:
        for policy in Policy:
            scope = bench.scope(policy)
            ask = await bench.win(scope, policy=policy)
            await bench.finish(ask, Kind.UNKNOWN, retention=LEASE)
            assert (await bench.record(scope)).expires == float("inf")
            await bench.wait(2 * LEASE)
            verdict = await bench.claim(bench.ask(scope))
            assert isinstance(verdict, Unknown), policy
            assert verdict.policy is policy

    @clause
    async def test_a_settle_may_make_the_policy_stricter(self, bench: Bench) -> None:
        await bench.settled(Kind.UNKNOWN, policy=Policy.HOLD)
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Unknown)
        assert verdict.policy is Policy.HOLD

    @clause
    async def test_R11_a_probe_that_found_nothing_takes_an_unknown_run_over(self, bench: Bench) -> None:
        late = await bench.win(policy=Policy.PROBE)
        await bench.wait(LEASE + 2)
        assert isinstance(await bench.claim(bench.ask(takeover=b"\x00" * 16)), Unknown)
        cleared = bench.ask(takeover=late.nonce)
        for _ in range(2):
            verdict = await bench.claim(cleared)
            assert isinstance(verdict, Won)
            assert verdict.record.attempts == 2
        assert await bench.settle(bench.end(late)) is Answer.LOST
        assert isinstance(await bench.claim(bench.ask(takeover=late.nonce)), Busy)

    @clause
    async def test_R11_a_probe_that_found_nothing_leaves_a_stored_hold_unknown(self, bench: Bench) -> None:
        held = await bench.win(policy=Policy.HOLD)
        await bench.wait(LEASE + 2)
        verdict = await bench.claim(bench.ask(takeover=held.nonce, policy=Policy.PROBE))
        assert isinstance(verdict, Unknown)
        assert verdict.policy is Policy.HOLD

    @clause
    async def test_R11_a_takeover_never_breaks_a_live_lease(self, bench: Bench) -> None:
        live = await bench.win(policy=Policy.PROBE)
        assert isinstance(await bench.claim(bench.ask(takeover=live.nonce)), Busy)

    @clause
    async def test_tokens_grow_with_every_owner(self, bench: Bench) -> None:
        tokens = []
        for _ in range(3):
            ask = await bench.win()
            tokens.append((await bench.record(ask.scope)).token)
            await bench.finish(ask, Kind.RELEASED)
        for _ in range(3):
            await bench.win()
            tokens.append((await bench.record(bench.scope())).token)
            await bench.wait(LEASE + 2)
        assert tokens == sorted(set(tokens))

    @clause
    async def test_tokens_grow_though_the_clock_goes_back(self, bench: Bench) -> None:
        if not bench.moves:
            raise SkipTest("the store's clock cannot be moved")
        first = await bench.win()
        before = await bench.record(first.scope)
        await bench.finish(first, Kind.RELEASED)
        await bench.wait(-LEASE)
        await bench.win()
        assert (await bench.record(first.scope)).token > before.token


class ReleaseClauses:
    """A known failure that frees the key."""

    @clause
    async def test_R14_a_bare_release_blocks_nobody_and_binds_nobody(self, bench: Bench) -> None:
        ask = await bench.win(fingerprint=ONE, labels=LABELS)
        await bench.finish(ask, Kind.RELEASED, error=FAILURE, tombstone=RETENTION)
        record = await bench.record(ask.scope)
        assert (record.state, record.error, record.attempts) == (State.RELEASED, FAILURE, 1)
        assert (record.tombstone, record.not_before) == (0.0, 0.0)
        verdict = await bench.claim(bench.ask(fingerprint=TWO))
        assert isinstance(verdict, Won)
        fresh = await bench.record(ask.scope)
        assert (fresh.attempts, fresh.fingerprint, fresh.labels, fresh.error) == (1, TWO, None, None)

    @clause
    async def test_R14_a_claim_that_was_given_back_binds_nobody(self, bench: Bench) -> None:
        ask = await bench.win(fingerprint=ONE)
        await bench.finish(ask, Kind.RELEASED, marker=GIVEN_BACK)
        await bench.win(fingerprint=TWO)
        assert (await bench.record(ask.scope)).attempts == 1

    @clause
    async def test_R14_a_take_over_that_was_given_back_leaves_the_key_bound_to_its_request(
        self, bench: Bench
    ) -> None:
        """The attempt before it was lost, and may have had its effect: another request is another action."""
        first = await bench.win(fingerprint=ONE)
        await bench.wait(LEASE + 1)
        second = await bench.win(fingerprint=ONE)
        await bench.finish(second, Kind.RELEASED, marker=GIVEN_BACK)
        assert isinstance(await bench.claim(bench.ask(fingerprint=TWO)), Mismatch)
        await bench.win(fingerprint=ONE)
        record = await bench.record(first.scope)
        assert (record.attempts, record.fingerprint, record.marker) == (3, ONE, "")

    @clause
    async def test_R14_a_released_failure_is_visible_until_retention_ends(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.RELEASED, error=FAILURE, tombstone=RETENTION)
        await bench.wait(RETENTION - 4)
        assert (await bench.record(ask.scope)).error == FAILURE
        await bench.wait(8)
        assert await bench.peek(ask.scope) is None

    @clause
    async def test_R14_a_release_with_steps_keeps_fingerprint_steps_and_attempts(self, bench: Bench) -> None:
        ask = await bench.win(fingerprint=ONE)
        assert await bench.note(ask, b"step") is Answer.OK
        await bench.finish(ask, Kind.RELEASED)
        assert isinstance(await bench.claim(bench.ask(fingerprint=TWO)), Mismatch)
        verdict = await bench.claim(bench.ask(fingerprint=ONE))
        assert isinstance(verdict, Won)
        assert (verdict.record.attempts, verdict.record.steps) == (2, step(b"step"))

    @clause
    async def test_R14_a_release_with_steps_ends_one_retention_after_the_last_note(
        self, bench: Bench
    ) -> None:
        ask = await bench.win(lease=RETENTION)
        assert await bench.note(ask, b"step") is Answer.OK
        await bench.wait(RETENTION - 10)
        await bench.finish(ask, Kind.RELEASED)
        assert await bench.state(ask.scope) is State.RELEASED
        await bench.wait(20)
        assert await bench.peek(ask.scope) is None

    @clause
    async def test_R14_a_release_with_steps_that_comes_later_than_that_keeps_them_for_one_retention(
        self, bench: Bench
    ) -> None:
        ask = await bench.win(lease=3 * RETENTION)
        assert await bench.note(ask, b"step") is Answer.OK
        await bench.wait(RETENTION + 10)
        await bench.finish(ask, Kind.RELEASED)
        await bench.wait(RETENTION - 10)
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Won)
        assert (verdict.record.attempts, verdict.record.steps) == (2, step(b"step"))

    @clause
    async def test_R14_a_delay_that_outlasts_retention_does_not_outlast_the_steps(self, bench: Bench) -> None:
        ask = await bench.win()
        assert await bench.note(ask, b"step") is Answer.OK
        await bench.finish(ask, Kind.RELEASED, after=(RETENTION + 10) * bench.unit)
        await bench.wait(RETENTION + 14)
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Won)
        assert (verdict.record.attempts, verdict.record.steps) == (2, step(b"step"))

    @clause
    async def test_R24_a_key_tried_again_after_a_release_keeps_its_secret(self, bench: Bench) -> None:
        for key, entry in (("bare", b""), ("with steps", b"step")):
            ask = await bench.win(bench.scope(key), secret_id="old")
            if entry:
                assert await bench.note(ask, entry) is Answer.OK
            await bench.finish(ask, Kind.RELEASED)
            verdict = await bench.claim(bench.ask(ask.scope, secret_id="new"))
            assert isinstance(verdict, Won)
            assert verdict.record.secret_id == "old", key
            assert (await bench.record(ask.scope)).secret_id == "old", key

    @clause
    async def test_R16_a_late_copy_of_a_claim_that_was_given_up_is_not_granted(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.RELEASED)
        before = await bench.record(ask.scope)
        assert isinstance(await bench.claim(ask), Busy)
        assert await bench.record(ask.scope) == before
        assert isinstance(await bench.claim(bench.ask()), Won)

    @clause
    async def test_R9_a_delay_outlasts_retention(self, bench: Bench) -> None:
        for key, entry in (("bare", b""), ("with steps", b"step")):
            ask = await bench.win(bench.scope(key))
            if entry:
                assert await bench.note(ask, entry) is Answer.OK
            await bench.finish(ask, Kind.RELEASED, after=RETENTION, retention=LEASE)
        await bench.wait(RETENTION - 4)
        for key in ("bare", "with steps"):
            verdict = await bench.claim(bench.ask(bench.scope(key)))
            assert isinstance(verdict, Busy), key
            assert verdict.delayed
        await bench.wait(8)
        for key in ("bare", "with steps"):
            await bench.win(bench.scope(key))

    @clause
    async def test_R9_a_delayed_release_is_busy_until_its_time(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.RELEASED, after=LEASE)
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Busy)
        assert verdict.delayed
        assert 0 < verdict.retry_after <= LEASE * bench.unit
        await bench.wait(LEASE + 2)
        assert isinstance(await bench.claim(bench.ask(ask.scope)), Won)

    @clause
    async def test_R9_a_delay_holds_for_a_release_with_steps_too(self, bench: Bench) -> None:
        ask = await bench.win()
        assert await bench.note(ask, b"step") is Answer.OK
        await bench.finish(ask, Kind.RELEASED, after=LEASE)
        assert isinstance(await bench.claim(bench.ask()), Busy)
        await bench.wait(LEASE + 2)
        await bench.win()
        assert (await bench.record(ask.scope)).not_before == 0.0
