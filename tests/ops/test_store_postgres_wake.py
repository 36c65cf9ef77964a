"""Wake-ups through PostgreSQL, pools that somebody hands in, and PgBouncer."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import asyncpg
import psycopg
import psycopg_pool
import pytest

from semel.errors import ConfigurationError, StoreUnavailable
from semel.model import Answer, Ask, Busy, Kind, Replay, Won
from semel.runtime import run_sync
from semel.store import Settings, adopt
from semel.stores import postgres
from semel.stores.postgres import PostgresStore
from semel.stores.watchers import Watchers
from semel.testing import services
from tests.ops.postgres_lab import IDS, KINDS, Lab, ask_for, database_of, end_of, lab, rows, scope_of


@pytest.fixture(params=KINDS, ids=IDS)
def here(request: pytest.FixtureRequest, postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, request.param) as made:
        yield made


def listeners(server: services.PostgresServer, url: str) -> int:
    sql = f"select count(*) from pg_stat_activity where datname = '{database_of(url)}' and query ilike 'listen%'"
    found: int = server.execute(sql)[0][0]
    return found


class Bell:
    """A wake function that can be waited for, in either colour."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.count = 0
        self.at = 0.0

    def __call__(self) -> None:
        self.count += 1
        self.at = time.perf_counter()
        self.event.set()

    async def rung(self, here: Lab, timeout: float = 5.0) -> bool:
        if here.colour == "sync":
            return self.event.wait(timeout)
        return await asyncio.to_thread(self.event.wait, timeout)


def elsewhere(here: Lab, work: Callable[[PostgresStore], Any]) -> None:
    """The same from another process's point of view: a store of its own, in a thread of its own."""

    def act() -> None:
        store = postgres.open_url(here.url.replace("+asyncpg", "+psycopg"), Settings(timeout=20), "sync")
        run_sync(work(store))
        run_sync(store.aclose())

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


# --------------------------------------------------------------------------------------------------- wake-ups


def test_a_settle_elsewhere_wakes_the_waiter(here: Lab, postgres_server: services.PostgresServer) -> None:
    store = here.open()
    ask = here.begin(store, "k")

    async def wait() -> None:
        bell = Bell()
        unwatch = await store.watch(ask.scope, bell)
        bell.event.clear()
        assert rows(postgres_server, here.url, "select waited from semel") == [(True,)]
        assert listeners(postgres_server, here.url) == 1
        elsewhere(here, lambda other: other.settle([end_of(ask)]))
        assert await bell.rung(here)
        await unwatch()
        await unwatch()

    here.run(wait())


@pytest.mark.parametrize("kind", [Kind.RELEASED, Kind.FORGOTTEN, Kind.FAILED])
def test_every_way_to_end_a_run_wakes(here: Lab, kind: Kind) -> None:
    store = here.open()
    ask = here.begin(store, "k", lease=0.0 if kind is Kind.FORGOTTEN else 10.0)
    actor = "me" if kind is Kind.FORGOTTEN else ""

    async def wait() -> None:
        bell = Bell()
        unwatch = await store.watch(ask.scope, bell)
        bell.event.clear()
        elsewhere(here, lambda other: other.settle([end_of(ask, kind, actor=actor)]))
        assert await bell.rung(here)
        await unwatch()

    here.run(wait())


def test_a_batch_wakes_the_waiters_of_its_marked_rows_only(here: Lab) -> None:
    store = here.open()
    asks = [here.begin(store, f"k{number}") for number in range(4)]

    async def wait() -> None:
        bells = [Bell(), Bell()]
        for bell, ask in zip(bells, asks, strict=False):
            await store.watch(ask.scope, bell)
        for bell in bells:
            bell.event.clear()
        elsewhere(here, lambda other: other.settle([end_of(ask) for ask in asks[1:]]))
        assert await bells[1].rung(here)
        assert not bells[0].event.is_set()

    here.run(wait())


def test_a_settle_in_the_same_process_wakes_without_the_server(here: Lab) -> None:
    store = here.open(options="?pgbouncer=1")
    assert not store.capabilities.notifies
    ask = here.begin(store, "k")

    async def wait() -> None:
        bell = Bell()
        unwatch = await store.watch(ask.scope, bell)
        await store.settle([end_of(ask)])
        assert bell.event.is_set()
        await unwatch()

    here.run(wait())


