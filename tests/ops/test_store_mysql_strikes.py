"""A signal's handler raises wherever Python looks for signals, one moment after the other: no place in the pool is lost."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from semel.errors import ConfigurationError
from semel.runtime import run_sync
from semel.store import Settings
from semel.stores import mysql, places
from semel.stores.mysql import MysqlStore, pools, session, store
from semel.stores.mysql.pools import Crowded
from semel.stores.mysql.session import Session
from semel.testing import services
from tests.ops.mysql_lab import scope, using
from tests.ops.strike_lab import strike_each_moment

# A coroutine that was made, and struck before it was awaited, is Python's business.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

STRUCK = (pools, places, session, store)
PATIENCE = 30.0  # waited for only by who waits in vain


@pytest.fixture
def url(mariadb_server: services.MariaServer) -> str:
    return mariadb_server.database()


@pytest.fixture
def one(url: str) -> Iterator[MysqlStore]:
    """A store of one connection, which is warm."""
    made = mysql.open_url(f"{url}?pool=1", Settings(timeout=PATIENCE), "sync")
    look(made)
    yield made
    run_sync(made.aclose())


def look(at: MysqlStore) -> None:
    run_sync(at.peek(scope()))


def take(pool: Any, patience: float = PATIENCE) -> Any:
    return run_sync(pool.take(time.monotonic() + patience, fresh=False))


def give(pool: Any, held: Any) -> None:
    run_sync(pool.give(held))


def test_R29_a_place_is_not_lost_when_a_warm_session_is_taken_or_given_back(one: MysqlStore) -> None:
    assert strike_each_moment(STRUCK, lambda: look(one), then=lambda: look(one)) > 15


def test_R29_a_place_is_not_lost_when_a_lost_connection_is_replaced(one: MysqlStore) -> None:
    pool: Any = one._pool

    def look_at_a_lost_one() -> None:
        for idle in pool._stock._idle:
            idle.wire.connection._sock.shutdown(socket.SHUT_RDWR)
        look(one)

    assert strike_each_moment(STRUCK, look_at_a_lost_one, then=lambda: look(one)) > 40


def test_R29_a_place_is_not_lost_when_a_new_connection_is_asked_for(one: MysqlStore) -> None:
    pool: Any = one._pool

    def renew() -> None:
        give(pool, run_sync(pool.take(time.monotonic() + PATIENCE, fresh=True)))

    assert strike_each_moment(STRUCK, renew, then=lambda: look(one)) > 15


def test_R29_a_place_is_not_lost_on_one_who_waits_for_it(one: MysqlStore) -> None:
    pool: Any = one._pool
    held = [take(pool)]

    def wait_in_vain() -> None:
        with pytest.raises(Crowded):
            take(pool, 0.001)

    def give_and_take() -> None:
        give(pool, held.pop())
        held.append(take(pool))

    assert strike_each_moment(STRUCK, wait_in_vain, then=give_and_take) > 5
    give(pool, held.pop())


# ------------------------------------------------------------------------------------------ who waits, and closing


def waiting(pool: Any, got: list[object], *, fresh: bool = False) -> threading.Thread:
    """A thread that waits in the pool's line, for sure."""

    def wait() -> None:
        try:
            got.append(run_sync(pool.take(time.monotonic() + PATIENCE, fresh=fresh)))
        except ConfigurationError as error:
            got.append(error)

    before = len(pool._stock._turns._line)
    thread = threading.Thread(target=wait)
    thread.start()
    while len(pool._stock._turns._line) == before:
        time.sleep(0.001)
    return thread


def test_a_thread_that_waits_is_served_before_one_that_comes_later(one: MysqlStore) -> None:
    pool: Any = one._pool
    got, held = list[Any](), take(pool)
    thread = waiting(pool, got)
    give(pool, held)
    with pytest.raises(Crowded):  # the other's already, whether or not he has run yet
        take(pool, 0.0)
    thread.join(PATIENCE)
    assert got == [held]
    give(pool, held)


def test_a_task_that_waits_is_served_before_one_that_comes_later(url: str) -> None:
    async def body(store: MysqlStore) -> None:
        pool: Any = store._pool
        held = await pool.take(time.monotonic() + PATIENCE, fresh=False)
        first = asyncio.create_task(pool.take(time.monotonic() + PATIENCE, fresh=False))
        await asyncio.sleep(0)  # it waits
        await pool.give(held)
        with pytest.raises(Crowded):  # the other's already, although he has not run yet
            await pool.take(time.monotonic(), fresh=False)
        assert await first is held
        await pool.give(held)

    using("async", f"{url}?pool=1", body)


def test_a_thread_that_waits_for_a_new_connection_gets_one_in_the_place_of_what_it_is_handed(
    one: MysqlStore,
) -> None:
    pool: Any = one._pool
    got, held = list[Any](), take(pool)
    thread = waiting(pool, got, fresh=True)
    give(pool, held)
    thread.join(PATIENCE)
    assert got[0] is not held
    assert got[0].place is held.place
    assert not held.wire.connection.open
    give(pool, got[0])
    look(one)


def test_closing_sends_threads_away_that_wait(one: MysqlStore) -> None:
    pool: Any = one._pool
    got, held = list[Any](), take(pool)
    threads = [waiting(pool, got) for _ in range(3)]
    run_sync(one.aclose())
    for thread in threads:
        thread.join(PATIENCE)
    assert [type(each) for each in got] == [ConfigurationError] * 3
    give(pool, held)
    assert not held.wire.connection.open


def test_a_session_that_comes_back_while_the_pool_is_closed_is_closed(one: MysqlStore) -> None:
    pool: Any = one._pool
    held = take(pool)

    class Closing(list[Session]):
        """The pool is closed, and what is idle swept away, just before it comes back."""

        def append(self, given: Session) -> None:
            run_sync(one.aclose())
            super().append(given)

    pool._stock._idle = Closing()
    give(pool, held)
    assert not held.wire.connection.open


def test_a_session_that_is_found_while_the_pool_is_closed_is_closed(one: MysqlStore) -> None:
    pool: Any = one._pool
    held = take(pool)

    class Closing(list[Session]):
        def pop(self, *_: Any) -> Session:
            pool._stock.closed = True
            return super().pop()

    pool._stock._idle = Closing([held])
    with pytest.raises(ConfigurationError, match="closed"):
        take(pool)
    assert not held.wire.connection.open


def test_a_session_that_another_thread_took_first_is_not_missed(one: MysqlStore) -> None:
    pool: Any = one._pool
    held = take(pool)

    class Raced(list[Session]):
        """Not empty when asked, and empty when it is taken from."""

        def pop(self, *_: Any) -> Session:
            self.clear()
            return super().pop()

    pool._stock._idle = Raced([held])
    with pytest.raises(Crowded):  # its place is the other thread's
        take(pool, 0.0)
    pool._stock._idle = []
    give(pool, held)
    look(one)
