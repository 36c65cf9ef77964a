"""Settles, renewals, notes: what an owner may write, and what is told to everybody else."""

# ruff: noqa: N802, S106 - a test bears the number of its ruling; a secret's id is no secret

from __future__ import annotations

from semel.model import Answer, Busy, Kind, Policy, Replay, State, Won
from semel.records import NOBODY
from semel.testing.contract.bench import FAILURE, LABELS, LEASE, RETENTION, Bench, clause, step

__all__ = ["LeaseClauses", "SettleClauses", "StepClauses"]


class SettleClauses:
    """The end of a run."""

    @clause
    async def test_done_stores_result_ref_and_marker_and_keeps_what_was_claimed(self, bench: Bench) -> None:
        ask = await bench.win(fingerprint=b"\x07" * 32, labels=LABELS, secret_id="s1")
        first = await bench.record(ask.scope)
        await bench.wait(5)
        await bench.finish(ask, result=b"\x00\xffbody", ref="ord_1", marker="zstd")
        record, now = await bench.record(ask.scope), await bench.now()
        assert (record.state, record.result, record.ref) == (State.DONE, b"\x00\xffbody", "ord_1")
        assert (record.marker, record.error, record.attempts) == ("zstd", None, 1)
        assert (record.nonce, record.token, record.created) == (ask.nonce, first.token, first.created)
        assert (record.labels, record.secret_id) == (LABELS, "s1")
        assert (record.fingerprint, record.resolved) == (b"\x07" * 32, False)
        assert bench.near(record.settled, now)
        assert bench.near(record.updated, now)
        assert bench.near(record.lease_until, now)
        assert bench.near(record.expires, now + RETENTION * bench.unit)
        assert (record.tombstone, record.not_before) == (0.0, 0.0)

    @clause
    async def test_R18_steps_do_not_shorten_the_retention_of_an_outcome(self, bench: Bench) -> None:
        for kind in (Kind.DONE, Kind.FAILED):
            ask = await bench.win(bench.scope(kind), lease=RETENTION)
            assert await bench.note(ask, b"step") is Answer.OK
            await bench.wait(RETENTION - 10)
            await bench.finish(ask, kind)
            assert bench.near(
                (await bench.record(ask.scope)).expires, await bench.now() + RETENTION * bench.unit
            )

    @clause
    async def test_failed_stores_its_error(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.FAILED, error=FAILURE)
        record = await bench.record(ask.scope)
        assert (record.state, record.error, record.result) == (State.FAILED, FAILURE, b"")

    @clause
    async def test_a_result_is_optional(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.DONE)
        record = await bench.record(ask.scope)
        assert (record.result, record.ref, record.marker, record.error) == (b"", None, "", None)

    @clause
    async def test_a_settle_sent_again_is_accepted_and_changes_nothing(self, bench: Bench) -> None:
        for kind in (Kind.DONE, Kind.FAILED, Kind.RELEASED):
            ask = await bench.win(bench.scope(kind))
            end = bench.end(ask, kind, result=b"once", error=FAILURE)
            assert await bench.settle(end) is Answer.OK
            before = await bench.record(ask.scope)
            await bench.wait(5)
            assert await bench.settle(end) is Answer.OK, kind
            assert await bench.record(ask.scope) == before

    @clause
    async def test_an_owner_cannot_change_what_it_settled(self, bench: Bench) -> None:
        kinds = (Kind.DONE, Kind.FAILED, Kind.RELEASED)
        for first in kinds:
            ask = await bench.settled(first, bench.scope(first), result=b"first")
            before = await bench.record(ask.scope)
            for second in {*kinds, Kind.UNKNOWN} - {first}:
                assert await bench.settle(bench.end(ask, second)) is Answer.REFUSED, (first, second)
            assert await bench.note(ask, b"late") is Answer.REFUSED
            assert await bench.record(ask.scope) == before

    @clause
    async def test_R19_a_tombstone_takes_no_word_from_anybody(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.DONE, retention=LEASE, tombstone=RETENTION)
        await bench.wait(LEASE + 4)
        for owner in (ask, bench.ask()):
            assert await bench.settle(bench.end(owner)) is Answer.GONE
            assert await bench.settle(bench.word(owner, Kind.DONE, repair=True)) is Answer.GONE
            assert await bench.renew(owner) is Answer.GONE
            assert await bench.note(owner, b"late") is Answer.GONE
        assert await bench.state(ask.scope) is State.EXPIRED

    @clause
    async def test_a_stranger_is_told_lost_and_an_absent_key_gone(self, bench: Bench) -> None:
        ask = await bench.win()
        before = await bench.record(ask.scope)
        stranger, absent = bench.ask(), bench.ask(bench.scope("absent"))
        for kind in (Kind.DONE, Kind.FAILED, Kind.UNKNOWN, Kind.RELEASED):
            assert await bench.settle(bench.end(stranger, kind)) is Answer.LOST, kind
            assert await bench.settle(bench.end(absent, kind)) is Answer.GONE, kind
        assert await bench.record(ask.scope) == before
        assert await bench.peek(absent.scope) is None

    @clause
    async def test_an_owner_may_still_say_what_it_had_declared_unknown(self, bench: Bench) -> None:
        for kind in (Kind.DONE, Kind.FAILED, Kind.RELEASED):
            ask = await bench.win(bench.scope(kind), policy=Policy.HOLD)
            await bench.finish(ask, Kind.UNKNOWN)
            await bench.finish(ask, kind)
            assert await bench.state(ask.scope) is State(kind.value)

    @clause
    async def test_a_settle_without_a_ref_keeps_the_one_that_is_there(self, bench: Bench) -> None:
        ask = await bench.win()
        await bench.finish(ask, Kind.UNKNOWN, ref="ord_1")
        await bench.finish(ask, Kind.DONE)
        assert (await bench.record(ask.scope)).ref == "ord_1"

    @clause
    async def test_R26_a_settle_may_replace_the_steps_by_their_summary(self, bench: Bench) -> None:
        kept, cut = await bench.win(bench.scope("kept")), await bench.win(bench.scope("cut"))
        for ask in (kept, cut):
            assert await bench.note(ask, b"name and value") is Answer.OK
        await bench.finish(kept)
        await bench.finish(cut, steps=step(b"name"))
        assert (await bench.record(kept.scope)).steps == step(b"name and value")
        assert (await bench.record(cut.scope)).steps == step(b"name")

    @clause
    async def test_R7_forget_removes_what_is_settled_and_ignores_what_is_absent(self, bench: Bench) -> None:
        assert await bench.forget(bench.scope("absent")) is Answer.OK
        for kind in (Kind.DONE, Kind.FAILED, Kind.UNKNOWN, Kind.RELEASED):
            ask = await bench.settled(kind, bench.scope(kind))
            assert await bench.forget(ask.scope) is Answer.OK
            assert await bench.peek(ask.scope) is None
            verdict = await bench.claim(bench.ask(ask.scope))
            assert isinstance(verdict, Won), kind
            assert verdict.record.attempts == 1

    @clause
    async def test_R7_forget_refuses_a_live_run(self, bench: Bench) -> None:
        for policy in Policy:
            ask = await bench.win(bench.scope(policy), policy=policy)
            before = await bench.record(ask.scope)
            assert await bench.forget(ask.scope) is Answer.REFUSED, policy
            assert await bench.record(ask.scope) == before

    @clause
    async def test_R7_forget_takes_a_lapsed_run_and_its_late_owner_finds_it_gone(self, bench: Bench) -> None:
        for policy in Policy:
            ask = await bench.win(bench.scope(policy), policy=policy)
            await bench.wait(LEASE + 2)
            assert await bench.forget(ask.scope) is Answer.OK
            assert await bench.settle(bench.end(ask)) is Answer.GONE, policy
            assert await bench.renew(ask) is Answer.GONE
            assert await bench.note(ask, b"late") is Answer.GONE
            assert await bench.peek(ask.scope) is None

    @clause
    async def test_R16_a_late_copy_of_a_forget_leaves_the_next_record(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.DONE)
        assert await bench.forget(ask.scope, nonce=ask.nonce, actor="ada") is Answer.OK
        assert await bench.forget(ask.scope, nonce=ask.nonce, actor="ada") is Answer.OK, "it is gone already"
        again = await bench.win(ask.scope)
        assert await bench.forget(ask.scope, nonce=ask.nonce, actor="ada") is Answer.LOST, "of a live run"
        await bench.finish(again, result=b"new")
        assert await bench.forget(ask.scope, nonce=ask.nonce, actor="ada") is Answer.LOST
        assert (await bench.record(ask.scope)).result == b"new"
        assert len(await bench.history(ask.scope)) == 1

    @clause
    async def test_R19_forget_removes_a_tombstone(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.DONE, retention=LEASE, tombstone=RETENTION)
        await bench.wait(LEASE + 4)
        assert await bench.forget(ask.scope, nonce=NOBODY) is Answer.LOST
        assert await bench.forget(ask.scope, nonce=ask.nonce) is Answer.OK
        assert isinstance(await bench.claim(bench.ask(ask.scope)), Won)

    @clause
    async def test_forgetting_a_result_before_its_end_leaves_no_tombstone(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.DONE, tombstone=RETENTION)
        assert await bench.forget(ask.scope) is Answer.OK
        assert isinstance(await bench.claim(bench.ask(ask.scope)), Won)

    @clause
    async def test_a_new_run_after_a_tombstone_has_its_own_retention(self, bench: Bench) -> None:
        await bench.settled(Kind.DONE, retention=LEASE, tombstone=LEASE)
        await bench.wait(2 * LEASE + 4)
        await bench.settled(Kind.DONE, retention=LEASE)
        await bench.wait(LEASE + 4)
        assert isinstance(await bench.claim(bench.ask()), Won)

    @clause
    async def test_peek_never_writes(self, bench: Bench) -> None:
        assert await bench.peek(bench.scope()) is None
        ask = await bench.win()
        first = await bench.record(ask.scope)
        await bench.wait(LEASE + 2)
        assert await bench.record(ask.scope) == first
        assert isinstance(await bench.claim(bench.ask()), Won)


