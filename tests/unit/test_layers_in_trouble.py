"""Layers when something goes wrong below them: batches that fail, caches that are told, second tries that fail too."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from semel.errors import StoreUnavailable
from semel.keys import Scope, make_scope
from semel.layers.batch import Batch
from semel.layers.cache import Cache, _Entry
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
class Alarm:
    """A ticker that goes off when the test says so."""

    def __init__(self, tick: Callable[[], Coroutine[Any, Any, float | None]]) -> None:
        self._tick = tick
        self.when: float | None = None
        self.stopped = False

    def at(self, when: float) -> None:
        self.when = when if self.when is None else min(self.when, when)

    def stop(self) -> None:
        self.stopped = True

    def ring(self) -> None:
        self.when = run_sync(self._tick())


class Still(ThreadRuntime):
    """A world in which no time passes but what the test lets pass; what is done in the background is done at once."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.alarms: list[Alarm] = []

    def now(self) -> float:
        return self.time

    def background(self, coroutine: Any) -> None:
        run_sync(coroutine)

    def ticker(self, tick: Callable[[], Coroutine[Any, Any, float | None]]) -> Alarm:
        self.alarms.append(Alarm(tick))
        return self.alarms[-1]


class Telling(Rough):
    """It tells of changes, as a store with a wake channel does; `between` happens before a look.

    `unable` are errors of subscriptions that are to end, one each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watched = 0
        self.between: Callable[[], object] = bool
        self.unable: list[Exception] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(notifies=True)

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        unwatch = await super().watch(scope, wake)
        self.watched += 1

        async def counted() -> None:
            if self.unable:
                raise self.unable.pop(0)
            self.watched -= 1
            await unwatch()

        return counted

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        self.between()
        return await super().peek(scope)


def done(store: Rough, number: int = 1) -> Ask:
    first = ask(number)
    run_sync(store.claim((first,)))
    run_sync(store.settle((end(first, result=b"one"),)))
    return ask(number, nonce=700 + number)


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


def cached(store: Telling, many: int) -> tuple[Cache, Still, list[Ask]]:
    """A cache in which so many outcomes are kept."""
    runtime = Still()
    cache, asks = Cache(store, runtime), [done(store, number) for number in range(many)]
    for each in asks:
        run_sync(cache.claim((each,)))
    assert (len(cache._entries), store.watched) == (many, many)
    return cache, runtime, asks


def test_R31_what_is_past_its_time_is_swept_though_nobody_asks_for_it() -> None:
    store = Telling()
    cache, runtime, _ = cached(store, 3)
    (alarm,) = runtime.alarms
    assert alarm.when == 1.0
    runtime.time = 0.9
    alarm.ring()
    assert (len(cache._entries), alarm.when) == (3, 1.15), (
        "not yet, and not for every entry a look of its own"
    )
    runtime.time = 1.15
    alarm.ring()
    assert (len(cache._entries), store.watched) == (0, 0)
    assert alarm.when is None, "an empty cache looks at nothing"


def test_R31_what_was_swept_is_not_left_to_the_garbage_collector() -> None:
    def kept() -> int:
        return sum(type(each) is _Entry for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = kept()
        _, runtime, _ = cached(Telling(), 3)
        assert kept() == before + 3
        runtime.time = 1.0
        runtime.alarms[0].ring()
        assert kept() == before
    finally:
        gc.enable()


def test_R31_an_outcome_in_use_keeps_another_one_no_longer_than_its_own_time() -> None:
    store = Telling()
    cache, runtime, (first, *_) = cached(store, 2)
    (alarm,) = runtime.alarms
    runtime.time = 0.5
    run_sync(cache.claim((done(store, 7),)))
    runtime.time = 0.9
    run_sync(cache.claim((first,)))  # it stands behind the one of 0.5 now
    runtime.time = 1.0
    alarm.ring()
    assert (len(cache._entries), alarm.when) == (2, 1.5)
    runtime.time = 1.5
    alarm.ring()
    assert (len(cache._entries), store.watched, alarm.when) == (0, 0, None)


def test_R31_a_short_retention_is_swept_by_its_own_end() -> None:
    store, runtime = Telling(), Still()
    cache, first = Cache(store, runtime), ask(1)
    run_sync(store.claim((first,)))
    run_sync(store.settle((msgspec.structs.replace(end(first), retention=0.5),)))
    run_sync(cache.claim((ask(1, nonce=7),)))
    (alarm,) = runtime.alarms
    assert alarm.when is not None
    assert alarm.when <= 0.5
    runtime.time = 0.5
    alarm.ring()
    assert (len(cache._entries), store.watched) == (0, 0)


def test_R31_a_subscription_that_cannot_be_ended_keeps_no_other_one(caplog: pytest.LogCaptureFixture) -> None:
    store = Telling()
    cache, runtime, (first, *_) = cached(store, 3)
    store.unable = [StoreUnavailable("gone"), ValueError("a mistake")]
    runtime.time = 1.0
    runtime.alarms[0].ring()
    assert (len(cache._entries), store.watched, store.unable) == (0, 2, [])
    assert [record.message for record in caplog.records] == [
        "subscriptions of cached outcomes could not be ended"
    ]
    assert isinstance(run_sync(cache.claim((first,)))[0], Replay)
    assert runtime.alarms[0].when == 2.0, "the next one is swept as well"


def test_R31_a_closed_cache_keeps_nothing_also_of_a_claim_under_way() -> None:
    store = Telling()
    cache, runtime, _ = cached(store, 3)
    run_sync(cache.aclose())
    assert (len(cache._entries), store.watched, runtime.alarms[0].stopped) == (0, 0, True)
    store = Telling()
    cache, late = Cache(store, Still()), done(store)
    store.between = lambda: run_sync(cache.aclose())
    assert isinstance(run_sync(cache.claim((late,)))[0], Replay)
    assert (len(cache._entries), store.watched) == (0, 0)


class Struck(OrderedDict[bytes, Any]):
    """In the middle of the verb `at` a signal arrives, whose handler does what the test says."""

    at = ""
    handler: Callable[[], object] = bool

    def _struck(self, verb: str) -> None:
        if verb == self.at:
            self.at = ""
            self.handler()

    def __getitem__(self, key: bytes) -> Any:
        self._struck("find")
        return super().__getitem__(key)

    def get(self, key: bytes, default: Any = None) -> Any:
        self._struck("find")
        return super().get(key, default)

    def pop(self, key: bytes, default: Any = None) -> Any:
        self._struck("before a pop")
        try:
            return super().pop(key, default)
        finally:
            self._struck("after a pop")


@pytest.mark.parametrize("moment", ["find", "before a pop", "after a pop"])
@pytest.mark.parametrize("deed", ["claims", "settles"])
def test_a_signals_handler_that_calls_in_the_middle_does_not_wait_for_itself(moment: str, deed: str) -> None:
    store = Telling()
    cache, again = Cache(store, Still()), done(store)
    entries = cache._entries = Struck()
    if moment == "find":
        run_sync(cache.claim((again,)))

    def handler() -> None:
        if deed == "claims":
            assert isinstance(run_sync(cache.claim((again,)))[0], Replay)
        else:
            run_sync(cache.settle((end(ask(2)), end(again))))

    entries.at, entries.handler = moment, handler
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.extend(run_sync(cache.claim((again,)))), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for itself"
    assert [type(verdict) for verdict in told] == [Replay]
    assert not entries.at, "the signal has arrived"
    assert store.watched == len(entries) <= 1


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
