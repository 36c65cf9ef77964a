"""Layers when something goes wrong below them: batches that fail, caches that are told, second tries that fail too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from semel.errors import StoreUnavailable
from semel.keys import Scope, make_scope
from semel.layers.batch import Batch
from semel.layers.cache import Cache
from semel.layers.encrypt import Encrypt, Ring
from semel.layers.layer import Layer
from semel.layers.retry import Retry
from semel.model import Answer, Ask, Kind, Note, Record, Replay, Settle, Unknown, Verdict, Won
from semel.runtime import ThreadRuntime, run_sync
from semel.store import Capabilities, Unwatch
from semel.stores.memory import MemoryStore


def ask(number: int, *, nonce: int | None = None) -> Ask:
    scope = make_scope("semel", "default", "default", f"key-{number}", "full")
    return Ask(scope, (number if nonce is None else nonce).to_bytes(16, "big"), 10.0, 60.0)


def end(asked: Ask, kind: Kind = Kind.DONE, result: bytes = b"") -> Settle:
    return Settle(asked.scope, asked.nonce, kind, 60.0, result=result)


class Rough(Layer):
    """A memory store that fails as it is told: `fails` are errors of the next calls, one each; `gate` holds claims up.

    `answers` are errors of single items, one each, in place of their answers.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.fails: list[BaseException] = []
        self.answers: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.calls = 0

    def _called(self) -> None:
        self.calls += 1
        if self.fails:
            raise self.fails.pop(0)

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        self._called()
        if self.gate is not None:
            await self.gate.wait()
        return [self.answers.pop(0)] if self.answers else await super().claim(asks)

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        self._called()
        return [self.answers.pop(0)] if self.answers else await super().settle(ends)

    async def note(self, note: Note) -> Answer:
        self._called()
        return await super().note(note)

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        self._called()
        return await super().peek(scope)


