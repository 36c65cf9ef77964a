"""The parts under the PostgreSQL store: links of both drivers, the pool, homes, listening; corners of each."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
import pytest

from semel.errors import ConfigurationError, StoreUnavailable
from semel.model import Answer, Busy, Note, Renewal, Won
from semel.runtime import run_sync
from semel.store import Settings, adopt
from semel.stores.postgres import PostgresStore
from semel.stores.postgres import asyncpg as asyncpg_links
from semel.stores.postgres import url as postgres_url
from semel.stores.postgres.asyncpg import AsyncpgLoans, AsyncpgPool, AsyncpgSource
from semel.stores.postgres.errors import Clash, Late, Locked, Lost, Trouble, Unfit, refused
from semel.stores.postgres.home import Gate, LoopWorld, Pool, ThreadWorld
from semel.stores.postgres.link import Link, NotReached, Source
from semel.testing import services
from semel.testing.proxy import Proxy
from tests.ops.postgres_lab import IDS, KINDS, Lab, ask_for, database_of, end_of, lab, scope_of


@pytest.fixture(params=KINDS, ids=IDS)
def here(request: pytest.FixtureRequest, postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, request.param) as made:
        yield made


def source_of(here: Lab, url: str = "") -> Source:
    return postgres_url.source(postgres_url.parse(url or here.url, here.colour), here.colour)


def soon() -> float:
    return time.monotonic() + 5


# ------------------------------------------------------------------------------------------------------- links


def test_a_link_tells_its_troubles_apart(here: Lab, postgres_server: services.PostgresServer) -> None:
    async def work() -> None:
        link = await source_of(here).open(5)
        assert not link.dead
        assert link.greeted > 0
        assert await link.fetch("select 1", (), 5)
        await link.script("do $$begin raise warning 'of something else than replication'; end$$", 5)
        assert await link.fetch("select 1", (), 5)
        for sql, args, kind in (
            ("select 1 / 0", (), Unfit),
            ("select $1::text", ("a\0b",), Unfit),
            ("select $1::text", ("\udc80",), Unfit),
            ("select $1::smallint", (1 << 70,), Unfit),
            ("do $$begin raise exception using errcode = '55P03'; end$$", (), Locked),
            ("do $$begin raise exception using errcode = '40001'; end$$", (), Clash),
            ("selekt", (), RuntimeError),
            ("select pg_sleep(5)", (), Late),
        ):
            with pytest.raises(kind):
                await link.fetch(sql, args, 0.2 if kind is Late else 5)
        link.cut()
        assert link.dead
        with pytest.raises((Lost, Late)):
            await link.fetch("select 1", (), 5)
        link.cut()
        await link.quit()
        other = await source_of(here).open(5)
        with pytest.raises(Late):
            await other.script("select pg_sleep(5)", 0.2)
        other.cut()
        third = await source_of(here).open(5)
        postgres_server.terminate_connections(database=database_of(here.url))
        with pytest.raises(Lost):
            await third.script("select 1", 5)
        await third.quit()

    here.run(work())


def test_a_link_of_our_own_that_is_given_back_is_over(here: Lab) -> None:
    async def work() -> None:
        source = source_of(here)
        link = await source.open(5)
        await source.back(link)
        with pytest.raises(Lost):
            await link.script("select 1", 5)

    here.run(work())


def test_a_misuse_of_the_driver_is_not_taken_for_a_broken_connection(
    postgres_server: services.PostgresServer,
) -> None:
    """Two statements at once on one link would be a mistake of ours: it must not look like an outage."""
    with lab(postgres_server, ("asyncpg", "async")) as here:

        async def work() -> None:
            link = await source_of(here).open(5)
            first = asyncio.create_task(link.fetch("select pg_sleep(0.3)", (), 5))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="asyncpg refused"):
                await link.fetch("select 1", (), 5)
            await first
            await link.quit()

        here.run(work())


def test_an_ear_that_cannot_listen_is_closed(here: Lab, postgres_server: services.PostgresServer) -> None:
    with Proxy("127.0.0.1", postgres_server.port) as proxy:
        url = here.url.replace(f":{postgres_server.port}/", f":{proxy.port}/")

        async def work() -> None:
            proxy.swallow_reply(match=lambda request: b"isten" in request.lower())
            with pytest.raises((NotReached, Trouble)):
                await source_of(here, url).listen("x", 2)
            proxy.stall(match=lambda request: b"isten" in request.lower())
            with pytest.raises((NotReached, Trouble)):
                await source_of(here, url).listen("x", 0.3)

        here.run(work())


def test_an_ear_notices_a_dead_silence(here: Lab, postgres_server: services.PostgresServer) -> None:
    with Proxy("127.0.0.1", postgres_server.port) as proxy:
        url = here.url.replace(f":{postgres_server.port}/", f":{proxy.port}/")

        async def work() -> None:
            ear = await source_of(here, url).listen("x", 5)
            assert ear is not None
            assert await ear.hear(0.05) == []
            proxy.blackhole()
            with pytest.raises(Lost):
                await ear.hear(0.05)
            ear.stop()
            with pytest.raises(Lost):
                await ear.hear(0.05)
            await ear.quit()

        here.run(work())


def test_a_wrong_option_of_the_driver_is_a_configuration_error(here: Lab) -> None:
    store = here.open(options="?sslmode=sometimes")
    with pytest.raises((ConfigurationError, StoreUnavailable), match=r"sslmode|wrong"):
        here.claim(store, ask_for("k"))


def test_several_hosts_are_tried_in_turn(here: Lab, postgres_server: services.PostgresServer) -> None:
    url = here.url.replace("@127.0.0.1", "@127.0.0.1:1,127.0.0.1")
    store = here.open(url=url)
    here.finish(store, "k")


# -------------------------------------------------------------------------------------------------------- pool


def world_of(here: Lab) -> Any:
    return ThreadWorld() if here.colour == "sync" else LoopWorld()


def test_a_pool_gives_warm_links_and_replaces_dead_ones(here: Lab) -> None:
    async def work() -> None:
        pool = Pool(source_of(here), world_of(here), 2)
        assert pool.take_now() is None
        first = await pool.take(soon())
        second = await pool.take(soon())
        with pytest.raises(StoreUnavailable, match="pool"):
            await pool.take(time.monotonic() + 0.05)
        await pool.give(first)
        assert pool.take_now() is first
        await pool.give(first)
        first.cut()
        assert pool.take_now() is None  # dead, and taken out
        await pool.give(second)
        second.cut()
        third = await pool.take(soon())
        assert third not in {first, second}
        third.cut()
        await pool.give(third)  # not kept
        fourth = await pool.take(soon())
        await pool.close()
        pool.give_now(fourth)  # came back late: closed
        assert fourth.dead
        fifth = await pool.take(soon())
        await pool.give(fifth)
        assert fifth.dead

    here.run(work())


def test_waiters_for_a_link_get_their_turn_also_when_one_of_them_gives_up() -> None:
    async def work() -> None:
        gate = Gate(LoopWorld())
        place = await gate.take(1)
        assert place is not None
        waiting = [asyncio.create_task(gate.take(5)) for _ in range(4)]
        await asyncio.sleep(0)
        waiting[1].cancel()  # while it waits
        await asyncio.sleep(0)
        gate.give(place)
        waiting[0].cancel()  # when it has just been called
        place = await waiting[2]
        assert place is not None
        assert await gate.take(0.01) is None
        gate.give(place)
        assert await waiting[3] is not None
        done = await asyncio.gather(*waiting[:2], return_exceptions=True)
        assert all(isinstance(found, asyncio.CancelledError) for found in done)

    asyncio.run(work())


def test_who_gets_a_place_in_the_moment_that_time_is_over_has_it() -> None:
    async def work() -> None:
        gate = Gate(LoopWorld())
        place = await gate.take(1)
        assert place is not None
        waiting = asyncio.create_task(gate.take(0))
        await asyncio.sleep(0)  # it waits, and the end of its time is the next thing that the loop does
        gate.give(place)
        assert await waiting is not None
        assert await gate.take(0) is None

    asyncio.run(work())


@pytest.mark.parametrize("here", KINDS[:2], ids=IDS[:2], indirect=True)
def test_who_waits_for_a_link_is_served_before_who_comes_later(here: Lab) -> None:
    async def work() -> None:
        pool = Pool(source_of(here), LoopWorld(), 1)
        link = await pool.take(soon())
        waiting = asyncio.create_task(pool.take(soon()))
        await asyncio.sleep(0)
        pool.give_now(link)
        assert pool.take_now() is None  # it is the waiter's already, although he has not run yet
        assert await waiting is link
        late = asyncio.create_task(pool.take(soon()))
        await asyncio.sleep(0)
        late.cancel()
        pool.give_now(link)  # called off, and not yet gone
        assert pool.take_now() is link
        with pytest.raises(asyncio.CancelledError):
            await late
        called = asyncio.create_task(pool.take(soon()))
        await asyncio.sleep(0)
        pool.give_now(link)
        called.cancel()  # in the moment that it got it
        with pytest.raises(asyncio.CancelledError):
            await called
        assert pool.take_now() is link
        await pool.drop(link)
        await pool.close()

    here.run(work())


def test_a_flag_is_waited_for_in_time(here: Lab) -> None:
    async def work() -> None:
        flag = world_of(here).flag()
        assert not await flag.wait(0.01)
        flag.set()
        assert await flag.wait(1)

    here.run(work())


def test_a_flag_is_seen_by_all_who_wait_and_by_nobody_once_it_is_down() -> None:
    flag, seen = ThreadWorld().flag(), SimpleQueue[bool]()
    threads = [Thread(target=lambda: seen.put(run_sync(flag.wait(30))), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    flag.set()  # also for who has not sat down yet
    assert [seen.get(timeout=30) for _ in threads] == [True] * 3
    for thread in threads:
        thread.join(30)
    flag.clear()
    assert not run_sync(flag.wait(0))
    flag.set()
    assert run_sync(flag.wait(0))


def test_the_gate_of_first_use_is_left_in_time(here: Lab) -> None:
    store = here.open(Settings(timeout=0.2))

    async def work() -> None:
        home = await store._talk.homes.here()
        place = await home.gate.take(1)
        assert place is not None
        with pytest.raises(StoreUnavailable, match="in time"):
            await store.claim([ask_for("k")])
        home.gate.give(place)
        (verdict,) = await store.claim([ask_for("k")])
        assert isinstance(verdict, Won)

    here.run(work())


class Flaky:
    """A source whose links fail as told, then work: what happens between two statements cannot be timed otherwise."""

    def __init__(self, inner: Source, failures: list[Exception]) -> None:
        self._inner = inner
        self._failures = failures
        self.spares = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open(self, timeout: float) -> Link:
        link = await self._inner.open(timeout)
        return _FlakyLink(link, self._failures)


class _FlakyLink:
    def __init__(self, inner: Link, failures: list[Exception]) -> None:
        self._inner = inner
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def fetch(self, sql: str, args: Any, timeout: float) -> Any:
        if self._failures:
            raise self._failures.pop(0)
        return await self._inner.fetch(sql, args, timeout)


def test_what_is_lost_twice_is_unavailable_and_a_clash_is_repeated(here: Lab) -> None:
    failures: list[Exception] = []
    store = here.open(Settings(timeout=1.0))
    store._talk.source = Flaky(store._talk.source, failures)

    async def work() -> None:
        home = await store._talk.homes.here()
        home.pool._source = store._talk.source
        (verdict,) = await store.claim([ask_for("k")])
        assert isinstance(verdict, Won)
        failures.extend([Lost("once"), Lost("twice")])
        with pytest.raises(StoreUnavailable, match="twice"):
            await store.peek(scope_of("k"))
        failures.extend([Clash("once"), Clash("twice")])
        assert (await store.peek(scope_of("k")))[0] is not None
        failures.extend([Clash("again")] * 100_000)
        with pytest.raises(StoreUnavailable, match="again"):
            await store.peek(scope_of("k"))
        failures.clear()
        store._talk._unreplicated = True
        failures.append(Locked("the barrier"))
        with pytest.raises(StoreUnavailable):
            await store.peek(scope_of("k"))
        assert (await store.peek(scope_of("k")))[0] is not None
        assert not store._talk._unreplicated

    here.run(work())


def test_a_first_look_that_fails_is_repeated_or_told(here: Lab) -> None:
    failures: list[Exception] = []
    store = here.open(Settings(timeout=1.0))
    store._talk.source = Flaky(store._talk.source, failures)

    async def work() -> None:
        home = await store._talk.homes.here()
        home.pool._source = store._talk.source
        failures.append(Locked("by somebody"))
        with pytest.raises(StoreUnavailable, match="locked"):
            await store.claim([ask_for("k")])
        failures.extend([Clash("again")] * 100_000)
        with pytest.raises(StoreUnavailable, match="again"):
            await store.claim([ask_for("k")])
        failures.clear()
        failures.extend([Clash("once"), Lost("once")])
        ask = ask_for("k")
        (verdict,) = await store.claim([ask])
        assert isinstance(verdict, Won)
        home.pool.drop_idle()
        failures.append(Lost("the note, or its answer"))
        assert await store.note(Note(ask.scope, ask.nonce, b"step")) is Answer.OK
        record, _ = await store.peek(ask.scope)
        assert record is not None
        assert record.steps == b"step"

    here.run(work())


def test_a_stale_plan_is_another_connections_business() -> None:
    class Stale(Exception):
        sqlstate = "0A000"

    told = refused(Stale("cached plan must not change result type"), "here")
    assert isinstance(told, Lost)


# ------------------------------------------------------------------------------------------------ corners of claim


def test_a_key_that_others_keep_taking_is_busy_in_the_end(here: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody is always faster: the claim ends in time, as busy."""
    store = here.open(Settings(timeout=1.0))
    here.begin(store, "lapsed", lease=0.0)
    taken = []

    async def never(changes: Any, deadline: float) -> list[bool]:
        taken.append(deadline)
        left = (
            deadline - time.monotonic() if len(taken) > 3 else 0.0
        )  # the last time it takes all that is left
        await asyncio.sleep(left) if here.colour == "async" else time.sleep(max(0.0, left))
        return [False] * len(changes)

    monkeypatch.setattr(store, "_swap", never)
    (verdict,) = here.claim(store, ask_for("lapsed"))
    assert verdict == Busy(0.05, 0)
    assert len(taken) > 3


