"""The SQLite store beyond the contract: its file and schema, reads without locks, group commit, wake-ups."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from semel import Semel
from semel.errors import ConfigurationError, StoreUnavailable
from semel.model import Busy, Replay, State, Won
from semel.runtime import run_sync
from semel.store import Query, Settings, open_store
from semel.stores import sqlite
from semel.stores.sqlite import SqliteStore
from tests.ops.sqlite_lab import (
    BOTH,
    Colour,
    ask,
    beside,
    end,
    finish,
    hurried,
    opened,
    outcome_of,
    python,
    raw,
    run,
    scope,
    wait_until,
    win,
    write_lock,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "semel.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = opened(path, timeout=20)
    yield store
    run_sync(store.aclose())


# ------------------------------------------------------------------------------------------------ URLs and schema


def test_a_relative_and_an_absolute_url_name_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///near.db", f"sqlite:///{tmp_path}/far%20 away#1.db"):
        store = open_store(url, Settings(), "sync")
        assert beside(tmp_path / "x") == set() or url.endswith("#1.db"), (
            "nothing is created before the first use"
        )
        run_sync(store.peek(scope()))
        run_sync(store.aclose())
    assert beside(tmp_path / "x") == {"near.db", "far%20 away#1.db"}


@pytest.mark.parametrize(
    "url, remedy",
    [
        ("sqlite://", "memory://"),
        ("sqlite:///", "memory://"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite://host/file.db", "has no host"),
        ("sqlite:file.db", "sqlite:///relative.db"),
        ("sqlite+aiosqlite:///file.db", "Python's own sqlite3"),
        ("sqlite:///file.db?mode=ro", "takes no options"),
        ("sqlite:///file:x.db", "cannot be a file name"),
        ("sqlite:///a\0b", "cannot be a file name"),
    ],
)
def test_a_wrong_url_is_refused_at_once_with_the_remedy(url: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError, match=remedy):
        sqlite.open_url(url, Settings(), "sync")


@pytest.mark.parametrize("table", ["", "1x", "a b", 'a"b', "sqlite_x", "SQLite_x", "x" * 49, "a.b"])
def test_a_table_name_that_is_none_is_refused_at_once(path: Path, table: str) -> None:
    with pytest.raises(ConfigurationError, match="table="):
        opened(path, table=table)


def test_a_connection_is_not_adopted_but_within_is_named() -> None:
    with closing(sqlite3.connect(":memory:")) as db, pytest.raises(ConfigurationError, match="within"):
        sqlite.adopt(db, Settings(), "sync")


def test_a_reserved_word_may_be_a_table(path: Path) -> None:
    store = opened(path, table="order")
    run_sync(win(store))
    run_sync(store.aclose())
    assert raw(path, 'SELECT tenant, operation, key, state FROM "order"') == [
        ("acme", "op", "key", "running")
    ]


def test_times_are_unix_seconds_that_people_can_read(path: Path, store: SqliteStore) -> None:
    run_sync(finish(store, run_sync(win(store, labels={"scene": "x"})), ref="ord_1"))
    ((state, age, ref, labels),) = raw(path, "SELECT state, unixepoch() - settled, ref, labels FROM semel")
    assert (state, ref, labels) == ("done", "ord_1", '{"scene":"x"}')
    assert abs(age) < 60


def test_without_the_right_to_create_a_missing_file_and_missing_tables_are_named(path: Path) -> None:
    store = opened(path, create=False)
    with pytest.raises(ConfigurationError, match="does not exist"):
        run_sync(store.peek(scope()))
    assert not path.exists()
    raw(path, "CREATE TABLE mine (x)")
    with pytest.raises(ConfigurationError, match="semel schema sql"):
        run_sync(store.peek(scope()))
    run_sync(store.aclose())


def test_the_printed_schema_serves_those_who_may_not_create(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(sqlite.schema_sql("mine"))
        db.executescript(sqlite.schema_sql("mine"))
    store = opened(path, create=False, table="mine")
    run_sync(finish(store, run_sync(win(store))))
    run_sync(store.aclose())
    assert raw(path, "PRAGMA journal_mode") == [("wal",)]


def test_a_newer_schema_is_refused_naming_both_versions(path: Path) -> None:
    store = opened(path)
    run_sync(store.peek(scope()))
    run_sync(store.aclose())
    raw(path, "INSERT INTO semel_schema VALUES (7)")
    late = opened(path)
    with pytest.raises(ConfigurationError, match=r"version 7.*version 1"):
        run_sync(late.peek(scope()))
    run_sync(late.aclose())


def test_a_schema_that_fails_half_way_leaves_nothing_behind(path: Path) -> None:
    raw(path, "CREATE TABLE semel_audit (x)")  # somebody else's table: an index on it cannot be made
    store = opened(path)
    with pytest.raises(ConfigurationError, match="no such column"):
        run_sync(store.peek(scope()))
    run_sync(store.aclose())
    assert raw(path, "SELECT name FROM sqlite_master") == [("semel_audit",)]


RACE = """
import os, sys
from semel.keys import make_scope
from semel.model import Ask, Won, Kind, Settle
from semel.runtime import run_sync
from semel.store import Settings, open_store
store = open_store(f"sqlite:///{sys.argv[1]}", Settings(timeout=20), "sync")
print("ready", flush=True)
sys.stdin.readline()
for n in range(40):
    ask = Ask(make_scope("semel", "acme", "op", f"key-{n}"), os.urandom(16), 30.0, 60.0)
    verdict = run_sync(store.claim([ask]))[0]
    if isinstance(verdict, Won):
        print(n)