class LeaseClauses:
    """Heartbeats."""

    @clause
    async def test_a_renewed_lease_keeps_the_key(self, bench: Bench) -> None:
        for policy in Policy:
            ask = await bench.win(bench.scope(policy), policy=policy)
            for _ in range(3):
                await bench.wait(LEASE - 4)
                assert await bench.renew(ask) is Answer.OK
            now = await bench.now()
            record = await bench.record(ask.scope)
            assert (record.state, record.attempts, record.nonce) == (State.RUNNING, 1, ask.nonce)
            assert bench.near(record.lease_until, now + LEASE * bench.unit)
            assert isinstance(await bench.claim(bench.ask(ask.scope)), Busy), policy

    @clause
    async def test_R18_a_renewal_moves_the_end_of_a_run_under_retry(self, bench: Bench) -> None:
        ask = await bench.win(retention=LEASE)
        await bench.wait(LEASE + 4)
        assert await bench.renew(ask, retention=LEASE) is Answer.OK
        await bench.wait(LEASE + 4)
        await bench.finish(ask)
        assert isinstance(await bench.claim(bench.ask()), Replay)

    @clause
    async def test_R17_a_lapsed_lease_that_nobody_took_can_be_renewed(self, bench: Bench) -> None:
        for policy in Policy:
            ask = await bench.win(bench.scope(policy), policy=policy)
            await bench.wait(LEASE + 2)
            assert await bench.renew(ask) is Answer.OK
            assert await bench.state(ask.scope) is State.RUNNING
            assert isinstance(await bench.claim(bench.ask(ask.scope)), Busy), policy

    @clause
    async def test_R17_lost_is_told_when_another_nonce_holds_the_key(self, bench: Bench) -> None:
        ask = await bench.win()
        stranger = bench.ask()
        assert await bench.renew(stranger) is Answer.LOST
        assert await bench.renew(bench.ask(bench.scope("absent"))) is Answer.GONE
        await bench.finish(ask)
        assert await bench.renew(stranger) is Answer.LOST

    @clause
    async def test_R17_a_heartbeat_that_comes_after_its_own_settle_is_not_lost(self, bench: Bench) -> None:
        for kind in (Kind.DONE, Kind.FAILED, Kind.UNKNOWN, Kind.RELEASED):
            ask = await bench.settled(kind, bench.scope(kind))
            before = await bench.record(ask.scope)
            assert await bench.renew(ask) is Answer.OK, kind
            assert await bench.record(ask.scope) == before

    @clause
    async def test_a_renewal_changes_nothing_but_times(self, bench: Bench) -> None:
        ask = await bench.win(fingerprint=b"\x01" * 32, labels=LABELS)
        assert await bench.note(ask, b"step") is Answer.OK
        before = await bench.record(ask.scope)
        await bench.wait(5)
        assert await bench.renew(ask) is Answer.OK
        after = await bench.record(ask.scope)
        for name in (
            "state",
            "nonce",
            "attempts",
            "token",
            "created",
            "policy",
            "fingerprint",
            "labels",
            "steps",
        ):
            assert getattr(after, name) == getattr(before, name), name
        assert after.lease_until > before.lease_until
        assert bench.near(after.updated, await bench.now())

    @clause
    async def test_many_renewals_in_one_call_are_answered_in_order(self, bench: Bench) -> None:
        from semel.model import Renewal

        asks = [await bench.win(bench.scope(f"key-{n}")) for n in range(5)]
        asks[1] = bench.ask(asks[1].scope)
        asks[3] = bench.ask(bench.scope("absent"))
        span = LEASE * bench.unit
        answers = await bench.store.renew([Renewal(ask.scope, ask.nonce, span, span) for ask in asks])
        assert answers == [Answer.OK, Answer.LOST, Answer.OK, Answer.GONE, Answer.OK]
        assert await bench.store.renew([]) == []


