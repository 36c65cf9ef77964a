"""What the two worlds owe the flow: threads that nest, loops that end early, outages that stay small."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

from semel import AsyncSemel, ConfigurationError, Semel, StoreUnavailable, current_run
from semel.hooks import Failed
from semel.layers import Layer
from semel.loop import LoopRuntime
from semel.model import State
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore

from .conftest import url_of


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


@pytest.mark.parametrize("store", ["sqlite", "redis"])
@pytest.mark.parametrize(
    ("policy", "closes", "said"),
    [("retry", False, "is free, and is run again"), ("hold", False, "is unknown"), ("retry", True, "")],
)
def test_R10_an_outcome_that_is_lost_with_its_loop_is_told(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    store: str,
    policy: Literal["retry", "hold"],
    closes: bool,
    said: str,
) -> None:
    url = url_of(request, store, "async", tmp_path)
    started, finish, heard = threading.Event(), threading.Event(), list[object]()
    key = f"customer-{uuid.uuid4().hex}"

    def work() -> None:
        started.set()
        finish.wait(10)

    def failures() -> list[str]:
        return [event.decision for event in heard if isinstance(event, Failed)]

    async def main() -> None:
        once = AsyncSemel(url, operation="pay", on_unknown=policy, hooks=[heard.append])
        task = asyncio.create_task(once.execute(key, work))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [*caplog.records, *failures()] == []  # the claim is renewed as long as its loop runs
        if closes:
            finish.set()
            await once.aclose()

    with caplog.at_level(logging.WARNING, "semel"):
        asyncio.run(main())
    finish.set()
    told = [record.getMessage() for record in caplog.records if record.name == "semel"]
    assert failures() == ["lost"] * len(told)
    assert len(told) == (0 if closes else 1)
    for text in told:
        assert "of default/pay ended while attempt 1 still ran in a thread" in text
        assert said in text
        assert "aclose()" in text
        assert key not in text


@pytest.mark.timeout(60)
def test_R26_a_step_of_a_thread_whose_loop_does_not_run_any_more_is_refused() -> None:
    once = AsyncSemel(MemoryStore())
    stopped, told = threading.Event(), threading.Event()
    problems: list[BaseException] = []

    def work() -> None:
        assert stopped.wait(30)
        try:
            current_run().step("charge", int)
        except ConfigurationError as error:
            problems.append(error)
        told.set()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(once.execute("k", work), 0.1)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    stopped.set()
    assert told.wait(30)
    assert "loop of its call does not run any more" in str(problems[0])
    loop.run_until_complete(once.aclose())  # which hears how the function has ended
    loop.close()


def test_R26_what_a_thread_asks_of_a_closed_loop_is_refused() -> None:
    loop = asyncio.new_event_loop()
    runtime = LoopRuntime(loop, ThreadPoolExecutor)
    loop.close()

    async def answer() -> int:
        return 7

    with pytest.raises(ConfigurationError, match="loop of its call does not run any more"):
        runtime.drive(answer())


def test_R26_a_step_of_a_thread_waits_for_a_loop_that_only_pauses() -> None:
    once = AsyncSemel(MemoryStore())
    stopped = threading.Event()

    def work() -> int:
        assert stopped.wait(30)
        value: int = current_run().step("charge", int, "7")
        return value

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(once.execute("k", work), 0.1)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    stopped.set()
    assert loop.run_until_complete(once.execute("k", work, wait=30)).value == 7
    loop.run_until_complete(once.aclose())
    loop.close()


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


@pytest.mark.parametrize("store", ["sqlite", "redis", "postgres", "mysql"])
def test_R7_a_face_closes_although_another_loop_that_used_it_stands_still(
    request: pytest.FixtureRequest, tmp_path: Path, store: str
) -> None:
    once = AsyncSemel(url_of(request, store, "async", tmp_path), tenant=uuid.uuid4().hex, timeout=20)
    idle = asyncio.new_event_loop()

    async def work() -> int:
        return 1

    async def main() -> None:
        assert (await once.execute("k", work)).replayed
        await once.aclose()

    try:
        assert not idle.run_until_complete(once.execute("k", work)).replayed
        asyncio.run(main())
        idle.run_until_complete(asyncio.sleep(0.1))  # goes on, and closes what it had
        with pytest.raises(ConfigurationError):
            idle.run_until_complete(once.execute("k", work))
    finally:
        idle.run_until_complete(idle.shutdown_asyncgens())
        idle.close()