run_sync(store.aclose())
"""


def test_processes_that_create_and_race_at_once_have_one_winner_per_key(path: Path) -> None:
    racers = [python(RACE, str(path), stdin=subprocess.PIPE) for _ in range(5)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    won = [line for racer in racers for line in outcome_of(racer).split()]
    assert sorted(map(int, won)) == list(range(40))
    with Semel(
        f"sqlite:///{path}"
    ) as last:  # of several that close at once SQLite may take none for the last
        assert last.peek("nobody") is None
    assert beside(path) == {"semel.db"}


# --------------------------------------------------------------------------------------------- reads and locks


@BOTH
def test_a_replay_and_a_look_need_no_write_lock(path: Path, colour: Colour) -> None:
    store = opened(path, colour, timeout=20)

    async def main() -> None:
        done = await win(store, "done")
        await finish(store, done, result=b"kept")
        await win(store, "running")
        with write_lock(path):
            replay, busy = await store.claim([ask("done"), ask("running")])
            assert isinstance(replay, Replay)
            assert replay.record.result == b"kept"
            assert isinstance(busy, Busy)
            assert (await store.peek(done.scope))[0] == replay.record
            assert [r.state for r in (await store.scan(Query())).records] == [State.RUNNING]
            assert (await store.facts()).durable_writes
        await store.aclose()

    run(colour, main)


@BOTH
def test_a_file_locked_beyond_the_timeout_is_unavailable_in_time_and_nothing_is_written_later(
    path: Path, colour: Colour
) -> None:
    store = opened(path, colour, timeout=20)

    async def main() -> None:
        owner = await win(store)
        with write_lock(path), hurried(store, 0.2):
            began = time.monotonic()
            for call in (store.claim([ask("new")]), store.settle([end(owner)]), store.purge(1)):
                with pytest.raises(StoreUnavailable, match="stayed locked"):
                    await call
            assert 0.55 < time.monotonic() - began < 15
        assert (await store.peek(scope("new")))[0] is None
        await finish(store, owner)
        await store.aclose()

    run(colour, main)


@BOTH
def test_a_lock_that_is_given_back_in_time_is_waited_for(path: Path, colour: Colour) -> None:
    store = opened(path, colour, timeout=10)

    async def main() -> None:
        await store.peek(scope())
        with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
            other.execute("BEGIN IMMEDIATE")
            timer = threading.Timer(0.1, other.rollback)
            timer.start()
            await win(store)
            timer.join()
        await store.aclose()

    run(colour, main)


@BOTH
def test_a_read_waits_while_a_stranger_has_the_file_for_itself(path: Path, colour: Colour) -> None:
    store = opened(path, colour, timeout=5)

    async def main() -> None:
        await finish(store, await win(store))
        with store._file.writer.lock:
            store._file.drop()
        store._epoch = store._file.epoch  # as if it had been looked at: the read itself is to meet the lock
        with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
            other.execute("PRAGMA locking_mode = EXCLUSIVE")
            other.execute("BEGIN IMMEDIATE")
            timer = threading.Timer(0.1, other.close)
            timer.start()
            record, _ = await store.peek(scope())
            timer.join()
        assert record is not None
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            with store._file.writer.lock:
                store._file.drop()
            store._epoch = store._file.epoch
            other.execute("PRAGMA locking_mode = EXCLUSIVE")
            other.execute("BEGIN IMMEDIATE")
            with hurried(store, 0.1), pytest.raises(StoreUnavailable, match="stayed locked"):
                await store.peek(scope())
        await store.aclose()

    run(colour, main)


# ------------------------------------------------------------------------------------------------ group commit


@contextmanager
def commits_of(store: SqliteStore) -> Iterator[list[str]]:
    """The transactions that the store's writer makes meanwhile."""
    seen: list[str] = []
    db = store._file._writing
    assert db is not None
    db.set_trace_callback(lambda sql: seen.append(sql) if sql == "COMMIT" else None)
    yield seen
    db.set_trace_callback(None)