def commit_when_waited_for(server: services.PostgresServer, rival: psycopg.Connection[Any]) -> None:
    sql = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
    deadline = time.monotonic() + 5
    while server.execute(sql) == [(0,)] and time.monotonic() < deadline:
        time.sleep(0.001)
    rival.commit()


def test_a_key_inserted_between_snapshot_and_insert_is_asked_for_again(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    """A rival's commit while our insert waits for it: the statement finds nothing and inserts nothing."""
    store = here.open(Settings(timeout=5))
    here.finish(store, "warm")
    plain = here.url.replace("+asyncpg", "").replace("+psycopg", "")
    columns = "scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint_version"
    values = "%s, 't', 'o', 'k', 'running', 'n', 1, 1, 'retry', 1, now(), now(), now() + interval '1 minute'"
    insert = f"insert into semel ({columns}, created, updated, lease_until) values ({values})"
    for number in range(3):
        with psycopg.connect(plain) as rival:
            rival.execute(insert.encode(), (scope_of(f"k{number}").hash,))
            thread = Thread(target=commit_when_waited_for, args=(postgres_server, rival))
            thread.start()
            asks = [ask_for(f"k{number}")] if number < 2 else [ask_for(f"k{number}"), ask_for("other")]
            verdicts = here.claim(store, *asks)
            thread.join()
        assert isinstance(verdicts[0], Busy)


def test_settling_what_changed_meanwhile_is_decided_again(here: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    store = here.open()
    ask = here.begin(store, "k", lease=0.0)
    real = store._swap
    seen: list[int] = []

    async def late(changes: Any, deadline: float) -> list[bool | None]:
        seen.append(1)
        return [False] if len(seen) == 1 else await real(changes, deadline)

    monkeypatch.setattr(store, "_swap", late)
    answer = here.settle(store, end_of(ask, actor="me", reason="r"))
    assert answer == [Answer.OK]
    assert len(seen) == 2


# --------------------------------------------------------------------------------------------------------- pools


def test_a_pool_that_makes_its_own_connection_data_is_polled(
    postgres_server: services.PostgresServer,
) -> None:
    url = postgres_server.database()
    with psycopg_pool.ConnectionPool(lambda: url, min_size=1, max_size=2) as pool:
        store = adopt(pool, Settings(), "sync")

        async def work() -> None:
            await store.claim([ask_for("k")])
            unwatch = await store.watch(scope_of("k"), lambda: None)
            await unwatch()

        run_sync(work())
        assert not store.capabilities.notifies
        run_sync(store.aclose())


def test_an_asyncpg_without_a_way_to_one_more_connection_is_polled(
    postgres_server: services.PostgresServer,
) -> None:
    url = postgres_server.database()

    class Closed:
        """A pool of another asyncpg, which keeps this to itself."""

        def __init__(self, pool: Any) -> None:
            self.acquire, self.release, self.get_max_size = pool.acquire, pool.release, pool.get_max_size

    async def work() -> None:
        async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
            store = PostgresStore(AsyncpgLoans(AsyncpgPool(Closed(pool))), Settings())
            await store.claim([ask_for("k")])
            unwatch = await store.watch(scope_of("k"), lambda: None)
            assert not store.capabilities.notifies
            await unwatch()
            await store.aclose()

    asyncio.run(work())


def test_a_caller_cancelled_while_it_connects_leaves_no_unread_error(
    postgres_server: services.PostgresServer,
) -> None:
    source = AsyncpgSource(postgres_server.database(), "here", server_settings={}, prepares=None)
    complaints: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(str(told)))
        for ticks in range(12):  # in one of these asyncpg has a socket and has not asked for TLS yet
            opening = asyncio.ensure_future(source.open(5))
            for _ in range(ticks):
                await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        while asyncpg_links._opening:  # they go on without their callers, and are closed
            await asyncio.wait(tuple(asyncpg_links._opening))
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(work())
    assert complaints == []


def test_asyncpg_asks_nobody_about_types(
    postgres_server: services.PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its look-up turns the compiler off for a session, which behind a pooler is somebody else's."""
    asked: list[object] = []
    look_up = asyncpg.Connection._introspect_types  # type: ignore[attr-defined]  # its own

    async def seen(self: Any, types: Any, timeout: Any) -> Any:
        asked.append(types)
        return await look_up(self, types, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", seen)
    with lab(postgres_server, ("asyncpg", "async")) as here:
        store = here.open()
        keys = [f"k{at}" for at in range(3)]
        asks = [ask_for(keys[0], labels={"a": "b"}), *(ask_for(key) for key in keys[1:])]
        assert all(isinstance(verdict, Won) for verdict in here.claim(store, *asks))
        renewals = [Renewal(ask.scope, ask.nonce, 20.0, 50.0) for ask in asks]
        assert here.run(store.renew(renewals)) == [Answer.OK] * 3
        assert here.settle(store, *(end_of(ask, result=b"r", ref="r") for ask in asks)) == [Answer.OK] * 3
        assert here.run(store.purge(10)) == 0
        found, _ = here.run(store.peek(asks[0].scope))
        assert found is not None
        assert found.labels == {"a": "b"}
        assert not asked
        here.run(_looked_up(here))
        assert asked


async def _looked_up(here: Lab) -> None:
    """That it would be seen."""
    connection = await asyncpg.connect(here.url.replace("+asyncpg", ""))
    assert await connection.fetch("select $1::bytea[]", [b"x"])
    await connection.close()


def test_what_asyncpg_stumbles_over_when_its_time_is_over_is_no_answer(
    postgres_server: services.PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog cuts the connection in the very turn of the loop in which a statement was prepared."""
    prepare = asyncpg.Connection._get_statement  # type: ignore[attr-defined]  # its own
    cuts: list[str] = []

    async def cut(self: Any, sql: str, *args: Any, **options: Any) -> Any:
        statement = await prepare(self, sql, *args, **options)
        if cuts:
            watchdog = asyncpg_links._watchdogs[asyncio.get_running_loop()]
            for link in watchdog._busy:
                link.until = 0.0
            cuts.clear()
            watchdog._look()
        return statement

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", cut)
    with lab(postgres_server, ("asyncpg", "async")) as here:
        store = here.open(url=f"{here.url}?prepared=0")
        here.finish(store, "warm")
        cuts.append("now")
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            here.claim(store, ask_for("k"))
        assert isinstance(here.claim(store, ask_for("k"))[0], Won | Busy)


def test_what_is_wrong_with_the_arguments_of_a_statement_is_told_as_it_is(
    postgres_server: services.PostgresServer,
) -> None:
    async def work() -> None:
        link = await AsyncpgSource(url, "here", server_settings={}, prepares=True).open(5)
        with pytest.raises(TypeError, match="iterable"):
            await link.fetch("select 1", 5, 5)  # type: ignore[arg-type]  # that is the mistake
        await link.quit()

    url = postgres_server.database().replace("+psycopg", "").replace("+asyncpg", "")
    asyncio.run(work())
