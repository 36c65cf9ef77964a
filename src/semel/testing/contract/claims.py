"""Claims: who wins a key, and what everybody else is told."""

# ruff: noqa: N802, S106 - a test bears the number of its ruling; a secret's id is no secret

from __future__ import annotations

from semel.model import Answer, Busy, Expired, Kind, Mismatch, Policy, Replay, State, Unknown, Won
from semel.testing.contract.bench import FAILURE, LABELS, LEASE, RETENTION, Bench, clause

__all__ = ["ClaimClauses"]

ONE, TWO = b"\x01" * 32, b"\x02" * 32


class ClaimClauses:
    """A fresh key, a running one, a settled one."""

    @clause
    async def test_the_first_claim_wins_and_leaves_a_running_record(self, bench: Bench) -> None:
        ask = bench.ask(fingerprint=ONE, labels=LABELS, secret_id="s1")
        verdict = await bench.claim(ask)
        assert isinstance(verdict, Won)
        record = await bench.record(ask.scope)
        now = await bench.now()
        assert (record.state, record.nonce, record.attempts) == (State.RUNNING, ask.nonce, 1)
        assert (record.fingerprint, record.policy, record.labels) == (ONE, Policy.RETRY, LABELS)
        assert (record.secret_id, record.settled, record.error) == ("s1", None, None)
        assert bench.near(record.created, now)
        assert bench.near(record.updated, now)
        assert bench.near(record.lease_until, now + ask.lease)
        assert bench.near(record.expires, now + ask.lease + ask.retention)

    @clause
    async def test_the_winner_is_told_the_record_as_it_was_stored(self, bench: Bench) -> None:
        verdict = await bench.claim(bench.ask(fingerprint=ONE, labels=LABELS))
        assert isinstance(verdict, Won)
        stored = await bench.record(bench.scope())
        told = verdict.record
        assert (told.nonce, told.attempts, told.token, told.steps) == (stored.nonce, 1, stored.token, b"")
        assert told.secret_id == stored.secret_id
        assert bench.near(told.lease_until, stored.lease_until)

    @clause
    async def test_a_claim_sent_again_wins_again_as_the_same_attempt(self, bench: Bench) -> None:
        ask = bench.ask()
        first, second = await bench.claim(ask), await bench.claim(ask)
        assert isinstance(first, Won)
        assert isinstance(second, Won)
        assert (second.record.attempts, second.record.token) == (1, first.record.token)

    @clause
    async def test_a_claim_sent_again_renews_the_lease(self, bench: Bench) -> None:
        ask = await bench.win()
        await bench.wait(LEASE - 4)
        assert isinstance(await bench.claim(ask), Won)
        await bench.wait(LEASE - 4)
        assert isinstance(await bench.claim(bench.ask()), Busy)

    @clause
    async def test_a_claim_sent_again_after_its_own_end_is_told_that_end(self, bench: Bench) -> None:
        for kind, verdict in ((Kind.DONE, Replay), (Kind.FAILED, Replay), (Kind.UNKNOWN, Unknown)):
            ask = await bench.settled(kind, bench.scope(kind))
            assert isinstance(await bench.claim(ask), verdict), kind

    @clause
    async def test_R18_a_run_under_hold_or_probe_has_no_expiry(self, bench: Bench) -> None:
        for policy in (Policy.HOLD, Policy.PROBE):
            ask = await bench.win(bench.scope(policy), policy=policy)
            assert (await bench.record(ask.scope)).expires == float("inf")
            assert await bench.renew(ask) is Answer.OK
            assert (await bench.record(ask.scope)).expires == float("inf")

    @clause
    async def test_another_claim_is_busy_while_the_lease_lasts_and_writes_nothing(self, bench: Bench) -> None:
        ask = await bench.win()
        before = await bench.record(ask.scope)
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Busy)
        assert (verdict.attempt, verdict.delayed) == (1, False)
        assert 0 < verdict.retry_after <= ask.lease
        assert await bench.record(ask.scope) == before

    @clause
    async def test_a_done_key_is_replayed_without_a_write(self, bench: Bench) -> None:
        ask = await bench.win()
        await bench.finish(ask, result=b"result", ref="ord_1", marker="json")
        before = await bench.record(ask.scope)
        for _ in range(2):
            verdict = await bench.claim(bench.ask())
            assert isinstance(verdict, Replay)
            told = verdict.record
            assert (told.state, told.result, told.ref) == (State.DONE, b"result", "ord_1")
            assert (told.marker, told.attempts) == ("json", 1)
        assert await bench.record(ask.scope) == before

    @clause
    async def test_R9_a_failed_key_replays_its_failure(self, bench: Bench) -> None:
        await bench.settled(Kind.FAILED, error=FAILURE)
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Replay)
        assert (verdict.record.state, verdict.record.error) == (State.FAILED, FAILURE)

    @clause
    async def test_another_request_is_a_mismatch_in_every_live_state(self, bench: Bench) -> None:
        for key, kind in (
            ("run", None),
            ("done", Kind.DONE),
            ("failed", Kind.FAILED),
            ("lost", Kind.UNKNOWN),
        ):
            ask = await bench.win(bench.scope(key), fingerprint=ONE)
            if kind is not None:
                await bench.finish(ask, kind)
            before = await bench.record(ask.scope)
            assert isinstance(await bench.claim(bench.ask(ask.scope, fingerprint=TWO)), Mismatch), key
            assert await bench.record(ask.scope) == before

    @clause
    async def test_R22_a_call_without_a_fingerprint_never_conflicts(self, bench: Bench) -> None:
        await bench.finish(await bench.win(bench.scope("with"), fingerprint=ONE))
        assert isinstance(await bench.claim(bench.ask(bench.scope("with"))), Replay)
        await bench.finish(await bench.win(bench.scope("without")))
        assert isinstance(await bench.claim(bench.ask(bench.scope("without"), fingerprint=TWO)), Replay)

    @clause
    async def test_R22_fingerprints_of_two_versions_are_not_compared(self, bench: Bench) -> None:
        await bench.finish(await bench.win(fingerprint=ONE, fingerprint_version=1))
        assert isinstance(await bench.claim(bench.ask(fingerprint=TWO, fingerprint_version=2)), Replay)
        assert (await bench.record(bench.scope())).fingerprint_version == 1

    @clause
    async def test_R18_retention_counts_from_the_settle(self, bench: Bench) -> None:
        ask = await bench.win(lease=RETENTION)
        await bench.wait(RETENTION - 4)
        await bench.finish(ask)
        await bench.wait(RETENTION - 4)
        assert isinstance(await bench.claim(bench.ask()), Replay)
        await bench.wait(8)
        assert await bench.peek(ask.scope) is None
        assert isinstance(await bench.claim(bench.ask()), Won)

    @clause
    async def test_expiry_is_checked_before_conflict(self, bench: Bench) -> None:
        for kind in (Kind.DONE, Kind.FAILED):
            await bench.finish(await bench.win(bench.scope(kind), fingerprint=ONE), kind)
        await bench.wait(RETENTION + 4)
        for kind in (Kind.DONE, Kind.FAILED):
            verdict = await bench.claim(bench.ask(bench.scope(kind), fingerprint=TWO))
            assert isinstance(verdict, Won), kind
            assert verdict.record.attempts == 1

    @clause
    async def test_R18_a_result_kept_for_ever_does_not_end(self, bench: Bench) -> None:
        await bench.settled(Kind.DONE, retention=float("inf"), tombstone=LEASE, result=b"kept")
        await bench.wait(50 * RETENTION if bench.unit == 1.0 else 4)
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Replay)
        assert (verdict.record.result, verdict.record.expires) == (b"kept", float("inf"))
        assert verdict.record.tombstone == 0.0

    @clause
    async def test_R19_after_retention_a_tombstone_knows_the_key_as_used(self, bench: Bench) -> None:
        for kind in (Kind.DONE, Kind.FAILED):
            scope = bench.scope(kind)
            await bench.settled(kind, scope, retention=LEASE, tombstone=LEASE)
            settled_at = await bench.now()
            await bench.wait(LEASE + 4)
            verdict = await bench.claim(bench.ask(scope, fingerprint=TWO))
            assert isinstance(verdict, Expired), kind
            assert bench.near(verdict.until, settled_at + 2 * LEASE * bench.unit)
            assert await bench.state(scope) is State.EXPIRED
            await bench.wait(LEASE)
            assert isinstance(await bench.claim(bench.ask(scope)), Won), kind
