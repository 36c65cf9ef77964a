"""A claim that a session keeps by name: what it writes, what it leaves of the session, and what happens when the name is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
import pytest

from semel import AsyncSemel, InProgress, Semel
from semel.testing import services
from semel.within import bound
from semel.within.kept import Sessions, Way
from semel.within.postgres import postgres_words

CALLS = 4  # as text, to be kept, and twice by its name
NAME = postgres_words("semel").kept
COLUMNS = (
    "tenant, operation, state, attempts, policy, fingerprint, fingerprint_version, lease_until = settled, expires - settled, tombstone - settled,"
    " not_before, noted, resolved, marker, result, ref, error_type, labels, steps, secret_id, waited"
)


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    """What other tests have seen of sessions is forgotten."""
    fresh = Sessions()
    monkeypatch.setattr(bound, "SESSIONS", fresh)
    return fresh


@pytest.fixture
def place(postgres_server: services.PostgresServer) -> str:
    return postgres_server.database()


class Shop:
    def __init__(self, once: AsyncSemel, connection: Any) -> None:
        self.once = once
        self.connection = connection
        self.calls: list[str] = []
        self.running: list[str] = []

    async def call(self, key: str, **options: Any) -> Any:
        async def effect() -> dict[str, int]:
            self.calls.append(key)
            running = "select state, policy, lease_until - created, result from semel where key = $1"
            self.running.append(str(await self.connection.fetchrow(running, key)))
            return {"n": 1}

        async with self.connection.transaction():
            return await self.once.within(self.connection).execute(key, effect, **options)

    async def kept(self) -> list[str]:
        return [
            row[0]
            for row in await self.connection.fetch(
                "select name from pg_prepared_statements where name ~ '^semel'"
            )
        ]

    async def begin(self, way: Way) -> None:
        """The next claim goes this way."""
        for number in range({Way.TEXT: 0, Way.PREPARE: 1, Way.NAME: 2}[way]):
            await self.call(f"earlier{number}")


@asynccontextmanager
async def shop(place: str, **options: Any) -> AsyncIterator[Shop]:
    connection = await asyncpg.connect(place, **options)
    try:
        async with AsyncSemel(_asyncpg(place), timeout=20) as once:
            await once.peek("tables")
            yield Shop(once, connection)
    finally:
        await connection.close()


WAYS = pytest.mark.parametrize("way", list(Way), ids=lambda way: way.name.lower())


async def test_R27_a_session_keeps_the_claim_from_its_second_call_on(place: str) -> None:
    async with shop(place) as here:
        kept = []
        for number in range(CALLS):
            await here.call(f"k{number}")
            kept.append(await here.kept())
        assert kept == [[], [NAME], [NAME], [NAME]]
        assert here.calls == [f"k{number}" for number in range(CALLS)]
        for number in range(CALLS):
            assert (await here.call(f"k{number}")).replayed
        assert len(here.calls) == CALLS


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"request": {"a": 1}, "retention": 60, "tombstone": 60},
        {"operation": "o'clock \\ é", "labels": {"scene": "it's \\ é"}},
        {"lease": 5.0, "tenant": "t\"e'n"},
    ],
)
async def test_R27_every_way_leaves_the_same_row(place: str, options: dict[str, Any]) -> None:
    async with shop(place) as here:
        for number in range(CALLS):
            assert not (await here.call(f"it's \\ é {number}", **options)).replayed
        rows = await here.connection.fetch(f"select {COLUMNS} from semel order by created")
        assert len(rows) == CALLS
        assert len(set(map(repr, rows))) == 1, rows
        assert len(set(here.running)) == 1, here.running


@WAYS
async def test_R27_a_claim_leaves_lock_timeout_as_it_was(place: str, way: Way) -> None:
    seen: list[str] = []
    async with shop(place) as here:
        once, connection = here.once, here.connection
        await once.execute("done", dict)
        await here.begin(way)

        async def look() -> None:
            seen.append(await connection.fetchval("show lock_timeout"))

        async with connection.transaction():
            await connection.execute("set local lock_timeout = '7s'")
            bound_ = once.within(connection)
            await bound_.execute("new", look, wait=3)
            await look()
            assert (await bound_.execute("done", look)).replayed
            await look()
        assert seen == ["7s"] * 3


@WAYS
async def test_R27_a_key_that_is_taken_over_leaves_lock_timeout_as_it_was(place: str, way: Way) -> None:
    seen: list[str] = []
    async with shop(place) as here:
        connection = here.connection
        await here.once.execute("k", dict)
        await here.begin(way)
        # A run that was released: the row is there, and is claimed by a lock and an update.
        await connection.execute("update semel set state = 'released', expires = now() where key = 'k'")

        async def look() -> None:
            seen.append(await connection.fetchval("show lock_timeout"))

        async with connection.transaction():
            await connection.execute("set local lock_timeout = '7s'")
            assert not (await here.once.within(connection).execute("k", look)).replayed
            await look()
        assert seen == ["7s"] * 2


@WAYS
async def test_R27_a_key_that_another_transaction_holds_is_in_progress_and_the_transaction_is_usable(
    place: str, way: Way
) -> None:
    async with shop(place) as here, shop(place) as other:
        await here.begin(way)
        transaction = other.connection.transaction()
        await transaction.start()
        await other.once.within(other.connection).execute("k", dict)
        connection = here.connection
        async with connection.transaction():
            began = time.monotonic()
            with pytest.raises(InProgress):
                await here.once.within(connection).execute("k", dict)
            assert time.monotonic() - began < 10
            assert await connection.fetchval("select 1") == 1
            assert await connection.fetchval("show lock_timeout") == "0"
            waiting: asyncio.Future[Any] = asyncio.ensure_future(
                here.once.within(connection).execute("k", dict, wait=30)
            )
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await transaction.commit()
            assert (await waiting).replayed
        assert not (await here.call("next")).replayed
        assert (await here.call("next")).replayed


async def test_R27_a_name_that_is_gone_costs_one_claim_a_second_try_and_no_session_is_trusted_again(
    place: str, sessions: Sessions
) -> None:
    async with shop(place) as here:
        for number in range(3):
            await here.call(f"k{number}")
        await here.connection.execute("deallocate all")
        here.connection._drop_local_statement_cache()  # asyncpg's own are gone as well
        for number in range(3, 6):
            assert not (await here.call(f"k{number}")).replayed
        assert here.calls == [f"k{number}" for number in range(6)]
        assert not sessions.trusted
        assert await here.kept() == []
        async with shop(place) as another:
            for number in range(6):
                assert (await another.call(f"k{number}")).replayed
                await another.call(f"another{number}")
            assert await another.kept() == []


async def test_R27_a_name_that_is_taken_is_left_to_its_owner(place: str, sessions: Sessions) -> None:
    async with shop(place) as here:
        await here.connection.execute(f"prepare {NAME} as select 1")
        for number in range(CALLS):
            assert not (await here.call(f"k{number}")).replayed
            assert (await here.call(f"k{number}")).replayed
        assert here.calls == [f"k{number}" for number in range(CALLS)]
        assert sessions.trusted
        assert (await here.connection.fetchrow(f"execute {NAME}"))[0] == 1


async def test_R27_a_session_whose_first_named_claim_failed_goes_on_as_text(
    place: str, sessions: Sessions
) -> None:
    async with shop(place) as here, shop(place) as other:
        await here.begin(Way.PREPARE)
        async with other.connection.transaction():
            await other.once.within(other.connection).execute("k", dict)
            with pytest.raises(InProgress):
                await here.call("k")
        for number in range(3):
            assert not (await here.call(f"k{number}")).replayed
        assert (await here.call("k")).replayed
        assert sessions.trusted


async def test_R27_the_name_means_the_table_that_the_search_path_means(place: str) -> None:
    async with shop(place) as here:
        await here.begin(Way.NAME)
        async with AsyncSemel(_asyncpg(place), table="app.semel") as elsewhere:
            await here.connection.execute("create schema if not exists app")
            await elsewhere.peek("tables")
        await here.call("k")
        await here.connection.execute("set search_path = app")
        assert not (await here.call("k")).replayed
        assert (await here.call("k")).replayed
        for table in ("public.semel", "app.semel"):
            count = await here.connection.fetchval(f"select count(*) from {table} where key = 'k'")
            assert count == 1, table


async def test_R27_the_name_means_a_table_that_was_made_again(place: str) -> None:
    async with shop(place) as here:
        await here.begin(Way.NAME)
        await here.call("k")
        await here.connection.execute("alter table semel rename to old")
        await here.connection.execute("create table semel (like old including all)")
        assert not (await here.call("k")).replayed
        assert await here.connection.fetchval("select count(*) from semel") == 1


async def test_R27_nothing_is_kept_where_the_connection_keeps_no_statements(
    place: str, pgbouncer: services.PgBouncer, sessions: Sessions
) -> None:
    """As behind a pooler in transaction mode, where asyncpg must be told so."""
    url = pgbouncer.through(place)
    async with shop(place) as direct, shop(url, statement_cache_size=0) as here:
        for number in range(CALLS):
            assert not (await here.call(f"k{number}")).replayed
            assert (await here.call(f"k{number}")).replayed
            assert await here.connection.fetch("select name from pg_prepared_statements") == []
        assert await direct.connection.fetchval("select count(*) from semel where state = 'done'") == CALLS
        assert sessions.trusted


async def test_R27_a_connection_of_a_pool_keeps_it_from_one_lending_to_the_next(place: str) -> None:
    async with shop(place) as here, asyncpg.create_pool(place, min_size=1, max_size=1) as pool:
        kept = []
        for number in range(CALLS):
            async with pool.acquire() as connection, connection.transaction():
                await here.once.within(connection).execute(f"k{number}", dict)
                kept.append(
                    await connection.fetchval(
                        "select count(*) from pg_prepared_statements where name = $1", NAME
                    )
                )
        assert kept == [0, 1, 1, 1]


def test_R27_psycopg_is_asked_to_keep_nothing(place: str) -> None:
    with (
        Semel(f"postgresql+psycopg://{place.partition('://')[2]}") as once,
        psycopg.connect(place) as connection,
    ):
        for number in range(CALLS):
            once.within(connection).execute(f"k{number}", dict)
            connection.commit()
        kept = connection.execute("select name from pg_prepared_statements where name ~ '^semel'").fetchall()
        assert kept == []


def test_R27_a_session_that_has_ended_is_forgotten() -> None:
    class Session:
        pass

    sessions, session = Sessions(), Session()
    assert sessions.choose(None, "n") is Way.TEXT
    assert [sessions.choose(session, "n") for _ in range(3)] == [Way.TEXT, Way.PREPARE, Way.TEXT]
    assert [sessions.choose(session, "m") for _ in range(2)] == [Way.TEXT, Way.PREPARE]
    sessions.keeps(session, "m")
    assert sessions.choose(session, "m") is Way.NAME
    assert len(sessions._ways) == 1
    del session
    assert len(sessions._ways) == 0
    sessions.keeps(None, "m")


def _asyncpg(place: str) -> str:
    return f"postgresql+asyncpg://{place.partition('://')[2]}"