def test_a_row_that_nobody_waits_for_sends_nothing(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    plain = here.url.replace("+asyncpg", "").replace("+psycopg", "")
    with psycopg.connect(plain, autocommit=True) as session:
        session.execute("listen semel")
        here.finish(store, "quiet")
        asks = [here.begin(store, f"k{number}") for number in range(3)]
        here.settle(store, *map(end_of, asks))
        rows(postgres_server, here.url, "notify semel, 'end'")
        heard = list(session.notifies(timeout=5, stop_after=1))
    assert [note.payload for note in heard] == ["end"]


def test_words_of_strangers_on_the_channel_are_ignored(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    ask = here.begin(store, "k")

    async def wait() -> None:
        bell = Bell()
        await store.watch(ask.scope, bell)
        bell.event.clear()
        rows(postgres_server, here.url, "notify semel, 'not a scope'")
        elsewhere(here, lambda other: other.settle([end_of(ask)]))
        assert await bell.rung(here)

    here.run(wait())


def test_a_waiter_of_a_row_that_was_made_again_is_marked_again(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    ask = here.begin(store, "k", lease=0.0)

    async def wait() -> None:
        bell = Bell()
        await store.watch(ask.scope, bell)
        elsewhere(here, lambda other: other.settle([end_of(ask, Kind.FORGOTTEN)]))
        again = ask_for("k")
        elsewhere(here, lambda other: other.claim([again]))
        assert rows(postgres_server, here.url, "select waited from semel") == [(False,)]
        (verdict,) = await store.claim([ask_for("k")])
        assert isinstance(verdict, Busy)
        assert rows(postgres_server, here.url, "select waited from semel") == [(True,)]
        bell.event.clear()
        elsewhere(here, lambda other: other.settle([end_of(again)]))
        assert await bell.rung(here)

    here.run(wait())


def test_a_lost_listener_comes_back_and_wakes_everybody(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    ask = here.begin(store, "k")

    async def wait() -> None:
        bell = Bell()
        await store.watch(ask.scope, bell)
        bell.event.clear()
        postgres_server.terminate_connections(database=database_of(here.url))
        assert await bell.rung(here)
        deadline = time.monotonic() + 5
        while listeners(postgres_server, here.url) != 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01) if here.colour == "async" else time.sleep(0.01)
        bell.event.clear()
        elsewhere(here, lambda other: other.settle([end_of(ask)]))
        assert await bell.rung(here)

    here.run(wait())


def test_a_server_that_is_away_for_a_while_wakes_the_waiter_when_it_is_back(here: Lab) -> None:
    driver = "asyncpg" if "asyncpg" in here.url else "psycopg"
    with services.postgres() as server, lab(server, (driver, here.colour)) as there:
        store = there.open()
        ask = there.begin(store, "k")

        async def wait() -> None:
            bell = Bell()
            await store.watch(ask.scope, bell)
            bell.event.clear()
            server.kill()
            assert await bell.rung(there)
            bell.event.clear()
            server.restart()
            deadline = time.monotonic() + 10
            while listeners(server, there.url) != 1:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02) if there.colour == "async" else time.sleep(0.02)
            assert await bell.rung(there)
            (verdict,) = await store.claim(
                [ask_for("k")]
            )  # what a woken waiter does; the mark was lost in the crash
            assert isinstance(verdict, Busy)
            bell.event.clear()
            elsewhere(there, lambda other: other.settle([end_of(ask)]))
            assert await bell.rung(there)

        there.run(wait())


def test_the_listening_connection_is_given_up_when_nobody_waits(
    here: Lab, postgres_server: services.PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.stores.postgres.wake._IDLE", 0.1)
    store = here.open()
    ask = here.begin(store, "k")

    async def wait() -> None:
        for _ in range(2):
            bell = Bell()
            unwatch = await store.watch(ask.scope, bell)
            assert listeners(postgres_server, here.url) == 1
            bell.event.clear()
            rows(postgres_server, here.url, f"notify semel, '{ask.scope.hex}'")
            assert await bell.rung(here)
            await unwatch()
            deadline = time.monotonic() + 5
            sql = f"select count(*) from pg_stat_activity where datname = '{database_of(here.url)}'"
            while postgres_server.execute(sql)[0][0] > 1:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01) if here.colour == "async" else time.sleep(0.01)

    here.run(wait())


def test_a_mark_on_a_locked_row_is_a_wake_up(here: Lab) -> None:
    store = here.open()
    ask = here.begin(store, "k")
    plain = here.url.replace("+asyncpg", "").replace("+psycopg", "")

    async def wait() -> None:
        bell = Bell()
        with psycopg.connect(plain) as session:
            session.execute("select from semel for update")
            await store.watch(ask.scope, bell)
            session.rollback()
        assert bell.event.is_set()

    here.run(wait())


def test_watching_an_unreachable_server_raises_and_leaves_no_watcher(here: Lab) -> None:
    store = here.open(
        Settings(timeout=0.3), url=here.url.replace(here.url.split("@")[1].split("/")[0], "127.0.0.1:1")
    )

    async def wait() -> None:
        with pytest.raises(StoreUnavailable):
            await store.watch(ask_for("k").scope, lambda: None)

    here.run(wait())
    assert not store._talk.watchers


SETTLER = """
    import asyncio, sys, time
    from semel.keys import make_scope
    from semel.model import Kind, Settle
    from semel.store import Settings
    from semel.stores import postgres

    async def main(url):
        store = postgres.open_url(url, Settings(timeout=20), "async")
        print("ready", flush=True)
        for line in sys.stdin:
            key, nonce = line.split()
            await store.settle([Settle(make_scope("semel", "tenant", "operation", key), bytes.fromhex(nonce), Kind.DONE, 100.0)])
            print("settled", flush=True)
        await store.aclose()

    asyncio.run(main(sys.argv[1]))
"""


@contextmanager
def settler(url: str) -> Iterator[Callable[[Ask], None]]:
    """Another process that settles what it is told."""
    command = [sys.executable, "-c", textwrap.dedent(SETTLER), url.replace("+psycopg", "+asyncpg")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        told = child.stdin
        try:
            assert child.stdout.readline() == "ready\n"
            yield lambda ask: print(ask.scope.key, ask.nonce.hex(), file=told, flush=True)
            told.close()
            assert child.wait(10) == 0
        finally:
            child.kill()


def test_waiters_in_another_process_wake_within_milliseconds(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    store = here.open()
    here.finish(store, "warm")
    spans: list[float] = []

    async def wait(ask: Ask, settle: Callable[[Ask], None]) -> None:
        bell = Bell()
        unwatch = await store.watch(ask.scope, bell)
        bell.event.clear()
        began = time.perf_counter()
        settle(ask)
        assert await bell.rung(here)
        spans.append(bell.at - began)
        await unwatch()

    trips: list[float] = []
    with settler(here.url) as settle:
        for number in range(30):
            here.run(wait(here.begin(store, f"k{number}"), settle))
            began = time.perf_counter()
            here.run(store.peek(scope_of("warm")))
            trips.append(time.perf_counter() - began)
    assert listeners(postgres_server, here.url) == 1
    # Includes the pipe to the child and its commit. A loaded machine gets a margin, and more where a look takes longer.
    assert statistics.median(spans) < max(0.05, 10 * statistics.median(trips))


def test_a_watcher_may_come_and_go_from_any_thread() -> None:
    watchers = Watchers()
    rung: list[int] = []
    watchers.add(b"a", lambda: rung.append(1))
    watchers.add(b"b", lambda: rung.append(2))
    watchers.wake_hex("61")
    watchers.wake_hex("zz")
    watchers.wake(b"c")
    watchers.remove(b"c", lambda: None)
    assert rung == [1]
    watchers.wake_all()
    assert rung == [1, 1, 2]
    assert b"a" in watchers


# -------------------------------------------------------------------------------------------- pools handed in


def both_ways(store: PostgresStore) -> Any:
    async def use() -> None:
        ask = ask_for("k")
        (verdict,) = await store.claim([ask])
        assert isinstance(verdict, Won)
        more = [ask_for(f"m{number}") for number in range(5)]
        assert all(isinstance(verdict, Won) for verdict in await store.claim(more))
        bell = Bell()
        unwatch = await store.watch(ask.scope, bell)
        assert await store.settle([end_of(ask)]) == [Answer.OK]
        assert bell.event.is_set()
        await unwatch()
        (verdict,) = await store.claim([ask_for("k")])
        assert isinstance(verdict, Replay)
        await store.aclose()

    return use()


@pytest.mark.parametrize("size", [1, 4])
def test_an_asyncpg_pool_is_used_and_left_as_it_was(
    postgres_server: services.PostgresServer, size: int
) -> None:
    url = postgres_server.database()

    async def use() -> None:
        async with asyncpg.create_pool(url, min_size=1, max_size=size) as pool:
            store = adopt(pool, Settings(timeout=20), "async")
            assert isinstance(store, PostgresStore)
            await both_ways(store)
            assert store.capabilities.notifies
            assert await pool.fetchval("select 1") == 1
            postgres_server.terminate_connections(database=database_of(url))
            (verdict,) = await store.claim([ask_for("k")])
            assert isinstance(verdict, Replay)
            await store.aclose()
            assert pool.get_size() == pool.get_idle_size()

    asyncio.run(use())


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("autocommit", [True, False])
def test_a_psycopg_pool_is_used_and_left_as_it_was(
    postgres_server: services.PostgresServer, size: int, autocommit: bool
) -> None:
    url = postgres_server.database()
    with psycopg_pool.ConnectionPool(
        url,
        min_size=1,
        max_size=size,
        kwargs={"autocommit": autocommit, "row_factory": psycopg.rows.dict_row},
    ) as pool:
        store = adopt(pool, Settings(timeout=20), "sync")
        assert isinstance(store, PostgresStore)
        run_sync(both_ways(store))
        with pool.connection() as connection:
            assert connection.autocommit is autocommit
            assert "wait" not in vars(connection)
            found: Any = connection.execute("select 1 as one").fetchone()
            assert found == {"one": 1}
        postgres_server.terminate_connections(database=database_of(url))
        (verdict,) = run_sync(store.claim([ask_for("k")]))
        assert isinstance(verdict, Replay)
        run_sync(store.aclose())


@pytest.mark.parametrize("size", [1, 4])
def test_an_async_psycopg_pool_is_used_and_left_as_it_was(
    postgres_server: services.PostgresServer, size: int
) -> None:
    url = postgres_server.database()

    async def use() -> None:
        async with psycopg_pool.AsyncConnectionPool(url, min_size=1, max_size=size, open=False) as pool:
            store = adopt(pool, Settings(timeout=20), "async")
            assert isinstance(store, PostgresStore)
            await both_ways(store)
            async with pool.connection() as connection:
                assert not connection.autocommit
                assert "wait" not in vars(connection)

    asyncio.run(use())


def test_a_pool_that_has_nothing_to_give_is_unavailable(postgres_server: services.PostgresServer) -> None:
    url = postgres_server.database()
    with psycopg_pool.ConnectionPool(url, min_size=1, max_size=1) as pool:
        store = adopt(pool, Settings(timeout=0.3), "sync")
        with pool.connection(), pytest.raises(StoreUnavailable):
            run_sync(store.claim([ask_for("k")]))
    with pytest.raises(StoreUnavailable):
        run_sync(store.claim([ask_for("k")]))


def test_what_is_no_pool_or_of_the_other_colour_is_refused(postgres_server: services.PostgresServer) -> None:
    with (
        psycopg.connect(postgres_server.url) as connection,
        pytest.raises(ConfigurationError, match="within"),
    ):
        adopt(connection, Settings(timeout=20), "sync")
    pool = psycopg_pool.ConnectionPool(postgres_server.url, open=False)
    with pytest.raises(ConfigurationError, match="works with Semel only"):
        adopt(pool, Settings(timeout=20), "async")


# ---------------------------------------------------------------------------------------------------- PgBouncer


@pytest.mark.parametrize("options", ["", "?pgbouncer=1"])
@pytest.mark.parametrize("driver, colour", KINDS, ids=IDS)
def test_pgbouncer_in_transaction_mode_is_noticed_and_works(
    postgres_server: services.PostgresServer,
    pgbouncer: services.PgBouncer,
    driver: str,
    colour: Literal["sync", "async"],
    options: str,
) -> None:
    url = pgbouncer.through(postgres_server.database(driver=driver))
    here = Lab(url, colour)
    try:
        stores = [here.open(options=options) for _ in range(3)]

        async def use() -> None:
            for number in range(20):
                asks = [ask_for(f"{number}-{part}") for part in range(3)]
                for store in stores:
                    (verdict,) = await store.claim(asks[:1])
                    assert isinstance(verdict, Won if store is stores[0] else Won | Busy)
                verdicts = await stores[1].claim(asks)
                assert [type(verdict) for verdict in verdicts] == [Won, Won, Won]
                assert await stores[2].settle([end_of(ask) for ask in asks]) == [Answer.OK] * 3
            unwatch = await stores[0].watch(ask_for("0-0").scope, lambda: None)
            await unwatch()

        here.run(use())
        assert not stores[0].capabilities.notifies
        facts = here.run(stores[0].facts())
        assert any("pooler" in warning for warning in facts.warnings)
        sql = f"select count(*) from pg_stat_activity where datname = '{database_of(url)}' and query ilike 'listen%'"
        assert postgres_server.execute(sql) == [(0,)]
    finally:
        here.close()


def test_a_pool_behind_pgbouncer_is_not_listened_on(
    postgres_server: services.PostgresServer, pgbouncer: services.PgBouncer
) -> None:
    url = pgbouncer.through(postgres_server.database())
    with psycopg_pool.ConnectionPool(url, min_size=1, max_size=3, kwargs={"prepare_threshold": None}) as pool:
        store = adopt(pool, Settings(timeout=20), "sync")
        run_sync(both_ways(store))  # type: ignore[arg-type]  # a store of psycopg, here
        assert not store.capabilities.notifies
