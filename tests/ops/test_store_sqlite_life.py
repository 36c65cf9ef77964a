"""How an SQLite store lives and dies: kills, forks, loops, garbage, exits. Nothing acknowledged is lost, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvloop

from semel.errors import StoreUnavailable
from semel.model import Replay
from semel.runtime import run_sync
from semel.stores.sqlite import file as sqlite_file
from tests.ops.sqlite_lab import (
    BOTH,
    Colour,
    ask,
    beside,
    finish,
    opened,
    outcome_of,
    python,
    raw,
    run,
    scope,
    win,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "semel.db"


# ----------------------------------------------------------------------------------------------------------- kills

STORM = """
import asyncio, os, sys
from semel.keys import make_scope
from semel.model import Answer, Ask, Kind, Settle, Won
from semel.store import Settings, open_store
store = open_store(f"sqlite:///{sys.argv[1]}", Settings(timeout=20), "async")
tag = sys.argv[2]

async def caller(number):
    turn = 0
    while True:
        turn += 1
        key = f"{tag}-{number}-{turn}"
        ask = Ask(make_scope("semel", "acme", "op", key), os.urandom(16), 60.0, 600.0)
        (verdict,) = await store.claim([ask])
        assert isinstance(verdict, Won), verdict
        os.write(1, f"claimed {key}\\n".encode())
        (answer,) = await store.settle([Settle(ask.scope, ask.nonce, Kind.DONE, 600.0, result=key.encode())])
        assert answer is Answer.OK, answer
        os.write(1, f"done {key}\\n".encode())

async def main():
    await asyncio.gather(*(caller(number) for number in range(64)))

asyncio.run(main())
"""


def test_a_kill_in_the_middle_of_group_commits_loses_nothing_acknowledged(path: Path) -> None:
    acked: dict[str, set[str]] = {"claimed": set(), "done": set()}
    for tag in range(4):
        process = python(STORM, str(path), str(tag))
        assert process.stdout is not None
        for count, line in enumerate(process.stdout):
            word, key = line.split()
            acked[word].add(key)
            if count == 300 + 37 * tag:
                process.send_signal(signal.SIGKILL)
                break
        # What was written before the kill is in the pipe; a torn last line was not read by anybody.
        rest = process.stdout.read().splitlines(keepends=True)
        for line in rest:
            if line.endswith("\n"):
                word, key = line.split()
                acked[word].add(key)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    states = dict(raw(path, "SELECT key, state FROM semel"))
    results = dict(raw(path, "SELECT key, result FROM semel WHERE state = 'done'"))
    assert len(acked["done"]) > 400
    assert acked["claimed"] <= states.keys()
    assert {key for key in acked["done"] if results.get(key) != key.encode()} == set()
    assert raw(path, "PRAGMA integrity_check") == [("ok",)]


# ----------------------------------------------------------------------------------------------------------- forks

FORK = """
import os, subprocess, sys, threading
from semel.keys import make_scope
from semel.model import Answer, Ask, Kind, Settle, Won
from semel.runtime import run_sync
from semel.store import Settings, open_store
store = open_store(f"sqlite:///{sys.argv[1]}", Settings(timeout=5), "sync")

def once(key):
    ask = Ask(make_scope("semel", "acme", "op", key), os.urandom(16), 60.0, 600.0)
    assert isinstance(run_sync(store.claim([ask]))[0], Won)
    assert run_sync(store.settle([Settle(ask.scope, ask.nonce, Kind.DONE, 600.0)])) == [Answer.OK]

once("parent-1")
wake_read, wake = os.pipe()
done_read, done = os.pipe()
child = os.fork()
if child == 0:
    once("child-1")
    os.write(done, b"x")
    os.read(wake_read, 1)
    once("child-2")
    run_sync(store.aclose())
    os._exit(0)
once("parent-2")
os.read(done_read, 1)
run_sync(store.aclose())
# Somebody else comes and goes: were the child's locks only its parent's, this one would now drop the log.
subprocess.run([sys.executable, "-c", "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); "
                "db.execute('SELECT count(*) FROM semel').fetchall(); db.close()", sys.argv[1]], check=True)
