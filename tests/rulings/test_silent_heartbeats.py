"""R17: a heartbeat that is not answered is sent again. What a silent connection is to a server, a locked file is to SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semel import AsyncSemel, Semel, points
from semel.testing.mutants import planted

LEASE, TIMEOUT = 6.0, 0.5


class Locked:
    """From the first heartbeat on, somebody else holds the file's only write lock, for longer than a heartbeat waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beats = 0
        self._until = 0.0
        self._granted = 0.0
        self._lock: sqlite3.Connection | None = None

    def reached(self, name: str) -> None:
        if name != "renew.sent":
            return
        self.beats += 1
        if self._lock is None:
            lock = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            lock.execute("BEGIN IMMEDIATE")
            self._granted = lease_until(lock)
            self._until = time.monotonic() + 2 * TIMEOUT
            self._lock = lock  # last: the function looks for it from another thread

    def look(self) -> bool | None:
        """Inside of the function: None while it is too early to tell, else whether its lease was renewed before its end."""
        if self._lock is None or time.monotonic() < self._until:
            return None
        if self._lock.in_transaction:
            self._lock.execute("ROLLBACK")
        if lease_until(self._lock) > self._granted:
            return True
        return False if time.time() > self._granted else None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def lease_until(db: sqlite3.Connection) -> float:
    ((found,),) = db.execute("SELECT lease_until FROM semel").fetchall()
    return float(found)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Locked]:
    found = Locked(tmp_path / "semel.db")
    points.listen(found.reached)
    yield found
    points.listen(None)
    found.close()


def sync(locked: Locked) -> bool:
    def work() -> bool:
        while (found := locked.look()) is None:
            time.sleep(0.02)
        return found

    with Semel(f"sqlite:///{locked.path}", lease=LEASE, timeout=TIMEOUT) as once:
        once.create()  # a new file takes its time
        return once.execute("k", work).value


def in_a_loop(locked: Locked) -> bool:
    async def work() -> bool:
        while (found := locked.look()) is None:
            await asyncio.sleep(0.02)
        return found

    async def main() -> bool:
        async with AsyncSemel(f"sqlite:///{locked.path}", lease=LEASE, timeout=TIMEOUT) as once:
            await once.create()
            return (await once.execute("k", work)).value

    return asyncio.run(main())


@pytest.mark.parametrize("run", [sync, in_a_loop])
def test_R17_a_lease_outlives_a_file_that_was_locked_for_longer_than_a_heartbeat_waits(
    locked: Locked, run: Callable[[Locked], bool]
) -> None:
    assert run(locked)
    assert locked.beats > 1


@pytest.mark.parametrize("run", [sync, in_a_loop])
def test_R17_a_heart_that_gives_up_at_one_silence_would_be_seen(
    locked: Locked, run: Callable[[Locked], bool]
) -> None:
    with planted("heart-stops-after-an-error"):
        assert not run(locked)
    assert locked.beats == 1