def test_64_async_callers_share_a_few_commits(path: Path) -> None:
    store = opened(path, "async", timeout=20)

    async def caller(number: int) -> None:
        for turn in range(5):
            await finish(store, await win(store, f"{number}-{turn}"))

    async def main() -> None:
        await store.peek(scope())
        with commits_of(store) as commits:
            await asyncio.gather(*map(caller, range(64)))
        assert len(commits) < 640 / 4
        await store.aclose()

    asyncio.run(main())
    assert raw(path, "SELECT count(*) FROM semel WHERE state = 'done'") == [(320,)]


def queued(store: SqliteStore) -> int:
    return store._file.writer._queue.qsize()


def test_threads_and_loops_that_queue_are_written_in_one_commit(path: Path) -> None:
    sync, other = opened(path, "sync", timeout=20), opened(path, "async", timeout=20)
    run_sync(sync.peek(scope()))
    verdicts: list[Any] = []

    def in_thread(number: int) -> None:
        verdicts.extend(run_sync(sync.claim([ask(f"thread-{number}")])))

    async def in_loop() -> None:
        await other.peek(scope())
        ready.set()
        await asyncio.to_thread(go.wait)
        answers = await asyncio.gather(*(other.claim([ask(f"task-{number}")]) for number in range(20)))
        verdicts.extend(answer for (answer,) in answers)
        await other.aclose()

    ready, go = threading.Event(), threading.Event()
    with commits_of(sync) as commits:
        loop = threading.Thread(target=asyncio.run, args=(in_loop(),))
        loop.start()
        assert ready.wait(10)
        with sync._file.writer.lock:
            go.set()
            threads = [threading.Thread(target=in_thread, args=(number,)) for number in range(20)]
            for thread in threads:
                thread.start()
            # Twenty jobs of threads and one of the loop, whose tasks asked in one tick; the writer thread has taken
            # the first of them off the queue and waits for the lock with it.
            wait_until(lambda: queued(sync) == 20)
        for thread in (*threads, loop):
            thread.join()
        assert commits == ["COMMIT"]
    assert [type(verdict) for verdict in verdicts] == [Won] * 40
    run_sync(sync.aclose())


def test_more_than_a_group_is_written_in_several(path: Path) -> None:
    store = opened(path, "async", timeout=30)

    async def main() -> None:
        await store.peek(scope())
        with commits_of(store) as commits:
            with store._file.writer.lock:
                callers = [asyncio.create_task(store.claim([ask(f"key-{n}")])) for n in range(600)]
                while queued(store) < 4:  # five jobs of 128 at most, of which the writer thread has taken one
                    await asyncio.sleep(0)
            answers = await asyncio.gather(*callers)
        assert len(commits) == 3
        assert all(isinstance(answer, Won) for (answer,) in answers)
        await store.aclose()

    asyncio.run(main())


