"""A person's or a probe's word on a lost outcome, and the audit trail of who said what."""

# ruff: noqa: N802 - a test bears the number of its ruling

from __future__ import annotations

from semel.errors import OutcomeUnknown
from semel.keys import Scope
from semel.model import Answer, Event, Kind, Policy, Replay, State, Unknown, Won
from semel.records import NOBODY
from semel.testing.contract.bench import FAILURE, LEASE, RETENTION, Bench, clause, step

__all__ = ["AuditClauses", "ResolveClauses", "UnreadableClauses"]


class ResolveClauses:
    """Settles that carry a new nonce."""

    @clause
    async def test_R13_an_unknown_outcome_is_resolved_to_done(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.UNKNOWN)
        word = bench.word(ask, Kind.DONE, result=b"found", ref="ord_1")
        assert await bench.settle(word) is Answer.OK
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Replay)
        record = verdict.record
        assert (record.state, record.result, record.ref) == (State.DONE, b"found", "ord_1")
        stored = await bench.record(ask.scope)
        assert (stored.nonce, stored.resolved) == (word.new_nonce, True)
        assert bench.near(stored.expires, await bench.now() + RETENTION * bench.unit)

    @clause
    async def test_R13_an_unknown_outcome_is_resolved_to_failed(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.UNKNOWN)
        assert await bench.settle(bench.word(ask, Kind.FAILED, error=FAILURE)) is Answer.OK
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Replay)
        assert verdict.record.error == FAILURE

    @clause
    async def test_R13_an_unknown_or_failed_outcome_is_released_by_a_word(self, bench: Bench) -> None:
        for kind in (Kind.UNKNOWN, Kind.FAILED):
            ask = await bench.settled(kind, bench.scope(kind))
            assert await bench.settle(bench.word(ask, Kind.RELEASED)) is Answer.OK
            assert isinstance(await bench.claim(bench.ask(ask.scope)), Won), kind

    @clause
    async def test_R13_a_lapsed_run_can_be_resolved_whatever_it_was_claimed_with(self, bench: Bench) -> None:
        seen = {Policy.RETRY: State.RUNNING, Policy.HOLD: State.UNKNOWN, Policy.PROBE: State.UNKNOWN}
        for policy, state in seen.items():
            ask = await bench.win(bench.scope(policy), policy=policy)
            await bench.wait(LEASE + 2)
            assert await bench.settle(bench.word(ask, Kind.DONE)) is Answer.OK, policy
            assert await bench.state(ask.scope) is State.DONE
            assert [event.state for event in await bench.history(ask.scope)] == [state]
            assert await bench.settle(bench.end(ask, result=b"late")) is Answer.LOST, policy

    @clause
    async def test_R12_after_a_word_the_late_owner_is_lost(self, bench: Bench) -> None:
        ask = await bench.win(policy=Policy.HOLD)
        await bench.wait(LEASE + 2)
        assert await bench.settle(bench.word(ask, Kind.DONE, result=b"word")) is Answer.OK
        assert await bench.settle(bench.end(ask, result=b"late")) is Answer.LOST
        assert await bench.renew(ask) is Answer.LOST
        assert await bench.note(ask, b"late") is Answer.LOST
        assert (await bench.record(ask.scope)).result == b"word"

    @clause
    async def test_R13_never_on_a_live_run_nor_on_done_or_released(self, bench: Bench) -> None:
        live = await bench.win(bench.scope("live"), policy=Policy.HOLD, lease=10 * LEASE)
        done = await bench.settled(Kind.DONE, bench.scope("done"))
        released = await bench.settled(Kind.RELEASED, bench.scope("released"))
        await bench.wait(LEASE + 2)
        for ask in (live, done, released):
            before = await bench.record(ask.scope)
            for kind in (Kind.DONE, Kind.FAILED, Kind.RELEASED):
                assert await bench.settle(bench.word(ask, kind)) is Answer.REFUSED, (ask, kind)
            assert await bench.record(ask.scope) == before
            assert not await bench.history(ask.scope)

    @clause
    async def test_R13_a_second_word_is_refused(self, bench: Bench) -> None:
        for kind in (Kind.DONE, Kind.FAILED):
            ask = await bench.settled(Kind.UNKNOWN, bench.scope(kind))
            assert await bench.settle(bench.word(ask, kind)) is Answer.OK
            second = bench.word(ask, Kind.FAILED, nonce=b"")
            assert await bench.settle(second) is Answer.REFUSED, kind
            assert len(await bench.history(ask.scope)) == 1

    @clause
    async def test_a_word_sent_again_is_accepted_and_told_once(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.UNKNOWN)
        word = bench.word(ask, Kind.DONE, result=b"found")
        assert await bench.settle(word) is Answer.OK
        before = await bench.record(ask.scope)
        assert await bench.settle(word) is Answer.OK
        assert await bench.record(ask.scope) == before
        assert len(await bench.history(ask.scope)) == 1

    @clause
    async def test_a_word_about_an_attempt_that_is_no_more_is_lost(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.UNKNOWN)
        before = await bench.record(ask.scope)
        assert await bench.settle(bench.word(ask, Kind.DONE, nonce=b"\x00" * 16)) is Answer.LOST
        assert await bench.record(ask.scope) == before

    @clause
    async def test_a_word_may_be_given_without_naming_the_attempt(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.UNKNOWN)
        assert await bench.settle(bench.word(ask, Kind.DONE, nonce=b"")) is Answer.OK

    @clause
    async def test_a_word_on_an_absent_key_is_gone(self, bench: Bench) -> None:
        ask = bench.ask()
        assert await bench.settle(bench.word(ask, Kind.DONE)) is Answer.GONE
        assert await bench.peek(ask.scope) is None
        assert not await bench.history(ask.scope)

    @clause
    async def test_R14_a_key_released_by_a_word_can_run_and_be_resolved_again(self, bench: Bench) -> None:
        first = await bench.settled(Kind.UNKNOWN)
        assert await bench.settle(bench.word(first, Kind.RELEASED)) is Answer.OK
        second = await bench.settled(Kind.UNKNOWN)
        assert not (await bench.record(second.scope)).resolved
        assert await bench.settle(bench.word(second, Kind.DONE)) is Answer.OK

    @clause
    async def test_R26_steps_survive_a_word_that_releases_late(self, bench: Bench) -> None:
        ask = await bench.win(policy=Policy.HOLD)
        assert await bench.note(ask, b"step") is Answer.OK
        await bench.wait(2 * RETENTION)
        assert await bench.settle(bench.word(ask, Kind.RELEASED)) is Answer.OK
        await bench.wait(RETENTION - 10)
        assert (await bench.record(ask.scope)).steps == step(b"step")

    @clause
    async def test_R26_a_word_about_steps_is_lost_when_another_was_noted_since(self, bench: Bench) -> None:
        ask = await bench.win(policy=Policy.HOLD)
        assert await bench.note(ask, b"begun") is Answer.OK
        seen = await bench.record(ask.scope)
        await bench.wait(LEASE + 2)
        assert await bench.note(ask, b"late") is Answer.OK
        before = await bench.record(ask.scope)
        stale = bench.word(ask, Kind.RELEASED, steps=b"", noted=seen.noted)
        assert await bench.settle(stale) is Answer.LOST
        assert await bench.record(ask.scope) == before
        assert not await bench.history(ask.scope)
        word = bench.word(ask, Kind.RELEASED, steps=step(b"late"), noted=before.noted)
        assert await bench.settle(word) is Answer.OK
        assert (await bench.record(ask.scope)).steps == step(b"late")
        assert await bench.settle(word) is Answer.OK
        assert len(await bench.history(ask.scope)) == 1

    @clause
    async def test_R15_a_repair_overrules_a_settled_record_but_never_a_live_run(self, bench: Bench) -> None:
        done = await bench.settled(Kind.DONE, bench.scope("done"), result=b"unreadable")
        assert await bench.settle(bench.word(done, Kind.DONE, result=b"mended", repair=True)) is Answer.OK
        assert (await bench.record(done.scope)).result == b"mended"
        live = await bench.win(bench.scope("live"))
        assert await bench.settle(bench.word(live, Kind.DONE, repair=True)) is Answer.REFUSED
        assert await bench.state(live.scope) is State.RUNNING


