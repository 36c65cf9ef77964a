"""Refs and ids of a run that is tried again (R25)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel import Semel, StoreUnavailable, current_run, steps
from semel.layers import Layer
from semel.model import Answer, Note
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .test_failure import _over


def _minting(lab: Lab, *, first: str = "", then: str = "", fails: bool = False) -> Callable[..., Any]:
    """A function that sets a ref, mints an id, and sets another ref, as far as it is told to."""

    def begin() -> Any:
        if first:
            current_run().set_ref(first)
        return current_run()

    def end(text: str) -> str:
        if then:
            current_run().set_ref(then)
        if fails:
            raise ValueError("later")
        return text

    def plain() -> str:
        return end(begin().new_id("ord"))

    async def coroutine() -> str:
        return end(await begin().new_id("ord"))

    return plain if lab.colour == "sync" else coroutine


async def test_R25_the_id_of_an_attempt_wins_over_the_ref_of_one_that_failed(lab: Lab) -> None:
    once = lab.face()
    with pytest.raises(ValueError, match="later"):
        await lab.do(once.execute("k", _minting(lab, then="ch_of_failed_attempt", fails=True)))
    outcome = await lab.do(once.execute("k", _minting(lab)))
    assert outcome.ref == outcome.value
    assert (await lab.do(once.peek("k"))).ref == outcome.value


async def test_R25_a_ref_that_the_attempt_sets_itself_wins_over_its_id(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()
    assert (await lab.do(once.execute("k1", _minting(lab, first="mine")))).ref == "mine"
    assert (await lab.do(once.execute("k2", _minting(lab, then="mine")))).ref == "mine"


class _Deaf(Layer):
    """A store whose answers to notes are lost, for a while; the notes may be stored."""

    def __init__(self, inner: Any, *, stores: bool) -> None:
        super().__init__(inner)
        self.stores = stores
        self.deaf = True
        self.seen: list[str] = []

    async def note(self, note: Note) -> Answer:
        (step,) = steps.decode(note.entry).values()
        self.seen.append(step.value.decode())
        if self.deaf:
            if self.stores:
                await self.inner.note(note)
            raise StoreUnavailable("no answer")
        return await self.inner.note(note)


@pytest.mark.parametrize("stores", [False, True])
async def test_R25_an_id_whose_note_had_no_answer_is_the_one_that_is_told_later(
    light_lab: Lab, stores: bool
) -> None:
    lab = light_lab
    store = _Deaf(MemoryStore(), stores=stores)
    once = _over(lab, store)

    def plain() -> Any:
        run = current_run()
        with pytest.raises(StoreUnavailable):
            run.new_id("ord")
        store.deaf = False
        return run.new_id("ord")

    async def coroutine() -> Any:
        run: Any = current_run()
        with pytest.raises(StoreUnavailable):
            await run.new_id("ord")
        store.deaf = False
        return await run.new_id("ord")

    outcome = await lab.do(once.execute("k", plain if lab.colour == "sync" else coroutine))
    assert outcome.ref == outcome.value
    assert set(store.seen) == {outcome.value}, "a note that arrives late changes nothing"


def test_R25_an_id_that_may_be_stored_does_not_change_its_type() -> None:
    from semel import InvalidKey

    store = _Deaf(MemoryStore(), stores=True)

    def work() -> None:
        run = current_run()
        with pytest.raises(StoreUnavailable):
            run.new_id("ord", name="mine")
        store.deaf = False
        with pytest.raises(InvalidKey):
            run.new_id("inv", name="mine")

    with Semel(store) as once:
        once.execute("k", work)
