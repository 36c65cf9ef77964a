"""R16 under hold: a claim that reaches the store long after its caller gave up must not leave a key unknown for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from semel import AsyncSemel, StoreUnavailable
from semel.model import Ask, State, Verdict
from semel.stores.memory import MemoryStore

LEASE = 0.05


class Slow(MemoryStore):
    """The first claim is lost to its caller and arrives six leases later."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = asyncio.Event()
        self._first = True

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        if not self._first:
            return await super().claim(asks)
        self._first = False
        asyncio.get_running_loop().call_later(6 * LEASE, self._arrive, asks[0])
        await asyncio.sleep(0.02)  # longer than the caller's patience: nobody repeats it
        raise StoreUnavailable("no answer")

    def _arrive(self, ask: Ask) -> None:
        self._claim(ask)
        self.arrived.set()


def test_R16_a_claim_that_arrives_late_is_released_all_the_same() -> None:
    async def main() -> None:
        store = Slow()
        async with AsyncSemel(store, lease=LEASE, timeout=0.01, on_unknown="hold") as once:
            with pytest.raises(StoreUnavailable):
                await once.execute("k", _one)
            await asyncio.wait_for(store.arrived.wait(), 30)
            await asyncio.wait_for(_released(once), 30)
            assert (await once.execute("k", _one)).value == 1

    asyncio.run(main())


async def _released(once: AsyncSemel) -> None:
    while (record := await once.peek("k")) is None or record.state is not State.RELEASED:
        await asyncio.sleep(0.01)


async def _one() -> int:
    return 1