os.write(wake, b"x")
_, status = os.waitpid(child, 0)
assert status == 0, status
"""


def test_R29_a_child_after_a_fork_has_locks_of_its_own_and_loses_nothing(path: Path) -> None:
    outcome_of(python(FORK, str(path)))
    keys = raw(path, "SELECT key FROM semel WHERE state = 'done' ORDER BY key")
    assert keys == [("child-1",), ("child-2",), ("parent-1",), ("parent-2",)]
    assert beside(path) == {"semel.db"}


THREADED_FORK = """
import asyncio, os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what this is about
from semel.keys import make_scope
from semel.model import Answer, Ask, Kind, Settle, Won
from semel.store import Settings, open_store
store = open_store(f"sqlite:///{sys.argv[1]}", Settings(timeout=10), "async")
stop = threading.Event()

async def once(key):
    ask = Ask(make_scope("semel", "acme", "op", key), os.urandom(16), 60.0, 600.0)
    assert isinstance((await store.claim([ask]))[0], Won)
    assert await store.settle([Settle(ask.scope, ask.nonce, Kind.DONE, 600.0)]) == [Answer.OK]

async def busy(started):
    turn = 0
    while not stop.is_set():
        turn += 1
        await asyncio.gather(*(once(f"busy-{turn}-{n}") for n in range(16)))
        started.set()
    await store.aclose()