# ------------------------------------------------------------------------------------------------------ batch
def test_a_batch_that_fails_is_told_to_everybody_in_it_and_the_next_one_flies() -> None:
    async def work() -> None:
        store = Rough()
        batch = Batch(store)
        store.fails.append(StoreUnavailable("gone"))
        answers = await asyncio.gather(*(batch.claim((ask(n),)) for n in range(5)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 5
        assert store.calls == 1
        again = await asyncio.gather(*(batch.claim((ask(n),)) for n in range(5)))
        assert all(isinstance(verdict, Won) for (verdict,) in again)

    asyncio.run(work())


def test_a_caller_who_leaves_a_batch_does_not_take_the_others_with_him() -> None:
    async def work() -> None:
        store = Rough()
        store.gate = asyncio.Event()
        batch = Batch(store)
        crowd = [asyncio.create_task(batch.claim((ask(n),))) for n in range(5)]
        while not store.calls:
            await asyncio.sleep(0)
        crowd[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await crowd[2]
        store.gate.set()
        verdicts = [(await each)[0] for each in crowd[:2] + crowd[3:]]
        assert all(isinstance(verdict, Won) for verdict in verdicts)
        store.gate, store.calls = asyncio.Event(), 0
        store.fails.append(StoreUnavailable("gone"))
        crowd = [asyncio.create_task(batch.claim((ask(n),))) for n in range(10, 12)]
        await asyncio.sleep(0)
        crowd[0].cancel()
        answers = await asyncio.gather(*crowd, return_exceptions=True)
        assert [type(answer) for answer in answers] == [asyncio.CancelledError, StoreUnavailable]

    asyncio.run(work())


def test_a_caller_who_leaves_before_anything_is_sent_costs_nothing() -> None:
    async def work() -> None:
        store = Rough()
        batch = Batch(store)
        early = asyncio.create_task(batch.claim((ask(1),)))
        await asyncio.sleep(0)  # it has joined; the tick's end is the next thing that the loop does
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early
        await asyncio.sleep(0)
        assert store.calls == 0
        told = asyncio.create_task(batch.claim((ask(2),)))
        joined = batch._claims
        while not joined._flying:  # it was told to go by itself, and has not begun
            await asyncio.sleep(0)
        told.cancel()
        with pytest.raises(asyncio.CancelledError):
            await told
        assert (joined._flying, joined._sky.items) == (0, 0), "nothing is believed to be in flight"
        assert isinstance((await batch.claim((ask(3),)))[0], Won)

    asyncio.run(work())


# ------------------------------------------------------------------------------------------------------ cache
class Still(ThreadRuntime):
    """A world in which no time passes, so that nothing is forgotten by age; what is done in the background is done at once."""

    def now(self) -> float:
        return 0.0

    def background(self, coroutine: Any) -> None:
        run_sync(coroutine)


class Telling(Rough):
    """It tells of changes, as a store with a wake channel does; `between` happens before a look."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = 0
        self.between: Callable[[], object] = bool

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(notifies=True)

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        unwatch = await super().watch(scope, wake)
        self.watched += 1

        async def counted() -> None:
            self.watched -= 1
            await unwatch()

        return counted

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        self.between()
        return await super().peek(scope)


def done(store: Rough) -> Ask:
    first = ask(1)
    run_sync(store.claim((first,)))
    run_sync(store.settle((end(first, result=b"one"),)))
    return ask(1, nonce=7)


def test_R31_what_another_process_forgets_is_dropped_at_once() -> None:
    store = Telling()
    cache, again = Cache(store, Still()), done(store)
    for _ in range(3):
        assert isinstance(run_sync(cache.claim((again,)))[0], Replay)
    assert store.watched == 1
    run_sync(store.inner.settle((end(ask(1), Kind.FORGOTTEN),)))  # not through this cache
    assert isinstance(run_sync(cache.claim((again,)))[0], Won)
    assert store.watched == 0


def test_R31_what_was_forgotten_before_it_could_be_watched_is_not_kept() -> None:
    store = Telling()
    cache, again = Cache(store, Still()), done(store)
    store.between = lambda: run_sync(store.inner.settle((end(ask(1), Kind.FORGOTTEN),)))
    assert isinstance(run_sync(cache.claim((again,)))[0], Replay)  # so the store said, in time
    assert isinstance(run_sync(cache.claim((again,)))[0], Won)
    assert store.watched == 0


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), KeyboardInterrupt()])
def test_R31_a_replay_in_hand_is_given_though_it_cannot_be_remembered(error: BaseException) -> None:
    store = Telling()
    cache, again = Cache(store, Still()), done(store)
    store.between = lambda: store.fails.append(error)
    if isinstance(error, Exception):
        assert isinstance(run_sync(cache.claim((again,)))[0], Replay)
    else:
        with pytest.raises(KeyboardInterrupt):
            run_sync(cache.claim((again,)))
    assert (store.watched, len(cache._entries)) == (0, 0)


# ------------------------------------------------------------------------------------------------------ retry
class Clock:
    at = 0.0

    def __call__(self) -> float:
        return self.at


def test_a_second_try_is_made_in_time_only_and_its_answer_counts() -> None:
    store, clock = Rough(), Clock()
    retry = Retry(store, clock, 1.0)
    scope = ask(1).scope
    store.fails = [StoreUnavailable("once")]
    assert run_sync(retry.peek(scope))[0] is None
    store.fails = [StoreUnavailable("once"), StoreUnavailable("twice")]
    with pytest.raises(StoreUnavailable, match="twice"):
        run_sync(retry.peek(scope))

    class Slow(Rough):
        def _called(self) -> None:
            clock.at += 2.0
            super()._called()

    slow = Slow()
    slow.fails = [StoreUnavailable("late"), StoreUnavailable("never asked for")]
    with pytest.raises(StoreUnavailable, match="late"):
        run_sync(Retry(slow, clock, 1.0).peek(scope))
    assert slow.calls == 1


class Torn(Rough):
    """It answers a batch item by item: `torn` are the places of the next one whose answers are lost."""

    torn: tuple[int, ...] = ()

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        verdicts = await super().claim(asks)
        torn, self.torn = self.torn, ()
        for at in torn:
            verdicts[at] = StoreUnavailable("torn")
        return verdicts


def test_R16_what_was_lost_of_a_batch_is_sent_again_alone_in_time_only() -> None:
    store, clock = Torn(), Clock()
    retry = Retry(store, clock, 1.0)
    mark = retry.losses.mark
    store.torn = (1,)
    verdicts = run_sync(retry.claim([ask(n) for n in range(3)]))
    assert [type(verdict) for verdict in verdicts] == [Won] * 3
    assert store.calls == 2
    assert retry.losses.mark is not mark
    mark, store.torn, store.calls = retry.losses.mark, (0,), 0
    slow = Retry(store, lambda: clock.at + store.calls * 2, 1.0)
    (verdict, other) = run_sync(slow.claim([ask(7), ask(8)]))
    assert (type(verdict), type(other), store.calls) == (StoreUnavailable, Won, 1)
    assert slow.losses.mark is retry.losses.mark is mark, "nothing was sent again"


def test_R16_a_lost_batch_is_sent_again_as_a_whole_and_of_claims_that_is_told() -> None:
    store = Rough()
    retry = Retry(store, Clock(), 1.0)
    assert Encrypt(retry, Ring({"a": b"k" * 32})).losses is retry.losses is store.losses
    mark = retry.losses.mark
    first = ask(1)
    run_sync(retry.claim((first,)))
    assert retry.losses.mark is mark
    store.fails = [StoreUnavailable("once")]
    assert run_sync(retry.settle((end(first),))) == [Answer.OK]
    assert retry.losses.mark is mark, "a late settle is fenced by its nonce"
    store.fails = [StoreUnavailable("once")]
    assert isinstance(run_sync(retry.claim((ask(2),)))[0], Won)
    assert retry.losses.mark is not mark
    mark = retry.losses.mark
    slow = Retry(store, lambda: store.calls * 2.0, 1.0)
    store.fails = [StoreUnavailable("late")]
    with pytest.raises(StoreUnavailable, match="late"):
        run_sync(slow.claim((ask(3),)))
    assert retry.losses.mark is mark


# ---------------------------------------------------------------------------------------------------- encrypt
def test_bytes_that_were_never_sealed_are_unreadable_and_not_believed() -> None:
    store = Rough()
    again = done(store)  # written without a key
    sealed = Encrypt(store, Ring({"a": b"k" * 32}))
    (verdict,) = run_sync(sealed.claim((again,)))
    assert isinstance(verdict, Unknown)
    assert verdict.unreadable