class UnreadableClauses:
    """What cannot be read is unknown (R15): nobody deletes it, nobody runs it again, until a person has spoken."""

    @clause
    async def test_R15_an_unreadable_record_is_unknown_and_does_not_end_by_time(self, bench: Bench) -> None:
        for kind in (None, Kind.DONE):
            ask = await bench.win(bench.scope(str(kind)))
            if kind is not None:
                await bench.finish(ask, kind)
            bench.spoil(ask.scope)
            for _ in range(2):
                for other in (ask, bench.ask(ask.scope, fingerprint=b"\x09" * 32, takeover=ask.nonce)):
                    assert await bench.claim(other) == Unknown(None, Policy.HOLD, unreadable=True)
                await _assert_unreadable(bench, ask.scope)
                await bench.wait(LEASE + 2 * RETENTION)
                await bench.store.purge(100)

    @clause
    async def test_R15_a_word_mends_an_unreadable_record(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.DONE, result=b"lost")
        bench.spoil(ask.scope)
        word = bench.word(ask, Kind.DONE, nonce=b"", result=b"mended", repair=True)
        assert await bench.settle(word) is Answer.OK
        verdict = await bench.claim(bench.ask())
        assert isinstance(verdict, Replay)
        assert verdict.record.result == b"mended"
        assert [event.actor for event in await bench.history(ask.scope)] == ["ada"]

    @clause
    async def test_R15_an_unreadable_record_can_be_forgotten(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.DONE)
        bench.spoil(ask.scope)
        assert await bench.forget(ask.scope, actor="ada") is Answer.OK
        assert await bench.peek(ask.scope) is None
        assert isinstance(await bench.claim(bench.ask()), Won)

    @clause
    async def test_R16_an_unreadable_record_is_forgotten_under_the_nonce_that_peek_tells_or_nobodys(
        self, bench: Bench
    ) -> None:
        ask = await bench.settled(Kind.DONE)
        bench.spoil(ask.scope)
        nonce = (await _assert_unreadable(bench, ask.scope)).nonce or NOBODY
        assert await bench.forget(ask.scope, nonce=nonce, actor="ada") is Answer.OK
        assert await bench.peek(ask.scope) is None
        again = await bench.settled(Kind.DONE, result=b"new")
        assert await bench.forget(again.scope, nonce=nonce, actor="ada") is Answer.LOST, "a late copy"
        assert (await bench.record(again.scope)).result == b"new"
        assert len(await bench.history(again.scope)) == 1