class StepClauses:
    """Notes: small durable appends to a running record."""

    @clause
    async def test_R26_notes_are_appended_in_order(self, bench: Bench) -> None:
        ask = await bench.win()
        entries = [b"first", b"\x00\xff\x00", b"", b"fourth" * 100]
        for entry in entries:
            assert await bench.note(ask, entry) is Answer.OK
        record = await bench.record(ask.scope)
        assert record.steps == b"".join(map(step, entries))
        assert bench.near(record.noted, await bench.now())

    @clause
    async def test_a_note_does_not_touch_the_lease(self, bench: Bench) -> None:
        ask = await bench.win()
        before = await bench.record(ask.scope)
        await bench.wait(5)
        assert await bench.note(ask, b"step") is Answer.OK
        after = await bench.record(ask.scope)
        assert (after.lease_until, after.expires) == (before.lease_until, before.expires)
        assert bench.near(after.updated, await bench.now())

    @clause
    async def test_R26_steps_survive_release_and_takeover(self, bench: Bench) -> None:
        first = await bench.win()
        assert await bench.note(first, b"one") is Answer.OK
        await bench.finish(first, Kind.RELEASED)
        second = await bench.win()
        assert await bench.note(second, b"two") is Answer.OK
        await bench.wait(LEASE + 2)
        third = bench.ask()
        verdict = await bench.claim(third)
        assert isinstance(verdict, Won)
        assert (verdict.record.steps, verdict.record.attempts) == (step(b"one") + step(b"two"), 3)
        assert await bench.note(third, b"three") is Answer.OK
        assert (await bench.record(third.scope)).steps == step(b"one") + step(b"two") + step(b"three")

    @clause
    async def test_a_note_by_a_stranger_is_lost_and_of_an_absent_key_gone(self, bench: Bench) -> None:
        ask = await bench.win()
        assert await bench.note(bench.ask(), b"stranger") is Answer.LOST
        assert await bench.note(bench.ask(bench.scope("absent")), b"nobody") is Answer.GONE
        assert (await bench.record(ask.scope)).steps == b""

    @clause
    async def test_steps_may_be_large(self, bench: Bench) -> None:
        ask = await bench.win()
        for _ in range(4):
            assert await bench.note(ask, b"\xa5" * (1 << 18)) is Answer.OK
        assert (await bench.record(ask.scope)).steps == step(b"\xa5" * (1 << 18)) * 4
