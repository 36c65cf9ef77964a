"""R27: what within() refuses, with the remedy, and what it leaves as it was."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from semel import AsyncSemel, ConfigurationError, Semel
from semel.runtime import run_sync
from tests.within.lab import Lab, wait

# ------------------------------------------------------------------------------------------ autocommit


DRIVERS = ("sqlite3", "psycopg", "pymysql", "asyncpg", "psycopg-async", "asyncmy")


@pytest.fixture(params=DRIVERS, name="bare")
def _bare(make: Any, request: pytest.FixtureRequest) -> Lab:
    """A driver's own connection."""
    lab: Lab = make(request.param)
    return lab


async def test_R27_autocommit_is_refused_on_drivers(bare: Lab) -> None:
    lab = bare
    once = lab.face()
    target = await _autocommit(lab)
    ran: list[int] = []
    with pytest.raises(ConfigurationError, match=r"autocommit.*[Bb]egin|autocommit.*transaction\(\)|BEGIN"):
        await wait(once.within(target).execute("k1", lambda: ran.append(1)))
    assert not ran
    await _shut(lab, target)


async def _shut(lab: Lab, target: Any) -> None:
    await (target.ensure_closed() if lab.driver == "asyncmy" else wait(target.close()))


async def _autocommit(lab: Lab) -> Any:
    if lab.driver == "sqlite3":
        return sqlite3.connect(lab.place, isolation_level=None)
    if lab.driver == "pymysql":
        import pymysql

        return pymysql.connect(**lab.mysql_place(), autocommit=True)
    if lab.driver == "asyncmy":
        import asyncmy

        return await asyncmy.connect(**lab.mysql_place(), autocommit=True)
    if lab.driver == "asyncpg":
        import asyncpg

        return await asyncpg.connect(lab.place)
    import psycopg

    if lab.driver == "psycopg":
        return psycopg.connect(lab.place, autocommit=True)
    return await psycopg.AsyncConnection.connect(lab.place, autocommit=True)


async def test_R27_an_explicit_transaction_on_an_autocommit_connection_is_one(bare: Lab) -> None:
    lab = bare
    once = lab.face()
    await wait(once.peek("warm-up"))
    target = await _autocommit(lab)
    if lab.driver in ("asyncpg", "psycopg-async"):
        async with target.transaction():
            outcome = await once.within(target).execute("k1", _async_one)
    elif lab.driver == "psycopg":
        with target.transaction():
            outcome = once.within(target).execute("k1", lambda: 1)
    elif lab.driver == "sqlite3":
        target.execute("BEGIN")
        outcome = once.within(target).execute("k1", lambda: 1)
        target.execute("COMMIT")
    else:
        await wait(target.begin())
        outcome = await wait(once.within(target).execute("k1", lambda: 1))
        await wait(target.commit())
    assert (outcome.value, outcome.replayed) == (1, False)
    assert lab.records("k1") == ["done"]
    await _shut(lab, target)


async def test_R27_a_commit_by_the_function_is_seen_in_autocommit_too(bare: Lab) -> None:
    lab = bare
    once = lab.face()
    await wait(once.peek("warm-up"))
    target = await _autocommit(lab)
    commit = (
        target.execute if lab.driver in ("sqlite3", "asyncpg", "psycopg", "psycopg-async") else target.query
    )
    await wait(commit("BEGIN"))

    async def commits() -> None:
        await wait(commit("COMMIT"))

    def commits_sync() -> None:
        commit("COMMIT")

    fn = commits_sync if lab.colour == "sync" else commits
    with pytest.raises(ConfigurationError, match="ended the transaction"):
        await wait(once.within(target).execute("k1", fn))
    assert lab.records("k1") == ["running"]
    await _shut(lab, target)


async def _async_one() -> int:
    return 1


@pytest.mark.parametrize("driver", ["session-pysqlite", "session-psycopg", "session-pymysql"])
def test_R27_autocommit_is_refused_on_sqlalchemy(make: Any, driver: str) -> None:
    lab: Lab = make(driver)
    name = driver.partition("-")[2]
    rest = lab.place.partition("://")[2] if "://" in lab.place else f"/{lab.place}"
    engine = create_engine(f"{lab.dialect}+{name}://{rest}", isolation_level="AUTOCOMMIT")
    once = lab.face()
    with Session(engine) as session, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        once.within(session).execute("k1", lambda: 1)
    per_connection = create_engine(f"{lab.dialect}+{name}://{rest}")
    with (
        per_connection.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(ConfigurationError, match="AUTOCOMMIT"),
    ):
        once.within(connection).execute("k1", lambda: 1)
    once.close()
    engine.dispose()
    per_connection.dispose()