async def _assert_unreadable(bench: Bench, scope: Scope) -> OutcomeUnknown:
    raised: OutcomeUnknown | None = None
    try:
        await bench.store.peek(scope)
    except OutcomeUnknown as error:
        raised = error
    assert raised is not None, "peek showed a record that cannot be read"
    assert raised.unreadable
    return raised


class AuditClauses:
    """Who changed what, from which state, and why."""

    @clause
    async def test_R13_a_word_is_kept_with_actor_and_reason(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.UNKNOWN)
        word = bench.word(ask, Kind.DONE, actor="Zoë O'Neil; --", reason='"she" said {it} 🙂 %s')
        assert await bench.settle(word) is Answer.OK
        (event,) = await bench.history(ask.scope)
        assert bench.near(event.at, await bench.now())
        assert event == Event(event.at, Kind.DONE, State.UNKNOWN, word.actor, word.reason, 1)

    @clause
    async def test_what_owners_do_is_not_in_the_trail(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.DONE)
        assert await bench.forget(ask.scope) is Answer.OK
        assert not await bench.history(ask.scope)

    @clause
    async def test_what_was_refused_is_not_in_the_trail(self, bench: Bench) -> None:
        ask = await bench.win()
        assert await bench.forget(ask.scope, actor="ada") is Answer.REFUSED
        assert await bench.forget(bench.scope("absent"), actor="ada") is Answer.OK
        assert not await bench.history(ask.scope)
        assert not await bench.history(bench.scope("absent"))

    @clause
    async def test_R7_the_trail_outlives_forget_by_one_retention(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.UNKNOWN)
        assert await bench.settle(bench.word(ask, Kind.FAILED, actor="ada")) is Answer.OK
        assert await bench.forget(ask.scope, actor="bob", reason="test data") is Answer.OK
        await bench.wait(RETENTION - 4)
        events = await bench.history(ask.scope)
        assert [(event.kind, event.state, event.actor) for event in events] == [
            (Kind.FAILED, State.UNKNOWN, "ada"),
            (Kind.FORGOTTEN, State.FAILED, "bob"),
        ]
        await bench.store.purge(100)
        assert len(await bench.history(ask.scope)) == 2
        await bench.wait(8)
        assert not await bench.history(ask.scope)

    @clause
    async def test_each_key_has_its_own_trail(self, bench: Bench) -> None:
        for key in ("a", "b"):
            ask = await bench.settled(Kind.UNKNOWN, bench.scope(key))
            assert await bench.settle(bench.word(ask, Kind.DONE, actor=key)) is Answer.OK
        for key in ("a", "b"):
            assert [event.actor for event in await bench.history(bench.scope(key))] == [key]
