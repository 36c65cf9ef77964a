"""What the two worlds owe the flow: threads that nest, loops that end early, outages that stay small."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from semel import AsyncSemel, ConfigurationError, Semel, StoreUnavailable, current_run
from semel.layers import Layer
from semel.model import State
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore


def test_steps_of_plain_functions_do_not_deadlock_a_full_pool() -> None:
    def work(name: str) -> Any:
        return current_run().step("inner", lambda: name)

    async def main() -> None:
        async with AsyncSemel("memory://", threads=2) as once:
            outcomes = await asyncio.wait_for(
                asyncio.gather(*(once.execute(f"k{number}", work, f"v{number}") for number in range(8))), 20
            )
        assert [outcome.value for outcome in outcomes] == [f"v{number}" for number in range(8)]

    asyncio.run(main())


def test_a_loop_that_ends_under_a_thread_does_not_free_its_key() -> None:
    store = MemoryStore()
    started, finish = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        finish.wait(10)

    async def main() -> None:
        task = asyncio.ensure_future(AsyncSemel(store, lease=30).execute("k", work))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()  # asyncio.run then cancels what is left

    asyncio.run(main())
    (record,) = store._records.values()
    finish.set()
    assert record.state is State.RUNNING


def test_an_outage_starts_no_thread_per_call() -> None:
    class Down(Layer):
        async def claim(self, asks: Any) -> Any:
            raise StoreUnavailable("down")

        async def settle(self, ends: Any) -> Any:
            raise StoreUnavailable("down")

    before = threading.active_count()
    once = Semel(Down(MemoryStore()))
    for number in range(50):
        with pytest.raises(StoreUnavailable):
            once.execute(f"k{number}", lambda: 1)
    assert threading.active_count() <= before + 2
    once.close()


def test_an_async_store_under_a_sync_face_is_refused_at_construction() -> None:
    class OnlyAsync(Layer):
        @property
        def colour(self) -> Any:
            return "async"

    with pytest.raises(ConfigurationError, match="AsyncSemel"):
        Semel(OnlyAsync(MemoryStore()))


def test_a_coroutine_that_waits_is_refused_in_the_sync_world() -> None:
    with pytest.raises(ConfigurationError, match="event loop"):
        run_sync(asyncio.sleep(0))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "scheme"),
        ("mongodb://x", "mongodb"),
        ("sqlite://", "memory"),
        (12, "store"),
    ],
)
def test_a_wrong_store_is_refused_at_construction_with_the_remedy(url: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Semel(url)


def test_an_async_face_outside_a_loop_is_refused() -> None:
    once = AsyncSemel("memory://")
    coroutine = once.execute("k", lambda: 1)
    with pytest.raises(ConfigurationError, match="asyncio"):
        run_sync(coroutine)
