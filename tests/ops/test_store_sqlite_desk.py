"""What a task gets that is alone in its loop on an SQLite file, and a crowd after it."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from semel import AsyncSemel
from semel.stores.sqlite import file as sqlite_file
from semel.stores.sqlite.file import DatabaseFile


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@in_a_loop
async def test_a_task_that_was_alone_and_a_crowd_after_it_run_everything_once(tmp_path: Path) -> None:
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


def test_loops_that_end_with_a_write_on_its_way_leave_no_file_open(tmp_path: Path) -> None:
    once = AsyncSemel(f"sqlite:///{tmp_path}/a.db")

    async def work() -> int:
        return 1

    async def use(key: str) -> None:
        for number in range(3):
            await once.execute(f"{key}-{number}", work)
        task = asyncio.create_task(once.execute(f"{key}-cancelled", work))
        await asyncio.sleep(0)
        task.cancel()

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    asyncio.run(use("first"))
    before = open_files()
    for number in range(20):
        asyncio.run(use(f"run-{number}"))
    gc.collect()
    assert open_files() < before + 10


@in_a_loop
async def test_the_thread_that_writes_moves_the_log_into_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sqlite_file, "CHECKPOINT", 100_000)
    path = tmp_path / "a.db"
    async with AsyncSemel(f"sqlite:///{path}") as once:

        async def work() -> str:
            return "x" * 50_000

        for number in range(20):
            await once.execute(f"key-{number}", work)
        assert Path(f"{path}-wal").stat().st_size < 500_000
        assert path.stat().st_size > 500_000


def test_a_file_that_nobody_writes_has_nothing_to_tidy(tmp_path: Path) -> None:
    file = DatabaseFile(str(tmp_path / "a.db"))
    assert not file.untidy
    file.tidy()
    assert not list(tmp_path.iterdir())