def test_a_lone_sync_caller_starts_no_thread(store: SqliteStore) -> None:
    before = set(threading.enumerate())
    run_sync(finish(store, run_sync(win(store))))
    assert set(threading.enumerate()) <= before  # one of a test before may end meanwhile


def test_a_cancelled_caller_leaves_its_write_on_the_way(path: Path) -> None:
    store = opened(path, "async", timeout=20)

    async def main() -> None:
        await store.peek(scope())
        with store._file.writer.lock:
            task = asyncio.create_task(store.claim([ask("cancelled")]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await win(store, "next")
        record, _ = await store.peek(scope("cancelled"))
        assert record is not None
        await store.aclose()

    asyncio.run(main())


def test_a_loop_that_ends_with_a_write_on_the_way_harms_nobody(path: Path) -> None:
    store, other = opened(path, "async", timeout=20), opened(path, "sync", timeout=20)
    run_sync(other.peek(scope()))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(store.peek(scope()))
    with other._file.writer.lock:
        task = loop.create_task(store.claim([ask("lonely")]))
        loop.run_until_complete(asyncio.wait([task], timeout=0.05))
        assert not task.done()
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()
    run_sync(win(other, "next"))
    wait_until(lambda: run_sync(other.peek(scope("lonely")))[0] is not None)
    run_sync(other.aclose())


def test_a_thread_that_queues_behind_a_lock_gives_up_in_time(path: Path) -> None:
    store = opened(path, timeout=20)
    run_sync(store.peek(scope()))
    with store._file.writer.lock:
        with hurried(store, 0.2), pytest.raises(StoreUnavailable, match="stayed locked"):
            run_sync(store.claim([ask("late")]))
        late = opened(path, timeout=0.1)
        with pytest.raises(StoreUnavailable, match="stayed locked"):
            run_sync(late.peek(scope()))
    run_sync(win(store, "next"))
    assert run_sync(store.peek(scope("late")))[0] is None, "its caller was told that nothing happened"
    run_sync(store.aclose())


def test_a_task_that_queues_behind_a_lock_gives_up_in_time(path: Path) -> None:
    store = opened(path, "async", timeout=60)

    async def main() -> None:
        await store.peek(scope())
        with store._file.writer.lock, hurried(store, 0.2):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="stayed locked"):
                await store.claim([ask("late")])
            assert time.monotonic() - began < 20
        await win(store, "next")
        assert (await store.peek(scope("late")))[0] is None
        await store.aclose()

    asyncio.run(main())


def test_a_dead_writer_thread_is_replaced(path: Path) -> None:
    store = opened(path, "async", timeout=5)

    async def main() -> None:
        await win(store, "one")
        dead = store._file.writer._thread
        assert dead is not None
        store._file.writer._queue.put(None)
        dead.join()
        await win(store, "two")
        await store.aclose()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------- watching


def test_a_settle_by_a_sync_store_wakes_an_async_one_on_the_same_file(path: Path) -> None:
    sync, other = opened(path), opened(path, "async")
    owner = run_sync(win(sync))

    async def main() -> None:
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        unwatch = await other.watch(owner.scope, wake)
        await asyncio.to_thread(run_sync, finish(sync, owner))
        async with asyncio.timeout(5):
            await woken.wait()
        await unwatch()
        await unwatch()
        await other.aclose()

    asyncio.run(main())
    run_sync(sync.aclose())
    assert beside(path) == {"semel.db"}


def test_a_watcher_that_raises_is_logged_and_disturbs_nobody(
    store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    owner = run_sync(win(store))

    def wake() -> None:
        raise RuntimeError("the watcher is broken")

    run_sync(store.watch(owner.scope, wake))
    with caplog.at_level(logging.ERROR):
        run_sync(finish(store, owner))
    assert "the watcher is broken" in caplog.text
