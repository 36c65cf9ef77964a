"""Waiters are woken; stores end cleanly."""

# ruff: noqa: N802 - a test bears the number of its ruling

from __future__ import annotations

import asyncio
import threading

from semel.model import Answer, Kind, Replay, Settle
from semel.store import Facts, Store
from semel.testing.contract.bench import Bench, SkipTest, clause, in_colour

__all__ = ["LifeClauses", "WatchClauses"]


class WatchClauses:
    """`watch` is a hint, never the truth: wake-ups may be spurious, but they come."""

    @clause
    async def test_every_end_of_a_run_wakes_its_watchers(self, bench: Bench) -> None:
        for kind in (Kind.DONE, Kind.FAILED, Kind.RELEASED, Kind.UNKNOWN):
            ask = await bench.win(bench.scope(kind))
            events = [threading.Event(), threading.Event()]
            unwatches = [await bench.store.watch(ask.scope, event.set) for event in events]
            await bench.finish(ask, kind)
            for event in events:
                assert await bench.woken(event), kind
            for unwatch in unwatches:
                await unwatch()

    @clause
    async def test_a_word_and_a_forget_wake_too(self, bench: Bench) -> None:
        ask = await bench.settled(Kind.UNKNOWN)
        for end in (bench.word(ask, Kind.DONE), Settle(ask.scope, b"", Kind.FORGOTTEN, 1.0)):
            event = threading.Event()
            unwatch = await bench.store.watch(ask.scope, event.set)
            assert await bench.settle(end) is Answer.OK
            assert await bench.woken(event), end.kind
            await unwatch()

    @clause
    async def test_a_watcher_that_left_is_not_called(self, bench: Bench) -> None:
        ask = await bench.win()
        gone, there = threading.Event(), threading.Event()
        leave = await bench.store.watch(ask.scope, gone.set)
        unwatch = await bench.store.watch(ask.scope, there.set)
        await leave()
        await leave()
        gone.clear()
        await bench.finish(ask)
        assert await bench.woken(there)
        assert not gone.is_set()
        await unwatch()

    @clause
    async def test_watching_a_key_that_is_not_there_is_legal(self, bench: Bench) -> None:
        scope = bench.scope()
        event = threading.Event()
        unwatch = await bench.store.watch(scope, event.set)
        await bench.settled(Kind.DONE, scope)
        assert await bench.woken(event)
        await unwatch()
        assert isinstance(await bench.claim(bench.ask(scope)), Replay)

    @clause
    async def test_one_batch_wakes_the_watchers_of_all_its_keys(self, bench: Bench) -> None:
        asks = [await bench.win(bench.scope(f"key-{n}")) for n in range(3)]
        events = [threading.Event() for _ in asks]
        for ask, event in zip(asks, events, strict=True):
            await bench.store.watch(ask.scope, event.set)
        await bench.store.settle([bench.end(ask) for ask in asks])
        for event in events:
            assert await bench.woken(event)

    @clause
    async def test_a_settle_in_another_store_wakes_where_the_store_notifies(self, bench: Bench) -> None:
        bench.needs("notifies")
        other = bench.open()
        ask = await bench.win()
        event = threading.Event()
        unwatch = await other.watch(ask.scope, event.set)
        # A waiter looks once after it has subscribed, as the flow does; the change comes after that look.
        await other.claim([bench.ask(ask.scope)])
        event.clear()
        await bench.finish(ask)
        assert await bench.woken(event)
        await unwatch()


class LifeClauses:
    """Opening, closing, loops, facts."""

    @clause
    async def test_R7_a_store_may_be_closed_twice_and_by_several_at_once(self, bench: Bench) -> None:
        await bench.win()
        await bench.together([bench.store.aclose] * 3)
        await bench.store.aclose()

    @clause
    async def test_a_store_that_was_never_used_closes(self, bench: Bench) -> None:
        await bench.open().aclose()

    @clause
    async def test_the_store_says_what_it_is(self, bench: Bench) -> None:
        assert isinstance(bench.store, Store)
        assert bench.store.colour in {bench.colour, "both"}
        facts = await bench.store.facts()
        assert isinstance(facts, Facts)
        assert facts.store
        if bench.store.capabilities.durable:
            second = await bench.open().facts()
            assert second.store == facts.store

    @clause
    async def test_what_is_durable_outlives_the_store_object(self, bench: Bench) -> None:
        if not bench.store.capabilities.durable:
            bench.needs("shared")
        ask = await bench.settled(Kind.DONE, result=b"kept")
        await bench.store.aclose()
        record, _ = await bench.open().peek(ask.scope)
        assert record is not None
        assert record.result == b"kept"

    def test_R29_an_async_store_works_in_two_event_loops_in_a_row(self) -> None:
        store: Store = self.open()  # type: ignore[attr-defined]  # of the class that this is mixed into
        if (self.colour or store.colour) == "sync":  # type: ignore[attr-defined]  # of the class that this is mixed into
            raise SkipTest("a sync store needs no event loop")
        bench = Bench(self, "async")  # type: ignore[arg-type]  # of the class that this is mixed into
        bench.store = store

        async def first() -> None:
            await bench.win()

        async def second() -> None:
            record = await bench.record(bench.scope())
            assert record.attempts == 1
            await store.aclose()

        asyncio.run(first())
        asyncio.run(second())
        in_colour("async", bench.aclose)