@pytest.mark.parametrize(
    "driver", ["session-aiosqlite", "session-asyncpg", "session-asyncmy", "session-psycopg-async"]
)
async def test_R27_autocommit_is_refused_on_async_sqlalchemy(make: Any, driver: str) -> None:
    lab: Lab = make(driver)
    name = driver.removeprefix("session-").removesuffix("-async")
    rest = lab.place.partition("://")[2] if "://" in lab.place else f"/{lab.place}"
    engine = create_async_engine(f"{lab.dialect}+{name}://{rest}", isolation_level="AUTOCOMMIT")
    once = lab.face()
    async with AsyncSession(engine) as session:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            await once.within(session).execute("k1", _async_one)
    await once.close()
    await engine.dispose()


@pytest.mark.parametrize("driver", ["django-sqlite", "django-postgresql", "django-mysql"])
def test_R27_django_outside_atomic_is_refused(make: Any, driver: str) -> None:
    from django.db import connections

    lab: Lab = make(driver)
    once = lab.face()
    connection = connections[lab.django_alias()]
    with pytest.raises(ConfigurationError, match=r"atomic\(\)"):
        once.within(connection).execute("k1", lambda: 1)
    connection.close()
    once.close()


def test_R27_djangos_proxy_is_the_current_connection(make: Any) -> None:
    from django.db import connections, transaction
    from django.utils.connection import ConnectionProxy

    lab: Lab = make("django-postgresql")
    alias = lab.django_alias()
    once = lab.face()
    with transaction.atomic(using=alias):
        assert once.within(ConnectionProxy(connections, alias)).execute("k1", lambda: 1).value == 1
    assert lab.records("k1") == ["done"]
    connections[alias].close()
    once.close()


# -------------------------------------------------------------------------------------------- the face


def test_R27_the_right_face_is_named(tmp_path: Path) -> None:
    once = Semel(f"sqlite:///{tmp_path / 'a.db'}")
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(ConfigurationError, match="use AsyncSemel"):
        once.within(AsyncSession(engine))
    with pytest.raises(ConfigurationError, match=r"cannot use a builtins\.dict.*Session"):
        once.within({})
    once.close()


async def test_R27_the_right_face_is_named_for_async(tmp_path: Path) -> None:
    once = AsyncSemel(f"sqlite:///{tmp_path / 'a.db'}")
    connection = sqlite3.connect(":memory:")
    with pytest.raises(ConfigurationError, match="use Semel"):
        once.within(connection)
    connection.close()
    await once.close()


def test_R27_records_in_another_kind_of_store_are_refused(tmp_path: Path) -> None:
    once = Semel("memory://")
    connection = sqlite3.connect(tmp_path / "a.db")
    with pytest.raises(ConfigurationError, match="two records"):
        once.within(connection).execute("k1", lambda: 1)
    connection.close()
    once.close()


def test_R27_a_coroutine_function_on_the_sync_face_is_refused(make: Any) -> None:
    lab: Lab = make("sqlite3")
    once = lab.face()
    connection = sqlite3.connect(lab.place)
    with pytest.raises(ConfigurationError, match="AsyncSemel"):
        once.within(connection).execute("k1", _async_one)
    connection.close()
    once.close()


async def test_R27_a_plain_function_runs_in_the_loop(make: Any) -> None:
    import threading

    lab: Lab = make("asyncpg")
    once, tx = await lab.ready()
    outcome = await once.within(tx.target).execute("k1", threading.get_ident)
    assert outcome.value == threading.get_ident()
    await lab.close()


def test_R27_switched_off_runs_unprotected(make: Any) -> None:
    lab: Lab = make("sqlite3")
    with pytest.warns(UserWarning, match="switched off"):
        once = lab.face(enabled=False)
    connection = sqlite3.connect(lab.place)
    assert [once.within(connection).execute("k1", lambda: 1).replayed for _ in range(2)] == [False, False]
    connection.close()
    once.close()


# ---------------------------------------------------------------------------------------------- tables