# Not in asyncio's debug mode, which -X dev switches on: on a busy machine it writes of slow callbacks.
started = threading.Event()
thread = threading.Thread(target=lambda: asyncio.run(busy(started), debug=False))
thread.start()
started.wait(20)
for number in range(8):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(once(f"child-{number}"), debug=False)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
stop.set()
thread.join()
"""


def test_R29_a_fork_in_the_middle_of_writes_harms_neither_side(path: Path) -> None:
    outcome_of(python(THREADED_FORK, str(path)))
    assert raw(path, "SELECT count(*) FROM semel WHERE key LIKE 'child-%' AND state = 'done'") == [(8,)]
    assert raw(path, "SELECT count(*) FROM semel WHERE state <> 'done'") == [(0,)]
    assert raw(path, "PRAGMA integrity_check") == [("ok",)]


def _hold(lock: threading.RLock, busy: threading.Event, free: threading.Event) -> None:
    with lock:
        busy.set()
        assert free.wait(10)


def test_what_cannot_be_closed_before_a_fork_is_left_to_the_parent(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(path)
    run_sync(win(store))
    monkeypatch.setattr(sqlite_file, "_LAST_WORDS", 0.01)
    file = store._file
    connection = file._writing
    assert connection is not None
    with file.writer.lock:  # a write that does not end
        file.before_fork()
        file.after_fork_in_parent()
        busy, free = threading.Event(), threading.Event()
        reader = threading.Thread(target=_hold, args=(file._mutex, busy, free))
        reader.start()
        assert busy.wait(10)
        file.before_fork()  # somebody borrows a connection and does not come to an end
        file.after_fork_in_parent()
        free.set()
        reader.join()
        assert file._writing is connection
        assert file.writer.lock.locked()
        file.before_fork()
    file.after_fork_in_child()
    assert file._idle == []
    kept = sqlite_file._inherited.pop()
    assert connection in kept  # type: ignore[operator]  # what a fork keeps is nobody's to read, and declared as an object
    connection.close()
    for reader in kept[1]:  # type: ignore[index]  # what a fork keeps is nobody's to read, and declared as an object
        reader.close()
    run_sync(finish(store, run_sync(win(store, "again"))))
    run_sync(store.aclose())


# ------------------------------------------------------------------------------------------------- closing cleanly


@BOTH
def test_the_last_close_leaves_one_file(path: Path, colour: Colour) -> None:
    first, second = opened(path, colour), opened(path, colour)

    async def main() -> None:
        await finish(first, await win(first))
        await second.claim([ask()])
        await first.aclose()
        await first.aclose()
        assert f"{path.name}-wal" in beside(path), "another store uses it"
        (verdict,) = await second.claim([ask()])
        assert isinstance(verdict, Replay)
        with pytest.raises(StoreUnavailable, match="is closed: open a new one"):
            await first.peek(scope())
        await second.aclose()

    run(colour, main)
    assert beside(path) == {"semel.db"}


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_R29_a_store_that_nobody_closes_is_closed_with_its_loop(
    path: Path, runner: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    store = opened(path, "async")

    async def main(key: str) -> None:
        await finish(store, await win(store, key))

    for turn in range(3):
        runner(main(f"key-{turn}"))
        assert beside(path) == {"semel.db"}
    assert raw(path, "SELECT count(*) FROM semel WHERE state = 'done'") == [(3,)]


def test_a_loop_that_ends_does_not_disturb_another_one(path: Path) -> None:
    store = opened(path, "async", timeout=10)
    go, ended = threading.Event(), threading.Event()

    async def short() -> None:
        await win(store, "short")
        go.set()

    async def lasting() -> None:
        await asyncio.to_thread(go.wait)
        for turn in range(20):
            await finish(store, await win(store, f"lasting-{turn}"))
            if turn == 5:
                await asyncio.to_thread(ended.wait)
        await store.aclose()

    thread = threading.Thread(target=asyncio.run, args=(lasting(),))
    thread.start()
    asyncio.run(short())
    ended.set()
    thread.join()
    assert raw(path, "SELECT count(*) FROM semel WHERE state = 'done'") == [(20,)]
    assert beside(path) == {"semel.db"}


@BOTH
def test_a_store_that_nobody_closes_is_closed_when_it_is_collected(path: Path, colour: Colour) -> None:
    before = set(threading.enumerate())

    def use() -> None:
        store = opened(path, colour)
        loop = asyncio.new_event_loop()

        async def main() -> None:
            await finish(store, await win(store))

        if colour == "sync":
            run_sync(main())
        else:
            loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        assert f"{path.name}-wal" in beside(path)

    use()
    gc.collect()
    until = time.monotonic() + 10
    while (set(threading.enumerate()) - before or beside(path) != {"semel.db"}) and time.monotonic() < until:
        time.sleep(0.001)
    assert beside(path) == {"semel.db"}
    assert set(threading.enumerate()) <= before  # one of a test before may end meanwhile


def test_a_store_collected_while_its_loop_goes_on_is_closed_too(path: Path) -> None:
    async def use() -> None:
        store = opened(path, "async")
        await finish(store, await win(store))

    async def main() -> None:
        await use()
        gc.collect()
        until = time.monotonic() + 10
        while beside(path) != {"semel.db"} and time.monotonic() < until:
            await asyncio.sleep(0.001)
        assert beside(path) == {"semel.db"}

    asyncio.run(main())


def test_a_close_that_finds_the_writer_stuck_gives_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(path)
    run_sync(win(store))
    monkeypatch.setattr(sqlite_file, "_LAST_WORDS", 0.01)
    with store._file.writer.lock:
        store._file.shut()
        assert store._file._writing is not None
    run_sync(store.aclose())
    assert beside(path) == {"semel.db"}


EXIT = """
import asyncio, os, sys, threading
from semel.keys import make_scope
from semel.model import Ask, Won
from semel.runtime import run_sync
from semel.store import Settings, open_store
store = open_store(f"sqlite:///{sys.argv[1]}", Settings(), sys.argv[2])
def ask():
    return Ask(make_scope("semel", "acme", "op", os.urandom(8).hex()), os.urandom(16), 60.0, 600.0)
async def main():
    verdicts = await asyncio.gather(*(store.claim([ask()]) for _ in range(10)))
    assert all(isinstance(verdict, Won) for (verdict,) in verdicts)
if sys.argv[2] == "async":
    loop = asyncio.new_event_loop()
    loop.slow_callback_duration = 60  # -X dev is its debug mode too, in which a busy machine is told of slow callbacks
    loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
