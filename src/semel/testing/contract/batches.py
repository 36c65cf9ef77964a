"""Several asks in one call, several callers at once."""

from __future__ import annotations

import secrets
from functools import partial

from semel.model import Answer, Ask, Busy, Kind, Mismatch, Record, Replay, Settle, State, Verdict, Won
from semel.testing.contract.bench import LEASE, Bench, clause, step

__all__ = ["BatchClauses", "RaceClauses"]

CALLERS = 8
MANY = 150  # more than one batch of the flow (128)


class BatchClauses:
    """A batch answers per item, in order; one bad item fails alone."""

    @clause
    async def test_an_empty_batch_is_answered_with_nothing(self, bench: Bench) -> None:
        assert await bench.store.claim([]) == []
        assert await bench.store.settle([]) == []

    @clause
    async def test_a_mixed_batch_of_claims_is_answered_in_order(self, bench: Bench) -> None:
        running = await bench.win(bench.scope("running"), fingerprint=b"\x01" * 32)
        done = await bench.settled(Kind.DONE, bench.scope("done"), result=b"done")
        failed = await bench.settled(Kind.FAILED, bench.scope("failed"))
        verdicts = await bench.store.claim(
            [
                bench.ask(done.scope),
                bench.ask(bench.scope("new")),
                bench.ask(running.scope),
                bench.ask(running.scope, fingerprint=b"\x02" * 32),
                running,
                bench.ask(failed.scope),
            ]
        )
        assert [type(verdict) for verdict in verdicts] == [Replay, Won, Busy, Mismatch, Won, Replay]
        assert isinstance(verdicts[0], Replay)
        assert verdicts[0].record.result == b"done"

    @clause
    async def test_a_mixed_batch_of_settles_is_answered_in_order(self, bench: Bench) -> None:
        asks = [await bench.win(bench.scope(f"key-{n}")) for n in range(4)]
        ends = [
            bench.end(asks[2], Kind.FAILED),
            bench.end(bench.ask(asks[1].scope)),
            bench.end(asks[0], result=b"zero"),
            bench.end(bench.ask(bench.scope("absent"))),
            bench.end(asks[3], Kind.RELEASED),
            Settle(asks[1].scope, b"", Kind.FORGOTTEN, 1.0),
        ]
        assert await bench.store.settle(ends) == [
            Answer.OK,
            Answer.LOST,
            Answer.OK,
            Answer.GONE,
            Answer.OK,
            Answer.REFUSED,
        ]
        states = [await bench.state(ask.scope) for ask in asks]
        assert states == [State.DONE, State.RUNNING, State.FAILED, State.RELEASED]

    @clause
    async def test_claims_of_one_key_in_one_batch_are_decided_in_order(self, bench: Bench) -> None:
        first, second = bench.ask(), bench.ask()
        verdicts = await bench.store.claim([first, second, first, bench.ask(bench.scope("other"))])
        assert [type(verdict) for verdict in verdicts] == [Won, Busy, Won, Won]
        record = await bench.record(first.scope)
        assert (record.nonce, record.attempts) == (first.nonce, 1)

    @clause
    async def test_settles_of_one_key_in_one_batch_are_decided_in_order(self, bench: Bench) -> None:
        ask = await bench.win()
        word = bench.word(ask, Kind.DONE, result=b"word")
        ends = [bench.end(ask, Kind.UNKNOWN), bench.end(bench.ask()), word, bench.end(ask, result=b"late")]
        assert await bench.store.settle(ends) == [Answer.OK, Answer.LOST, Answer.OK, Answer.LOST]
        assert (await bench.record(ask.scope)).result == b"word"
        assert len(await bench.history(ask.scope)) == 1

    @clause
    async def test_large_batches_are_answered_in_order(self, bench: Bench) -> None:
        asks = [bench.ask(bench.scope(f"key-{n}")) for n in range(MANY)]
        verdicts = await bench.store.claim(asks)
        assert all(isinstance(verdict, Won) for verdict in verdicts)
        ends = [bench.end(ask, result=str(n).encode()) for n, ask in enumerate(asks)]
        assert await bench.store.settle(ends) == [Answer.OK] * MANY
        replays = await bench.store.claim([bench.ask(ask.scope) for ask in reversed(asks)])
        results = [verdict.record.result for verdict in replays if isinstance(verdict, Replay)]
        assert results == [str(n).encode() for n in reversed(range(MANY))]

    @clause
    async def test_one_bad_item_fails_alone(self, bench: Bench) -> None:
        bad = {"lone": "\ud800"}  # cannot be written as UTF-8; a store that can keep it may
        asks = [
            bench.ask(bench.scope("a")),
            bench.ask(bench.scope("b"), labels=bad),
            bench.ask(bench.scope("c")),
        ]
        first, middle, last = await bench.store.claim(asks)
        assert isinstance(first, Won)
        assert isinstance(middle, (Won, Exception))
        assert isinstance(last, Won)
        assert isinstance(await bench.claim(bench.ask(bench.scope("a"))), Busy)
        if isinstance(middle, Exception):
            assert isinstance(await bench.claim(bench.ask(bench.scope("b"))), Won)

    @clause
    async def test_one_bad_settle_fails_alone(self, bench: Bench) -> None:
        asks = [await bench.win(bench.scope(f"key-{n}")) for n in range(3)]
        ends = [bench.end(asks[0]), bench.end(asks[1], ref="\ud800"), bench.end(asks[2])]
        first, middle, last = await bench.store.settle(ends)
        assert (first, last) == (Answer.OK, Answer.OK)
        assert isinstance(middle, Exception) or middle is Answer.OK
        if isinstance(middle, Exception):
            assert await bench.state(asks[1].scope) is State.RUNNING
            await bench.finish(asks[1])