async def test_R27_missing_tables_are_told_and_leave_the_transaction_usable(fresh_lab: Lab) -> None:
    lab = fresh_lab
    once = lab.face(create=False)
    tx = await lab.tx()
    await tx.insert("before")
    with pytest.raises(ConfigurationError) as caught:
        await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    assert re.search(r"create\(\).*semel schema sql", str(caught.value)) or "schema sql" in str(caught.value)
    await tx.insert("after")
    await tx.commit()
    assert (lab.orders("before"), lab.orders("after"), lab.orders("k1")) == (1, 1, 0)


async def test_R27_tables_are_made_on_first_use_on_a_connection_of_our_own(fresh_lab: Lab) -> None:
    lab = fresh_lab
    once = lab.face()
    tx = await lab.tx()
    outcome = await wait(once.within(tx.target).execute("k1", lab.work(tx), "k1"))
    assert not outcome.replayed
    await tx.rollback()
    assert lab.records("k1") == [], "the tables stay, though the caller rolled back"


async def test_R27_another_database_without_tables_is_told(make: Any, postgres_server: Any) -> None:
    lab: Lab = make("psycopg-async")
    once = AsyncSemel(postgres_server.database(driver="asyncpg"), timeout=20)
    await once.peek("warm-up")
    lab.execute("DROP TABLE IF EXISTS semel, semel_audit, semel_schema")
    tx = await lab.tx()
    with pytest.raises(ConfigurationError, match=r"no table 'semel'.*create\(\).*schema sql"):
        await once.within(tx.target).execute("k1", lab.work(tx), "k1")
    await tx.insert("after")
    await tx.commit()
    assert lab.orders("after") == 1
    await lab.close()
    await once.close()


async def test_R27_an_error_that_is_no_missing_table_passes_as_it_is(make: Any) -> None:
    lab: Lab = make("psycopg-async")
    once, tx = await lab.ready()
    import psycopg

    await tx.run("SET TRANSACTION READ ONLY")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        await once.within(tx.target).execute("k1", lab.work(tx), "k1")
    assert await tx.count("k1") == 0, "the transaction is usable"
    await lab.close()


# ------------------------------------------------------------------------------- the caller's settings


async def test_R27_lock_timeout_is_as_it_was(make: Any) -> None:
    lab: Lab = make("asyncpg")
    once, tx = await lab.ready()
    await tx.run("SET LOCAL lock_timeout = '777ms'")
    seen: list[Any] = []

    async def look() -> None:
        seen.append((await tx.run("SHOW lock_timeout"))[0][0])

    await once.within(tx.target).execute("k1", look, wait=3)
    await once.within(tx.target).execute("k1", look, wait=3)
    await look()
    assert seen == ["777ms", "777ms"]
    await lab.close()


def test_R27_busy_timeout_is_as_it_was(make: Any) -> None:
    lab: Lab = make("sqlite3")
    once = lab.face()
    connection = sqlite3.connect(lab.place, timeout=7)
    seen: list[int] = []
    once.within(connection).execute(
        "k1", lambda: seen.append(connection.execute("PRAGMA busy_timeout").fetchone()[0]), wait=2
    )
    other = sqlite3.connect(lab.place, timeout=3)
    with pytest.raises(TimeoutError):
        once.within(other).execute("k1", lambda: None)
    assert seen == [7000]
    assert other.execute("PRAGMA busy_timeout").fetchone() == (3000,)
    assert not other.in_transaction
    connection.close()
    other.close()
    once.close()


async def test_R27_no_ddl_on_the_callers_connection(make: Any) -> None:
    lab: Lab = make("session-asyncpg")
    once, tx = await lab.ready()
    from sqlalchemy import event

    said: list[str] = []
    connection = await tx.target.connection()
    event.listen(
        connection.sync_connection, "before_cursor_execute", lambda *args: said.append(args[2]), named=False
    )
    await once.within(tx.target).execute("k1", lab.work(tx), "k1")
    await tx.commit()
    assert not [
        text for text in said if re.match(r"\s*(create|alter|drop|lock|truncate)", text, re.IGNORECASE)
    ]
    assert len(said) <= 5, "savepoint, claim, the caller's row, settle, release"
    await lab.close()


