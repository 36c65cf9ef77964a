"""How the writer thread of an SQLite file wakes an event loop, and what a task gets that is alone in it."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel
from semel.stores.sqlite.bell import Bell

needs_counters = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="only Linux has counters to wait for")


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@needs_counters
@in_a_loop
async def test_what_is_rung_in_a_thread_is_called_in_the_loop_and_in_order() -> None:
    loop = asyncio.get_running_loop()
    bell, seen, done = Bell(loop), [], asyncio.Event()

    def ring() -> None:
        assert bell.ring(lambda: seen.append(threading.current_thread()))
        assert bell.ring(done.set)

    thread = threading.Thread(target=ring)
    thread.start()
    await asyncio.wait_for(done.wait(), 10)
    thread.join()
    bell.take_down(loop)
    assert seen == [threading.current_thread()]


@needs_counters
@in_a_loop
async def test_a_call_that_fails_keeps_no_other_from_being_made() -> None:
    loop = asyncio.get_running_loop()
    told: list[Any] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    bell, done = Bell(loop), asyncio.Event()

    def fail() -> None:
        raise ValueError("the first call")

    assert bell.ring(fail)
    assert bell.ring(done.set)
    await asyncio.wait_for(done.wait(), 10)
    bell.take_down(loop)
    assert [str(error) for error in told] == ["the first call"]


@needs_counters
@in_a_loop
async def test_a_bell_that_was_taken_down_rings_no_more_and_leaves_no_file_open() -> None:
    loop = asyncio.get_running_loop()
    before, done = len(list(Path("/proc/self/fd").iterdir())), asyncio.Event()
    bell = Bell(loop)
    assert bell.ring(done.set)
    bell.take_down(loop)
    bell.take_down(loop)
    await asyncio.wait_for(done.wait(), 10)  # what was rung before is not lost
    assert not bell.ring(done.clear)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@in_a_loop
async def test_a_loop_that_watches_no_files_has_no_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(loop, "add_reader", refuse)
    bell = Bell(loop)
    assert not bell.ring(lambda: None)
    bell.take_down(loop)


@pytest.mark.parametrize("counters", [True, False], ids=["with counters", "without"])
@in_a_loop
async def test_a_task_that_was_alone_and_a_crowd_after_it_run_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counters: bool
) -> None:
    if not counters:
        monkeypatch.delattr(os, "eventfd", raising=False)
    runs: list[str] = []
    async with AsyncSemel(f"sqlite:///{tmp_path}/a.db") as once:

        async def call(key: str) -> str:
            async def work() -> str:
                runs.append(key)
                return key

            return (await once.execute(key, work)).value

        for number in range(5):
            assert await call(f"alone-{number}") == f"alone-{number}"
        crowd = [f"crowd-{number}" for number in range(200)]
        assert await asyncio.gather(*map(call, crowd)) == crowd
        assert await asyncio.gather(*map(call, crowd)) == crowd
        assert await call("alone-5") == "alone-5"
    assert sorted(runs) == sorted([*crowd, *(f"alone-{number}" for number in range(6))])


@in_a_loop
async def test_replays_one_after_the_other_leave_the_loop_to_others(tmp_path: Path) -> None:
    async with AsyncSemel(f"sqlite:///{tmp_path}/a.db") as once:

        async def work() -> int:
            return 1

        for number in range(3):
            await once.execute(f"key-{number}", work)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(20):
            await once.execute("key-1", work)
        task.cancel()
        assert turns >= 20


def test_a_loop_that_ended_is_forgotten_though_the_store_lives(tmp_path: Path) -> None:
    once = AsyncSemel(f"sqlite:///{tmp_path}/a.db")

    async def work() -> int:
        return 1

    async def use(key: str) -> weakref.ref[asyncio.AbstractEventLoop]:
        for number in range(3):
            await once.execute(f"{key}-{number}", work)
        return weakref.ref(asyncio.get_running_loop())

    ended = [asyncio.run(use(f"run-{number}")) for number in range(3)]
    gc.collect()
    assert [loop() for loop in ended[:-1]] == [None, None]