else:
    threads = [threading.Thread(target=lambda: run_sync(store.claim([ask()]))) for _ in range(10)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


@BOTH
def test_a_program_that_ends_without_closing_leaves_one_file_and_no_warning(
    path: Path, colour: Colour
) -> None:
    outcome_of(python(EXIT, str(path), colour))
    assert beside(path) == {"semel.db"}
    assert raw(path, "SELECT count(*) FROM semel") == [(10,)]


def test_ended_threads_leave_no_connections_behind(path: Path) -> None:
    store = opened(path, timeout=20)
    run_sync(finish(store, run_sync(win(store))))
    gate = threading.Barrier(16)

    def look() -> None:
        gate.wait()
        for _ in range(20):
            assert isinstance(run_sync(store.claim([ask()]))[0], Replay)

    threads = [threading.Thread(target=look) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file = store._file
    assert not file._lent
    assert 1 <= len(file._idle) <= 16, "as many as ever read at once, whatever thread it was"
    run_sync(store.aclose())
    assert beside(path) == {"semel.db"}


def test_a_close_waits_for_what_is_queued(path: Path) -> None:
    store = opened(path, "async", timeout=20)

    async def main() -> None:
        await store.peek(scope())
        with store._file.writer.lock:
            claim = asyncio.create_task(store.claim([ask("queued")]))
            while not store._file.writer._queue.qsize() and store._file.writer._thread is None:
                await asyncio.sleep(0)
            close = asyncio.create_task(store.aclose())
            await asyncio.sleep(0.05)
            assert not close.done()
        await close
        await claim

    asyncio.run(main())
    assert raw(path, "SELECT key FROM semel") == [("queued",)]
    assert beside(path) == {"semel.db"}


# --------------------------------------------------------------------------------------------------------- the log


def test_the_log_is_moved_into_the_file_and_overwritten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "CHECKPOINT", 300_000)
    store = opened(path)
    sizes = []
    for n in range(100):
        run_sync(finish(store, run_sync(win(store, f"key-{n}"))))
        sizes.append(Path(f"{path}-wal").stat().st_size)
    assert 300_000 <= sizes[-1] < 400_000
    assert len(set(sizes[40:])) < 10, "it grows only when it is full"
    assert path.stat().st_size > 20_000
    run_sync(store.aclose())


def test_a_log_that_has_become_large_is_cut(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "LOG_LIMIT", 1 << 20)
    store = opened(path)
    store._file._log_limit = 1 << 20
    for n in range(10):
        run_sync(finish(store, run_sync(win(store, f"key-{n}")), result=b"x" * 400_000))
        assert Path(f"{path}-wal").stat().st_size < 2 << 20
    run_sync(store.aclose())


def test_a_reader_that_stays_does_not_stop_the_writers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "LOG_LIMIT", 100_000)
    store = opened(path)
    run_sync(win(store, "first"))
    store._file._log_limit = 100_000
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM semel").fetchall()
        asked: list[str] = []
        db = store._file._writing
        assert db is not None
        db.set_trace_callback(asked.append)
        for n in range(20):
            run_sync(finish(store, run_sync(win(store, f"key-{n}")), result=b"x" * 20_000))
        db.set_trace_callback(None)
        assert 0 < sum("wal_checkpoint" in sql for sql in asked) < 10, "each waits for the reader, 250 ms"
        assert Path(f"{path}-wal").stat().st_size > 400_000, "what a reader may still need is kept"
    assert store._file._log_limit > 100_000
    for n in range(40):
        run_sync(finish(store, run_sync(win(store, f"more-{n}")), result=b"x" * 20_000))
    assert Path(f"{path}-wal").stat().st_size < 400_000
    run_sync(store.aclose())


def test_trouble_with_a_checkpoint_does_not_undo_what_was_answered(path: Path) -> None:
    store = opened(path)
    owner = run_sync(win(store))
    file = store._file
    file._log_full = 0
    assert file._writing is not None
    file._writing.set_authorizer(
        lambda action, first, *_: (
            sqlite3.SQLITE_DENY
            if action == sqlite3.SQLITE_PRAGMA and first == "wal_checkpoint"
            else sqlite3.SQLITE_OK
        )
    )
    run_sync(finish(store, owner))
    assert file._writing is None, "a connection that met trouble is not kept"
    assert isinstance(run_sync(store.claim([ask()]))[0], Replay)
    run_sync(store.aclose())


def test_two_paths_to_one_file_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    first, second = opened(tmp_path / "semel.db"), opened(tmp_path / "link" / "semel.db")
    assert first._file is second._file
