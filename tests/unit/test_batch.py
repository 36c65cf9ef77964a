"""The batch layer: who travels with whom. Over the memory store, behind a gate that shows what arrives together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from semel.keys import make_scope
from semel.layers.batch import LONELY, MOST, SPLIT, Batch
from semel.layers.layer import Layer
from semel.model import Ask, Verdict, Won
from semel.stores.memory import MemoryStore


class Gate(Layer):
    """The store behind; `sizes` tells what arrived, and nothing is answered before `open` is set."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.sizes: list[int] = []
        self.open = asyncio.Event()
        self.open.set()

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        self.sizes.append(len(asks))
        await self.open.wait()
        await asyncio.sleep(0)  # a trip
        return await super().claim(asks)


def ask(number: int) -> Ask:
    scope = make_scope("semel", "default", "default", f"key-{number}", "full")
    return Ask(scope, number.to_bytes(16, "big"), 10.0, 60.0)


async def _won(batch: Batch, number: int) -> None:
    assert isinstance((await batch.claim((ask(number),)))[0], Won)


async def _crowd(batch: Batch, first: int, size: int) -> list[asyncio.Task[None]]:
    crowd = [asyncio.create_task(_won(batch, first + each)) for each in range(size)]
    for _ in range(4):
        await asyncio.sleep(0)
    return crowd


def test_calls_of_one_tick_travel_together_and_many_in_two_halves() -> None:
    async def work() -> None:
        gate = Gate()
        batch = Batch(gate)
        await asyncio.gather(*await _crowd(batch, 0, SPLIT - 1))
        assert gate.sizes == [SPLIT - 1]
        gate.sizes.clear()
        await asyncio.gather(*await _crowd(batch, 1000, 63))
        assert gate.sizes == [32, 31]

    asyncio.run(work())


def test_while_two_batches_fly_the_others_wait_and_leave_together() -> None:
    async def work() -> None:
        gate = Gate()
        batch = Batch(gate)
        gate.open.clear()
        crowd = await _crowd(batch, 0, 64)
        crowd += await _crowd(batch, 100, 5)
        crowd += await _crowd(batch, 200, 6)
        assert gate.sizes == [32, 32]
        gate.open.set()
        await asyncio.gather(*crowd)
        assert gate.sizes == [32, 32, 11]
        gate.sizes.clear()
        await asyncio.gather(*await _crowd(batch, 1000, 4 * MOST + 40))
        assert max(gate.sizes) <= MOST
        assert sum(gate.sizes) == 4 * MOST + 40

    asyncio.run(work())


def test_who_has_been_alone_leaves_at_once_and_a_crowd_ends_that() -> None:
    async def work() -> None:
        gate = Gate()
        batch = Batch(gate)
        for number in range(LONELY):
            await _won(batch, number)
        gate.sizes.clear()
        crowd = [asyncio.create_task(_won(batch, 100 + each)) for each in range(64)]
        await asyncio.sleep(0)
        assert gate.sizes == [1], "the first one did not wait for the tick's end"
        await asyncio.gather(*crowd)
        assert gate.sizes == [1, 32, 31], "one of a crowd in flight is as good as nothing in flight"
        gate.sizes.clear()
        await asyncio.gather(*await _crowd(batch, 1000, 3))
        assert gate.sizes == [3], "nobody leaves ahead of company"

    asyncio.run(work())


@pytest.mark.parametrize("before", [0, LONELY])
def test_a_lone_caller_who_gives_up_takes_his_place_in_the_sky_with_him(before: int) -> None:
    async def work() -> None:
        gate = Gate()
        batch = Batch(gate)
        for number in range(before):
            await _won(batch, number)
        gate.open.clear()
        for number in range(100, 110):
            (lost,) = await _crowd(batch, number, 1)
            lost.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lost
        gate.open.set()
        gate.sizes.clear()
        await asyncio.gather(*await _crowd(batch, 1000, 40))
        assert sum(gate.sizes) == 40
        assert max(gate.sizes) == 20, "nothing is believed to be in flight any more"

    asyncio.run(work())
