"""The parts under the PostgreSQL store in moments that seldom come: cancelled, raced, refused by the driver itself."""

from __future__ import annotations

import asyncio
import gc
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg import waiting
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from semel.errors import StoreUnavailable
from semel.runtime import run_sync
from semel.stores.connecting import in_time
from semel.stores.places import Places, ThreadTurns
from semel.stores.postgres import psycopg as by_psycopg
from semel.stores.postgres import url as postgres_url
from semel.stores.postgres.asyncpg import AsyncpgLoans, AsyncpgPool
from semel.stores.postgres.errors import Lost, Unfit
from semel.stores.postgres.home import Homes, Pool, ThreadWorld
from semel.stores.postgres.link import NotReached
from semel.stores.postgres.wake import Listening
from semel.stores.sqlalchemy_pool import engine_source
from semel.stores.watchers import Watchers
from semel.testing import services
from semel.testing.proxy import Proxy
from tests.ops.postgres_lab import Lab, lab


@pytest.fixture
def asyncpg_lab(postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, ("asyncpg", "async")) as made:
        yield made


@pytest.fixture
def psycopg_lab(postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, ("psycopg", "sync")) as made:
        yield made


def source_of(here: Lab, url: str = "") -> Any:
    return postgres_url.source(postgres_url.parse(url or here.url, here.colour), here.colour)


def through(proxy: Proxy, here: Lab, server: services.PostgresServer) -> str:
    return here.url.replace(f":{server.port}/", f":{proxy.port}/")


def test_a_listener_that_is_called_off_leaves_no_connection(
    asyncpg_lab: Lab, postgres_server: services.PostgresServer
) -> None:
    with Proxy("127.0.0.1", postgres_server.port) as proxy:

        async def work() -> None:
            source = source_of(asyncpg_lab, through(proxy, asyncpg_lab, postgres_server))
            asked = proxy.stall(match=lambda request: b"LISTEN" in request)
            task = asyncio.create_task(source.listen("x", 30))
            while not asked.fired.is_set():
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            proxy.release()
            async with asyncio.timeout(10):
                while proxy.open_connections:
                    await asyncio.sleep(0.005)

        asyncpg_lab.run(work())


def test_a_goodbye_that_nobody_answers_is_cut_short(
    asyncpg_lab: Lab, postgres_server: services.PostgresServer
) -> None:
    with Proxy("127.0.0.1", postgres_server.port) as proxy:

        async def work() -> None:
            link = await source_of(asyncpg_lab, through(proxy, asyncpg_lab, postgres_server)).open(5)
            proxy.blackhole()
            busy = asyncio.create_task(link.connection.execute("select pg_sleep(30)"))
            await asyncio.sleep(0.05)
            await link.quit()
            assert link.dead
            with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
                await busy

        asyncpg_lab.run(work())


def test_what_a_driver_says_without_a_code_is_told_apart(asyncpg_lab: Lab, psycopg_lab: Lab) -> None:
    async def by_asyncpg() -> None:
        link = await source_of(asyncpg_lab).open(5)
        assert isinstance(link._meaning(ConnectionResetError("gone")), Lost)
        assert isinstance(link._meaning(ValueError("too large for an int8")), Unfit)
        await link.quit()

    async def by_the_other() -> None:
        link = await source_of(psycopg_lab).open(5)
        problem = link._meaning(psycopg.ProgrammingError("too few values"))
        assert isinstance(problem, RuntimeError)
        assert "too few values" in str(problem)

        def gone(*_: object, **__: object) -> None:
            raise ConnectionResetError("gone")

        with pytest.raises(Lost, match="gone"):
            await link._ask(SimpleNamespace(execute=gone), "select 1", ())
        await link.quit()

    asyncpg_lab.run(by_asyncpg())
    psycopg_lab.run(by_the_other())


