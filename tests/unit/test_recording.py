"""How long the end of a run is offered to a store: with `settle_timeout=0` once, and its answer is waited for (R16)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel import AsyncSemel, NotRecorded, Semel
from semel.errors import StoreUnavailable
from semel.layers.layer import Layer
from semel.stores.memory import MemoryStore


class Slow(Layer):
    """Takes its time over an outcome. The first `refused` it does not take."""

    def __init__(self, refused: int = 0) -> None:
        super().__init__(MemoryStore())
        self.tries = 0
        self.refused = refused

    async def settle(self, ends: Any) -> Any:
        self.tries += 1
        taken = self.tries > self.refused
        for _ in range(50):
            await asyncio.sleep(0)
        if not taken:
            raise StoreUnavailable("no room")
        return await self.inner.settle(ends)


async def _effect() -> int:
    return 1


def test_R16_without_a_settle_timeout_the_answer_of_one_offer_is_waited_for() -> None:
    async def main() -> None:
        async with AsyncSemel(store := Slow(), settle_timeout=0, timeout=30) as once:
            assert (await once.execute("k", _effect)).value == 1
            assert (await once.execute("k", _effect)).replayed
            assert store.tries == 1

    asyncio.run(main())


def test_R16_without_a_settle_timeout_one_refusal_is_told() -> None:
    async def main() -> None:
        # An offer is two tries: one that gets lost is made again unseen.
        async with AsyncSemel(Slow(refused=2), settle_timeout=0, timeout=30) as once:
            with pytest.raises(NotRecorded, match="goes on in the background") as caught:
                await once.execute("k", _effect)
            assert caught.value.value == 1
            assert (await once.execute("k", _effect, wait=30)).replayed  # …which it did

    asyncio.run(main())


def test_R16_a_release_that_is_not_stored_does_not_forbid_to_run_it_again() -> None:
    class Shut(Layer):
        async def settle(self, ends: Any) -> Any:
            raise StoreUnavailable("gone")

    def fails() -> None:
        raise ValueError("no money")

    with Semel(Shut(MemoryStore()), settle_timeout=0) as once:
        with pytest.raises(ValueError, match="no money") as caught:
            once.execute("k", fails)
        (note,) = caught.value.__notes__
        assert note.endswith("call again when it has freed the key")
        with pytest.raises(ValueError, match="no money") as caught:
            once.execute("k2", fails, on_error="replay")
        assert caught.value.__notes__[0].endswith("Do not run the effect again")
