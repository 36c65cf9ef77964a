"""R10, R16, R26: what is written after an effect is written whatever happens to its caller. Found by the crash matrix."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from semel import (
    AsyncSemel,
    NotRecorded,
    Semel,
    StoreUnavailable,
    current_async_run,
    current_run,
    forks,
    points,
)
from semel.layers import Layer
from semel.model import Answer
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore
from tests.ops.strike_lab import Late, Struck

from .conftest import Lab


@pytest.fixture(autouse=True)
def deaf_again() -> Iterator[None]:
    yield
    points.listen(None)


@pytest.mark.parametrize(
    ("moment", "error"), [("run.returned", Struck), ("run.returned", Late), ("settle.sent", Struck)]
)
async def test_R16_an_interrupt_between_the_effect_and_the_settle_does_not_keep_the_outcome_from_being_stored(
    light_lab: Lab, moment: str, error: type[BaseException]
) -> None:
    def interrupt(name: str) -> None:
        if name == moment:
            points.listen(None)
            raise error

    once = light_lab.face()
    points.listen(interrupt)
    with pytest.raises(error):
        await light_lab.do(once.execute("k", light_lab.effect("made"), on_unknown="hold"))
    again = await light_lab.do(once.execute("k", light_lab.effect("again"), on_unknown="hold"))
    assert (again.value, len(light_lab.effects)) == ("made", 1)


async def test_R16_an_interrupt_in_a_forked_child_says_nothing_of_its_parents_run(light_lab: Lab) -> None:
    """Its value is in hand in two processes: the parent records it."""
    once = light_lab.face()

    def fork(name: str) -> None:
        if name == "run.returned":
            points.listen(None)
            monkeypatch.setattr(forks, "epoch", forks.epoch + 1)  # as in a child
            raise Struck

    points.listen(fork)
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Struck):
        await light_lab.do(once.execute("k", light_lab.effect("made"), on_unknown="hold"))
    assert (await light_lab.do(once.peek("k"))).state == "running"


def test_R26_a_cancelled_caller_still_stores_the_note_of_a_step_whose_effect_has_happened() -> None:
    class Slow(Layer):
        async def note(self, note: Any) -> Answer:
            await asyncio.sleep(0.01)
            return await self.inner.note(note)

    async def main() -> None:
        made: list[int] = []
        once = AsyncSemel(Slow(MemoryStore()))

        async def effect() -> int:
            made.append(1)
            return len(made)

        async def work() -> Any:
            return await current_run().step("charge", effect)

        task = asyncio.create_task(once.execute("k", work))

        def cancel(name: str) -> None:
            if name == "step.returned":
                task.cancel()

        points.listen(cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        points.listen(None)
        assert (await once.execute("k", work)).value == 1
        assert made == [1]
        await once.aclose()

    asyncio.run(main())


async def test_R26_a_cancellation_while_a_step_cannot_be_noted_is_not_taken_for_an_error() -> None:
    """The store is away, and the function handles that: it must not go on all the same."""
    asked = asyncio.Event()

    class Away(Layer):
        async def note(self, note: Any) -> Answer:
            asked.set()
            await asyncio.sleep(0.01)
            raise StoreUnavailable("away")

    async def work() -> None:
        with suppress(StoreUnavailable):
            await current_async_run().step("charge", charge)
        went_on.append(1)

    async def charge() -> None: ...

    went_on: list[int] = []
    async with AsyncSemel(Away(MemoryStore()), settle_timeout=0.1) as once:
        task = asyncio.create_task(once.execute("k", work))
        await asyncio.wait_for(asked.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert went_on == []


class Flaky(Layer):
    """Loses the first notes."""

    left = 5

    async def note(self, note: Any) -> Answer:
        self.left -= 1
        if self.left >= 0:
            raise StoreUnavailable("the note was lost")
        return await self.inner.note(note)


async def test_R26_the_note_of_a_step_is_offered_until_the_store_takes_it(light_lab: Lab) -> None:
    store = Flaky(MemoryStore())
    once: Any = (Semel if light_lab.colour == "sync" else AsyncSemel)(store, settle_timeout=10)
    step = light_lab.effect()

    def work() -> Any:
        return current_run().step("charge", step)

    assert (await light_lab.do(once.execute("k", light_lab.fn(work)))).value == "done"
    assert (store.left < 0, len(light_lab.effects)) == (True, 1)
    await light_lab.do(once.close())


async def test_R16_a_claim_without_an_answer_is_released_before_the_face_is_closed(light_lab: Lab) -> None:
    class Deaf(Layer):
        async def claim(self, asks: Any) -> Any:
            await self.inner.claim(asks)
            raise StoreUnavailable("the reply was lost")

    memory = MemoryStore()
    once: Any = (Semel if light_lab.colour == "sync" else AsyncSemel)(Deaf(memory), lease=30)
    with pytest.raises(StoreUnavailable):
        await light_lab.do(once.execute("k", light_lab.effect(), on_unknown="hold"))
    await light_lab.do(once.close())
    assert [record.state for record in memory._records.values()] == ["released"]


class Refusing(Layer):
    """Takes no outcome: it is down, or it does not answer at all until `answers` is set."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(MemoryStore())
        self._lab = lab
        self.answers = threading.Event()
        self.answers.set()

    async def settle(self, ends: Any) -> Any:
        if self._lab.colour == "sync":
            self.answers.wait(30)
        else:
            await asyncio.to_thread(self.answers.wait, 30)
        raise StoreUnavailable("down")


async def test_R16_what_ends_after_the_face_was_closed_is_told_that_nobody_writes_it(light_lab: Lab) -> None:
    once: Any = (Semel if light_lab.colour == "sync" else AsyncSemel)(Refusing(light_lab), settle_timeout=0.1)

    def closing() -> Any:
        # The face is closed while its function runs: the close gives up after its time, and the function goes on.
        return once.close()

    with pytest.raises(NotRecorded, match="the face was closed meanwhile") as caught:
        await light_lab.do(once.execute("k", light_lab.fn(closing)))
    assert "goes on in the background" not in str(caught.value)


async def test_R16_closing_takes_no_longer_than_it_may_when_the_store_does_not_answer(light_lab: Lab) -> None:
    store = Refusing(light_lab)
    once: Any = (Semel if light_lab.colour == "sync" else AsyncSemel)(store, settle_timeout=0.2)
    with pytest.raises(NotRecorded, match="goes on in the background"):
        await light_lab.do(once.execute("k", light_lab.effect()))
    store.answers.clear()
    debts = once._engine().debts
    start = time.monotonic()
    await light_lab.do(debts.close(0.2) if light_lab.colour == "async" else run_sync(debts.close(0.2)))
    took = time.monotonic() - start
    store.answers.set()
    await light_lab.do(once.close())
    assert 0.15 < took < 15  # unbounded, it would be the 30 s of the store