def test_psycopg_waits_as_gevent_patched_it(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = SimpleNamespace(is_module_patched=lambda name: name == "select")
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    assert by_psycopg._wait_function() is waiting.wait_poll
    monkeypatch.setitem(sys.modules, "gevent.monkey", SimpleNamespace(is_module_patched=lambda _: False))
    assert by_psycopg._wait_function() is waiting.wait


def test_a_link_that_another_thread_took_first_is_not_missed(psycopg_lab: Lab) -> None:
    class Raced(list[Any]):
        """Not empty when asked, and empty when it is taken from."""

        def pop(self, *_: Any) -> Any:
            self.clear()
            return super().pop()

    async def work() -> None:
        pool = Pool(source_of(psycopg_lab), ThreadWorld(), 1)
        pool._idle = Raced([object()])
        assert pool.take_now() is None
        link = await pool.take(time.monotonic() + 5)  # a new one: there is a place for it
        await pool.drop(link)

    run_sync(work())


def test_a_thread_that_waits_for_a_link_is_served_before_one_that_comes_later(psycopg_lab: Lab) -> None:
    async def work() -> None:
        pool, got = Pool(source_of(psycopg_lab), ThreadWorld(), 1), list[Any]()
        turns: Any = pool._turns
        link = await pool.take(time.monotonic() + 5)
        thread = threading.Thread(target=lambda: got.append(run_sync(pool.take(time.monotonic() + 30))))
        thread.start()
        while not turns._line:
            await ThreadWorld().pause(0.001)
        pool.give_now(link)
        assert pool.take_now() is None  # the other's already, whether or not he has run yet
        thread.join(30)
        assert got == [link]
        await pool.drop(link)
        await pool.close()

    run_sync(work())


def test_what_is_handed_over_in_the_moment_that_its_owner_turns_away_is_not_lost() -> None:
    returned = list[str]()
    turns = ThreadTurns[str](lambda: None, returned.append)
    box = queue.SimpleQueue[str]()  # no longer in the line: somebody is on the way with something
    assert turns._leave(box, None) is None  # …and was struck
    box.put("late")
    assert turns._leave(box, None) == "late"
    box.put("late")
    assert turns._leave(box, "found") == "found"
    assert returned == ["late"]


def test_what_nobody_waits_for_any_more_goes_back() -> None:
    returned = list[str]()

    def look() -> str:
        turns._line.clear()  # as the last who waits does, in between
        return "found"

    turns = ThreadTurns[str](look, returned.append)
    turns._line.append(queue.SimpleQueue())
    turns.ring()
    assert returned == ["found"]


def test_a_place_that_is_given_twice_is_one_place() -> None:
    places = Places(1)
    place = places.take()
    assert place is not None
    assert places.take() is None
    places.give(place)
    places.give(place)
    assert places.take() is not None
    assert places.take() is not None, "whoever had it does not have it any more"


def test_two_threads_that_come_first_share_one_home() -> None:
    made: list[object] = []

    class Slow:
        def __init__(self) -> None:
            made.append(self)

        async def close(self) -> None:
            """Nothing is open."""

    homes: Homes[Slow] = Homes("sync", lambda _: Slow())
    first = run_sync(homes.here())
    assert run_sync(homes._settle_in(None)) is first  # who looked before it was there, and asks when it is
    assert made == [first]


def test_a_watcher_that_goes_leaves_the_others_of_its_key() -> None:
    watchers, heard = Watchers(), list[str]()

    def one() -> None:
        heard.append("one")

    def two() -> None:
        heard.append("two")

    watchers.add(b"k", one)
    watchers.add(b"k", two)
    watchers.remove(b"k", one)
    watchers.wake(b"k")
    assert heard == ["two"]


def test_a_listening_thread_may_end_itself() -> None:
    world, ends, ended = ThreadWorld(), list[Any](), threading.Event()
    ready = threading.Event()

    async def work() -> None:
        assert ready.wait(10)
        await ends[0]()  # a thread that waited for itself would wait for ever
        ended.set()

    ends.append(world.spawn(work()))
    ready.set()
    assert ended.wait(10)


class Nowhere:
    """A source that nobody can listen on."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    async def listen(self, channel: str, timeout: float) -> None:
        self.asked.set()
        raise NotReached("nobody is there")


def test_a_listener_that_nobody_waits_for_gives_up_and_one_that_is_closed_never_starts() -> None:
    source: Any = Nowhere()
    listening = Listening(source, ThreadWorld(), "channel", Watchers(), 1.0)
    assert run_sync(listening.ensure(0.05)) is False
    assert source.asked.is_set()
    run_sync(listening.close())
    source.asked.clear()
    run_sync(listening._keep())
    assert not source.asked.is_set()


def test_a_listener_that_is_closed_while_it_tells_what_it_heard_hears_no_more(
    asyncpg_lab: Lab, postgres_server: services.PostgresServer
) -> None:
    async def work() -> None:
        source, watchers, key = source_of(asyncpg_lab, asyncpg_lab.url), Watchers(), b"k" * 32
        listening = Listening(source, ThreadWorld(), "x", watchers, 5)
        told = []

        def wake() -> None:
            told.append(1)
            listening._closed = len(told) == 2  # the first word is that it listens

        watchers.add(key, wake)
        ear = await source.listen("x", 5)
        assert ear is not None
        link = await source.open(5)
        await link.connection.execute(f"NOTIFY x, '{key.hex()}'")
        async with asyncio.timeout(20):
            assert await listening._hear(ear) is False
        assert len(told) == 2
        await ear.quit()
        await link.quit()

    asyncpg_lab.run(work())


def test_a_pool_of_one_connection_gives_none_away_to_listen(postgres_server: services.PostgresServer) -> None:
    async def main() -> None:
        engine = create_async_engine(postgres_server.database(driver="asyncpg"), poolclass=StaticPool)
        assert await engine_source(engine).listen("x", 5) is None
        await engine.dispose()

    asyncio.run(main())


def test_a_pool_that_its_owner_closed_is_not_reached(postgres_server: services.PostgresServer) -> None:
    async def main() -> None:
        pool = await asyncpg.create_pool(postgres_server.database(), min_size=1, max_size=1)
        await pool.close()
        loans = AsyncpgLoans(AsyncpgPool(pool))
        with pytest.raises(NotReached, match="closed"):
            await loans.open(5)

    asyncio.run(main())


def test_a_link_that_an_interrupted_thread_held_is_closed_and_its_place_is_free_again(
    psycopg_lab: Lab, recwarn: pytest.WarningsRecorder
) -> None:
    async def work() -> None:
        pool = Pool(source_of(psycopg_lab), ThreadWorld(), 1)
        link: Any = await pool.take(time.monotonic() + 5)
        pgconn = link.connection.pgconn
        del link  # as a signal's handler that raises does, between two lines; no collection is waited for
        assert pgconn.status == psycopg.pq.ConnStatus.BAD
        again: Any = await pool.take(time.monotonic() + 5)
        await pool.give(again)
        again.connection.pgconn.finish()
        assert pool.take_now() is None  # found dead, and let go
        del again
        gc.collect()
        last = await pool.take(time.monotonic() + 5)
        with pytest.raises(StoreUnavailable, match="pool"):  # one place, neither lost nor given twice
            await pool.take(time.monotonic() + 0.05)
        await pool.give(last)
        await pool.close()

    run_sync(work())
    assert not recwarn.list


def test_a_connection_that_an_interrupted_thread_waited_for_is_closed() -> None:
    class TooLate(BaseException): ...

    made, closed = threading.Event(), threading.Event()

    def ring(*_: object) -> None:
        raise TooLate

    def slow() -> bool:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return made.wait(30)

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(TooLate):
            in_time(slow, 30, late=lambda _: closed.set())
    finally:
        signal.signal(signal.SIGUSR1, before)
    made.set()
    assert closed.wait(30)