class RaceClauses:
    """Threads for a sync store, tasks for an async one."""

    @clause
    async def test_of_many_callers_exactly_one_wins(self, bench: Bench) -> None:
        for round_ in range(5):
            asks = [bench.ask(bench.scope(f"key-{round_}")) for _ in range(CALLERS)]
            verdicts = await bench.together([partial(bench.claim, ask) for ask in asks])
            _one_winner(asks, verdicts, await bench.record(asks[0].scope))

    @clause
    async def test_of_many_callers_exactly_one_takes_over(self, bench: Bench) -> None:
        for round_ in range(3):
            scope = bench.scope(f"key-{round_}")
            late = await bench.win(scope)
            await bench.wait(LEASE + 2)
            asks = [bench.ask(scope) for _ in range(CALLERS)]
            verdicts = await bench.together([partial(bench.claim, ask) for ask in asks])
            _one_winner(asks, verdicts, await bench.record(scope))
            assert (await bench.record(scope)).attempts == 2
            assert await bench.settle(bench.end(late)) is Answer.LOST

    @clause
    async def test_a_late_owner_and_its_successor_never_both_settle(self, bench: Bench) -> None:
        for round_ in range(5):
            scope = bench.scope(f"key-{round_}")
            late = await bench.win(scope)
            await bench.wait(LEASE + 2)

            async def late_settle(late: Ask = late) -> bool:
                return await bench.settle(bench.end(late, result=b"late")) is Answer.OK

            async def take_over(ask: Ask = bench.ask(scope)) -> bool:  # noqa: B008 - one per round
                return isinstance(await bench.claim(ask), Won)

            outcomes = await bench.together([late_settle, take_over])
            assert sum(outcomes) == 1, outcomes

    @clause
    async def test_overlapping_batches_in_opposite_orders_do_not_deadlock(self, bench: Bench) -> None:
        scopes = [bench.scope(f"key-{n}") for n in range(20)]
        batches = [[bench.ask(scope) for scope in scopes[:: (-1) ** n]] for n in range(4)]
        answers = await bench.together([partial(bench.store.claim, batch) for batch in batches])
        winners: dict[bytes, int] = {scope.hash: 0 for scope in scopes}
        for batch, verdicts in zip(batches, answers, strict=True):
            for ask, verdict in zip(batch, verdicts, strict=True):
                assert isinstance(verdict, (Won, Busy)), verdict
                winners[ask.scope.hash] += isinstance(verdict, Won)
        assert set(winners.values()) == {1}

    @clause
    async def test_concurrent_notes_are_all_kept(self, bench: Bench) -> None:
        ask = await bench.win()
        entries = [secrets.token_bytes(8) for _ in range(CALLERS)]
        answers = await bench.together([partial(bench.note, ask, entry) for entry in entries])
        assert answers == [Answer.OK] * CALLERS
        steps = (await bench.record(ask.scope)).steps
        size = len(steps) // CALLERS
        assert sorted(steps[n : n + size] for n in range(0, len(steps), size)) == sorted(map(step, entries))

    @clause
    async def test_only_one_of_many_words_counts(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.UNKNOWN)
        words = [bench.word(ask, Kind.FAILED, actor=f"actor-{n}", nonce=b"") for n in range(CALLERS)]
        answers = await bench.together([partial(bench.settle, word) for word in words])
        assert sorted(answers) == [Answer.OK] + [Answer.REFUSED] * (CALLERS - 1)
        assert len(await bench.history(ask.scope)) == 1

    @clause
    async def test_two_stores_on_the_same_data_have_one_winner(self, bench: Bench) -> None:
        bench.needs("shared")
        other = bench.open()
        for round_ in range(5):
            asks = [bench.ask(bench.scope(f"key-{round_}")) for _ in range(4)]
            calls = [partial((bench.store, other)[n % 2].claim, [ask]) for n, ask in enumerate(asks)]
            verdicts = [answers[0] for answers in await bench.together(calls)]
            assert sum(isinstance(verdict, Won) for verdict in verdicts) == 1, verdicts
        seen, _ = await other.peek(bench.scope("key-0"))
        assert seen == await bench.record(bench.scope("key-0"))


def _one_winner(asks: list[Ask], verdicts: list[Verdict], record: Record) -> None:
    winners = [ask for ask, verdict in zip(asks, verdicts, strict=True) if isinstance(verdict, Won)]
    assert len(winners) == 1, verdicts
    assert record.nonce == winners[0].nonce
    assert all(isinstance(verdict, (Won, Busy)) for verdict in verdicts), verdicts
