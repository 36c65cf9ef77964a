"""Who waits for SQLite's lock is heard meanwhile: a signal, a time-out. And he waits in SQLite, not by asking as fast as he can."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest

from semel import InProgress, Semel, points
from tests.within.lab import Lab, wait

_LONG = 20.0  # after so long the lock is freed, so that a wait which hears nothing ends as well
_ENOUGH = 10.0


@contextmanager
def held(file: str | Path) -> Iterator[sqlite3.Connection]:
    """Somebody else has the lock."""
    with closing(sqlite3.connect(file, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(_LONG, other.rollback)
        timer.start()
        try:
            yield other
        finally:
            timer.cancel()
            timer.join()


class Struck(BaseException):
    """What a signal's handler raises."""


@contextmanager
def struck_while_it_waits() -> Iterator[None]:
    """By a signal, a moment after the claim was sent: there is no sign from inside of SQLite."""
    sent = threading.Event()

    def strike() -> None:
        if sent.wait(_LONG):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGUSR1)

    def handler(*_: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGUSR1, handler)
    points.listen(lambda name: sent.set() if name == "claim.sent" else None)
    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        sent.set()
        thread.join()
        points.listen(None)
        signal.signal(signal.SIGUSR1, before)


async def timeout_of(tx: Any) -> int:
    return int((await tx.run("PRAGMA busy_timeout"))[0][0])


@pytest.mark.parametrize(
    "lab", ["sqlite3", "session-pysqlite", "connection-pysqlite", "django-sqlite"], indirect=True
)
@pytest.mark.parametrize("begun", [False, True])
async def test_R27_a_signal_is_heard_while_a_sync_caller_waits_for_sqlite(lab: Lab, begun: bool) -> None:
    once, tx = await lab.ready()
    if begun:
        await tx.run(
            "SAVEPOINT mine"
        )  # a transaction that has neither read nor written: the claim itself waits
    with held(lab.place) as other:
        began = time.monotonic()
        with pytest.raises(Struck), struck_while_it_waits():
            once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=inf)
        assert time.monotonic() - began < _ENOUGH
        other.rollback()
        await tx.rollback()
        assert (lab.orders("k1"), lab.records("k1")) == (0, [])
        await tx.begin()
        assert once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=5).value == "made"
        await tx.commit()
    assert (lab.orders("k1"), lab.records("k1")) == (1, ["done"])


@pytest.mark.parametrize("lab", ["session-aiosqlite", "connection-aiosqlite"], indirect=True)
@pytest.mark.parametrize("begun", [False, True])
async def test_R27_a_time_out_is_heard_while_an_async_caller_waits_for_sqlite(lab: Lab, begun: bool) -> None:
    once, tx = await lab.ready()
    if begun:
        await tx.run(
            "SAVEPOINT mine"
        )  # a transaction that has neither read nor written: the claim itself waits
    before = await timeout_of(tx)
    with held(lab.place) as other:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=inf)
        assert time.monotonic() - began < _ENOUGH
        assert await timeout_of(tx) == before
        other.rollback()
        await tx.insert("after")  # the transaction is of use still
        assert (await once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=5)).value == "made"
        if begun:
            await tx.run("RELEASE mine")
        await tx.commit()
    assert (lab.orders("k1"), lab.orders("after"), lab.records("k1")) == (1, 1, ["done"])


@pytest.mark.parametrize("lab", ["sqlite3", "session-pysqlite", "session-aiosqlite"], indirect=True)
async def test_R27_a_wait_of_several_slices_ends_as_it_should(lab: Lab) -> None:
    once, tx = await lab.ready()
    before = await timeout_of(tx)
    with held(lab.place) as other:
        began = time.monotonic()
        with pytest.raises(InProgress):
            await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=0.45))
        assert time.monotonic() - began >= 0.44
        freed = threading.Timer(0.3, other.rollback)
        freed.start()
        assert (
            await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1", wait=_LONG))
        ).value == "made"
        freed.join()
        assert await timeout_of(tx) == before
        await tx.commit()
    assert lab.orders("k1") == 1


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[Semel, sqlite3.Connection, list[str], Path]]:
    """A connection in a deferred transaction, and what it is asked."""
    file = tmp_path / "semel.db"
    with (
        Semel(f"sqlite:///{file}") as once,
        closing(sqlite3.connect(file, isolation_level=None)) as connection,
    ):
        once.create()
        statements: list[str] = []
        connection.execute("CREATE TABLE orders (k TEXT)")
        connection.execute("BEGIN")
        connection.set_trace_callback(statements.append)
        yield once, connection, statements, file


def test_R27_who_has_read_does_not_ask_again_without_a_pause(
    told: tuple[Semel, sqlite3.Connection, list[str], Path],
) -> None:
    once, connection, statements, file = told
    connection.execute("SELECT count(*) FROM orders")
    with held(file), pytest.raises(InProgress):
        once.within(connection).execute("k1", lambda: 1, wait=0.3)
    # SQLite refuses at once who could only wait for ever: the flow's own pauses are what is between two questions.
    assert 1 < sum(sql.startswith("INSERT") for sql in statements) < 40


def test_R27_a_snapshot_that_is_too_old_is_told_at_once(
    told: tuple[Semel, sqlite3.Connection, list[str], Path],
) -> None:
    once, connection, _, file = told
    connection.execute("SELECT count(*) FROM orders")
    with held(file) as other:
        other.execute("INSERT INTO orders VALUES ('theirs')")
        other.commit()
    began = time.monotonic()
    with pytest.raises(sqlite3.OperationalError) as caught:
        once.within(connection).execute("k1", lambda: 1, wait=_LONG)
    assert caught.value.sqlite_errorcode == sqlite3.SQLITE_BUSY_SNAPSHOT
    assert time.monotonic() - began < _ENOUGH


def test_R27_a_claim_that_nobody_is_in_the_way_of_sets_the_limit_once(
    told: tuple[Semel, sqlite3.Connection, list[str], Path],
) -> None:
    once, connection, statements, _ = told
    once.within(connection).execute("k1", lambda: 1, wait=30)
    assert [sql for sql in statements if "busy_timeout" in sql] == [
        "PRAGMA busy_timeout",
        "PRAGMA busy_timeout = 100",
        "PRAGMA busy_timeout = 5000",
    ]
