"""R9, R16, R17: what the store's own trouble means, and does not mean. Found by the simulator."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from semel import (
    NOT_FOUND,
    AsyncSemel,
    NotRecorded,
    OutcomeUnknown,
    PreviousFailure,
    Semel,
    StoreUnavailable,
    current_run,
)
from semel.layers import Layer
from semel.model import Answer
from semel.stores.memory import MemoryStore

from .conftest import Lab


class Deaf(Layer):
    """Takes no notes while it is deaf."""

    deaf = True

    async def note(self, note: Any) -> Answer:
        if self.deaf:
            raise StoreUnavailable("the note was lost")
        return await self.inner.note(note)


def _face(lab: Lab, store: Any, **settings: Any) -> Any:
    return (Semel if lab.colour == "sync" else AsyncSemel)(store, **settings)


@pytest.mark.parametrize("on_error", ["replay", lambda _: "replay"], ids=["word", "callable"])
async def test_R9_a_store_that_does_not_answer_a_step_is_no_failure_of_the_function(
    light_lab: Lab, on_error: Any
) -> None:
    store = Deaf(MemoryStore())
    once = _face(light_lab, store, settle_timeout=0.05, timeout=0.05)

    def work() -> Any:
        return current_run().step("charge", light_lab.effect())

    with pytest.raises(StoreUnavailable):
        await light_lab.do(once.execute("k", light_lab.fn(work), on_error=on_error))
    store.deaf = False
    assert (await light_lab.do(once.execute("k", light_lab.fn(work), on_error=on_error))).value == "done"
    await light_lab.do(once.close())


@pytest.mark.parametrize("policy", ["retry", "hold"])
@pytest.mark.parametrize("asks_again", [True, False], ids=["in the same run", "in the next run"])
async def test_R26_a_step_that_was_made_is_not_made_again_though_its_note_had_no_answer(
    light_lab: Lab, policy: str, asks_again: bool
) -> None:
    """Whoever made it lives, and knows: he tells the store with his next note, or with the end of the run."""
    lab = light_lab
    store = Deaf(MemoryStore())
    store.deaf = False
    once = _face(lab, store, settle_timeout=0.05, timeout=0.05)

    def charge() -> Any:
        store.deaf = True
        lab.effects.append("charge")
        return "paid"

    def work() -> Any:
        run = current_run()
        run.step("reserve", lambda: None)
        try:
            return run.step("charge", charge, on_unknown=policy)
        except StoreUnavailable:
            store.deaf = False
            if not asks_again:
                raise
            return run.step("charge", charge, on_unknown=policy)

    if not asks_again:
        with pytest.raises(StoreUnavailable):
            await lab.do(once.execute("k", work))
    assert (await lab.do(once.execute("k", work))).value == "paid"
    assert lab.effects == ["charge"]
    await lab.do(once.close())


async def test_R9_under_hold_a_step_whose_note_is_lost_leaves_the_key_unknown_not_failed(
    light_lab: Lab,
) -> None:
    once = _face(light_lab, Deaf(MemoryStore()), settle_timeout=0.05, timeout=0.05)

    def work() -> Any:
        return current_run().step("charge", light_lab.effect(), on_unknown="retry")

    for expected in (StoreUnavailable, OutcomeUnknown):
        with pytest.raises(expected):
            await light_lab.do(once.execute("k", light_lab.fn(work), on_error="replay", on_unknown="hold"))
    await light_lab.do(once.close())


async def test_R9_the_function_s_own_failure_after_a_lost_note_is_replayed(light_lab: Lab) -> None:
    once = _face(light_lab, Deaf(MemoryStore()), settle_timeout=0.05, timeout=0.05)

    def work() -> Any:
        raise LookupError("of its own") from StoreUnavailable("somebody else's")

    for expected in (LookupError, PreviousFailure):
        with pytest.raises(expected):
            await light_lab.do(once.execute("k", light_lab.fn(work), on_error="replay"))
    await light_lab.do(once.close())


class Late(Layer):
    """A copy of the first note arrives once more, when another one was taken."""

    first: Any = None

    async def note(self, note: Any) -> Answer:
        answer = await self.inner.note(note)
        if self.first is None:
            self.first = note
        else:
            await self.inner.note(self.first)
        return answer


@pytest.mark.parametrize("on_unknown", ["hold", lambda: NOT_FOUND], ids=["hold", "probe"])
async def test_R26_a_step_that_is_done_stays_done_when_a_copy_of_its_mark_arrives_late(
    light_lab: Lab, on_unknown: Any
) -> None:
    lab = light_lab
    once = _face(lab, Late(MemoryStore()))
    ends: list[Any] = [ConnectionError(), None]

    def work() -> Any:
        paid = current_run().step("charge", lab.effect("paid"), on_unknown=on_unknown)
        return _ended(paid, ends.pop(0)) if lab.colour == "sync" else _ended_later(paid, ends.pop(0))

    with pytest.raises(ConnectionError):
        await lab.do(once.execute("k", lab.fn(work)))
    assert (await lab.do(once.execute("k", lab.fn(work)))).value == "paid"
    assert len(lab.effects) == 1
    await lab.do(once.close())


def _ended(value: Any, error: Exception | None) -> Any:
    if error is not None:
        raise error
    return value


async def _ended_later(step: Any, error: Exception | None) -> Any:
    return _ended(await step, error)


class Slow(Layer):
    """The reply of the first settle is lost, and the retention is over when it is sent again."""

    def __init__(self, inner: MemoryStore, clock: list[float]) -> None:
        super().__init__(inner)
        self._clock = clock
        self.lost = 0

    async def settle(self, ends: Any) -> Any:
        answers = await self.inner.settle(ends)
        if not self.lost:
            self.lost += 1
            self._clock[0] += 1.5
            raise StoreUnavailable("the reply was lost")
        return answers


async def test_R17_a_settle_that_was_stored_and_is_buried_when_it_is_sent_again_was_not_lost_to_anybody(
    light_lab: Lab,
) -> None:
    clock = [1000.0]
    store = Slow(MemoryStore(clock=lambda: clock[0]), clock)
    once = _face(light_lab, store, retention=1.0, tombstone=60.0)
    assert (await light_lab.do(once.execute("k", light_lab.effect()))).value == "done"
    assert store.lost == 1
    await light_lab.do(once.close())


class Full(Layer):
    """Answers at once that it takes no outcome, and to the last offers not at all."""

    offers = 0
    awaits = True

    async def settle(self, ends: Any) -> Any:
        self.offers += 1
        if self.offers > 2:
            await self.silence()
        raise StoreUnavailable("the disk is full")

    async def silence(self) -> None:
        if self.awaits:
            await asyncio.sleep(0.5)
        else:
            time.sleep(0.5)


async def test_R16_what_the_store_said_of_an_outcome_is_told_though_it_is_silent_in_the_end(
    light_lab: Lab,
) -> None:
    store = Full(MemoryStore())
    store.awaits = light_lab.colour == "async"
    once = _face(light_lab, store, settle_timeout=0.3)
    with pytest.raises(NotRecorded, match="the disk is full") as caught:
        await light_lab.do(once.execute("k", light_lab.effect()))
    assert "the disk is full" in str(caught.value.__cause__)
    await light_lab.do(once.close())