def test_R27_a_changed_row_factory_does_no_harm(make: Any) -> None:
    import psycopg
    import pymysql
    from psycopg.rows import dict_row

    lab: Lab = make("sqlite3")
    once = lab.face()
    connection = sqlite3.connect(lab.place)
    connection.row_factory = sqlite3.Row
    connection.text_factory = bytes
    once.within(connection).execute("k1", lambda: 1)
    assert once.within(connection).execute("k1", lambda: 2).value == 1
    connection.close()
    once.close()
    postgres: Lab = make("psycopg")
    once = postgres.face()
    with psycopg.connect(postgres.place, row_factory=dict_row, cursor_factory=psycopg.RawCursor) as strange:
        once.within(strange).execute("k1", lambda: 1)
        assert once.within(strange).execute("k1", lambda: 2).value == 1
    once.close()
    maria: Lab = make("pymysql")
    once = maria.face()
    with pymysql.connect(**maria.mysql_place(), cursorclass=pymysql.cursors.DictCursor) as plain:
        once.within(plain).execute("k1", lambda: 1)
        assert once.within(plain).execute("k1", lambda: 2).value == 1
    once.close()


# ----------------------------------------------------------------------------------------- registries


def test_R27_a_scoped_session_is_its_current_session(make: Any) -> None:
    lab: Lab = make("session-psycopg")
    engine = create_engine(f"postgresql+psycopg://{lab.place.partition('://')[2]}")
    sessions = scoped_session(sessionmaker(engine))
    once = lab.face()
    assert once.within(sessions).execute("k1", lambda: 1).value == 1
    sessions.commit()
    assert lab.records("k1") == ["done"]
    sessions.remove()
    engine.dispose()
    once.close()


async def test_R27_an_async_scoped_session_is_its_current_session(make: Any) -> None:
    lab: Lab = make("session-asyncpg")
    engine = create_async_engine(f"postgresql+asyncpg://{lab.place.partition('://')[2]}")
    sessions = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    once = lab.face()
    assert (await once.within(sessions).execute("k1", _async_one)).value == 1
    await sessions.commit()
    assert lab.records("k1") == ["done"]
    await sessions.remove()
    await engine.dispose()
    await once.close()


@pytest.mark.parametrize("bound", ["file", "memory", "session"])
def test_R27_a_transaction_in_another_sqlite_file_is_refused_for_replays_too(
    tmp_path: Path, bound: str
) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/other.db")
    with Semel(f"sqlite:///{tmp_path}/semel.db") as once, Session(engine) as session:
        once.execute("k", lambda: "here")
        other: Any = session
        if bound != "session":
            other = sqlite3.connect(":memory:" if bound == "memory" else tmp_path / "other.db")
        for key in ("k", "new"):
            with pytest.raises(ConfigurationError, match="a key would have two records"):
                once.within(other).execute(key, lambda: "there")
        if bound != "session":
            other.close()
        here = sqlite3.connect(tmp_path / "semel.db")
        assert once.within(here).execute("k", lambda: "there").value == "here"
        here.close()
    engine.dispose()


@pytest.mark.parametrize(
    "driver", ["session-pysqlite", "session-psycopg", "session-aiosqlite", "session-asyncpg"]
)
async def test_R27_a_flush_that_failed_and_was_caught_is_told_as_that(
    make_coloured: Any, driver: str
) -> None:
    """It was told as "the function ended the transaction", with advice for a key that reads as unknown."""

    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.insert("before")

        async def work() -> str:
            from tests.within.alchemy_lab import Order

            tx.target.add(Order(id=None, k=None))
            with contextlib.suppress(IntegrityError):
                await wait(tx.target.flush())
            return "went on"

        fn = work if lab.colour == "async" else lambda: run_sync(work())
        with pytest.raises(ConfigurationError, match=r"a flush failed .*begin_nested") as told:
            await wait(once.within(tx.target).execute("k1", fn))
        assert isinstance(told.value.__cause__, IntegrityError)
        await tx.insert("after")
        await tx.commit()
        assert (lab.orders("before"), lab.orders("after"), lab.records("k1")) == (1, 1, [])

        async def rolls_back() -> str:
            await work()
            await wait(tx.target.rollback())
            return "went on"

        fn = rolls_back if lab.colour == "async" else lambda: run_sync(rolls_back())
        with pytest.raises(ConfigurationError, match="the function ended the transaction"):
            await wait(once.within(tx.target).execute("k2", fn))

    await make_coloured(driver, body)
