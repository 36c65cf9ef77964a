"""What is wrong with a binding is told by within() itself, if nothing has to be asked for it; and in words that name the cause."""

from __future__ import annotations

import asyncio
import sqlite3
import time
import warnings
from contextlib import closing
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SAWarning
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import AsyncSemel, ConfigurationError, Semel
from semel.errors import SemelWarning
from semel.runtime import run_sync
from tests.within.lab import Lab, wait

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("url", ["memory://", NOWHERE, "postgresql://127.0.0.1:1/shop"])
def test_R27_a_store_of_another_kind_is_refused_before_anything_is_asked(url: str, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'a.db'}")
    with Semel(url) as once:
        start = time.monotonic()
        for target in (sqlite3.connect(tmp_path / "a.db"), Session(engine), engine.connect()):
            with pytest.raises(ConfigurationError, match=r"sqlite database: a key would have two records"):
                once.within(target)
            target.close()
        assert time.monotonic() - start < 1
    engine.dispose()


async def _told_in_a_loop(folder: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder / 'a.db'}")
    async with AsyncSemel("memory://") as once:
        session, connection = AsyncSession(engine), await engine.connect()
        for target in (
            session,
            connection,
            engine.connect(),
        ):  # the last one was not begun, and has no dialect yet
            assert isinstance(target, AsyncSession | AsyncConnection)
            with pytest.raises(ConfigurationError, match="two records"):
                once.within(target)
        await session.close()
        await connection.close()
    await engine.dispose()


def test_R27_the_same_in_a_loop(tmp_path: Path) -> None:
    asyncio.run(_told_in_a_loop(tmp_path))


def test_R27_where_a_session_chooses_its_engine_the_first_call_tells(tmp_path: Path) -> None:
    mine = create_engine(f"sqlite:///{tmp_path / 'a.db'}")

    class Choosing(Session):
        def get_bind(self, *args: Any, **more: Any) -> Engine | Connection:
            return mine

    other = create_engine("postgresql+psycopg://127.0.0.1:1/nowhere")
    with Semel(f"sqlite:///{tmp_path / 'a.db'}") as once, Choosing(other) as session:
        assert once.within(session).execute("k", lambda: 1).value == 1
        session.commit()
    with (
        Semel("postgresql://127.0.0.1:1/shop") as elsewhere,
        Semel("memory://") as nowhere,
        Choosing() as session,
    ):
        with pytest.raises(ConfigurationError, match="two records"):
            elsewhere.within(session).execute("k", lambda: 1)
        with pytest.raises(ConfigurationError, match="of a SQL database"):
            nowhere.within(session)
    mine.dispose()
    other.dispose()


def test_R27_so_it_does_in_a_loop(tmp_path: Path) -> None:
    async def main() -> None:
        mine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}")

        class Choosing(Session):
            def get_bind(self, *args: Any, **more: Any) -> Engine | Connection:
                return mine.sync_engine

        other = create_async_engine("postgresql+asyncpg://127.0.0.1:1/nowhere")
        async with (
            AsyncSemel(f"sqlite:///{tmp_path / 'a.db'}") as once,
            AsyncSession(other, sync_session_class=Choosing) as session,
        ):
            assert (await once.within(session).execute("k", _one)).value == 1
            await session.commit()
        await mine.dispose()
        await other.dispose()

    asyncio.run(main())


def test_R8_a_face_that_is_switched_off_binds_to_anything(tmp_path: Path) -> None:
    with pytest.warns(SemelWarning, match="switched off"):
        once = Semel("memory://", enabled=False)
    with once, closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        assert once.within(connection).execute("k", lambda: 1).value == 1


def test_what_belongs_to_the_face_is_told_by_name(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    with Semel(f"sqlite:///{place}") as once, closing(sqlite3.connect(place)) as connection:
        bound = once.within(connection)
        for name in ("resolve", "forget"):
            with pytest.raises(AttributeError, match=f"^{name} belongs to the Semel itself"):
                getattr(bound, name)
            assert not hasattr(bound, name)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            bound.nonsense  # noqa: B018 - the look is the test
        assert copy(bound).execute("k", lambda: 1).value == 1


# --------------------------------------------------------------------------------- a function that commits
@pytest.mark.parametrize(
    "driver", ["connection-pysqlite", "connection-psycopg", "connection-aiosqlite", "connection-asyncpg"]
)
def test_R27_a_function_that_commits_a_connection_is_told_without_a_warning_of_sqlalchemy(
    make: Any, driver: str
) -> None:
    lab: Lab = make(driver)

    async def body() -> None:
        once, tx = await lab.ready()

        async def commits() -> None:
            await tx.insert("k1")
            await wait(tx.target.commit())

        with warnings.catch_warnings():
            warnings.simplefilter("error", SAWarning)
            with pytest.raises(ConfigurationError, match="ended the transaction"):
                await wait(once.within(tx.target).execute("k1", _in(lab, commits)))
        await tx.rollback()

    _drive(lab, body())


def _in(lab: Lab, work: Any) -> Any:
    return work if lab.colour == "async" else lambda: run_sync(work())


def _drive(lab: Lab, body: Any) -> None:
    async def main() -> None:
        try:
            await body
        finally:
            await lab.close()

    if lab.colour == "sync":
        run_sync(main())
    else:
        asyncio.run(main())


async def _one() -> int:
    return 1


# -------------------------------------------------------------------------------------- codecs of a caller
@pytest.mark.parametrize("decoder", [str, float], ids=["text", "number"])
def test_R27_a_connection_that_reads_float8_in_its_own_way_replays(make: Any, decoder: Any) -> None:
    lab: Lab = make("asyncpg")

    async def body() -> None:
        once, tx = await lab.ready()
        await tx.target.set_type_codec("float8", encoder=str, decoder=decoder, schema="pg_catalog")
        bound = once.within(tx.target)
        assert not (await bound.execute("k1", _one, tombstone=5)).replayed
        assert (await bound.execute("k1", _one)).replayed
        assert (await bound.peek("k1")).created > 1e9
        await tx.rollback()

    _drive(lab, body())


def test_R27_a_codec_that_gives_no_number_is_named(make: Any) -> None:
    lab: Lab = make("asyncpg")

    async def body() -> None:
        once, tx = await lab.ready()
        await tx.target.set_type_codec(
            "float8", encoder=str, decoder=lambda text: [text], schema="pg_catalog"
        )
        bound = once.within(tx.target)
        await bound.execute("k1", _one)
        with pytest.raises(ConfigurationError, match="reads float8 as list, by a codec of its own"):
            await bound.execute("k1", _one)
        await tx.rollback()

    _drive(lab, body())
