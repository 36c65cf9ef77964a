"""SQLAlchemy's own recipe for SQLite: the driver never begins a transaction, an event of the engine sends BEGIN."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from semel import AsyncSemel, ConfigurationError, Semel


def _begin_by_event(engine: Any) -> list[str]:
    """What was sent at the begin of each transaction."""
    sent: list[str] = []

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        del record
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        sent.append("BEGIN")
        connection.exec_driver_sql("BEGIN")

    return sent


def test_a_fresh_connection_is_begun_by_the_engines_event(tmp_path: Path) -> None:
    """It was refused as AUTOCOMMIT."""
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(url)
    sent = _begin_by_event(engine)
    with Semel(url) as once:
        with engine.connect() as connection:
            for replayed in (False, True):
                outcome = once.within(connection).execute("key", lambda: "made")
                assert (outcome.value, outcome.replayed) == ("made", replayed)
            connection.rollback()
        with engine.connect() as connection:
            assert not once.within(connection).execute("key", lambda: "again").replayed
            connection.commit()
        assert once.execute("key", str).value == "again"
    assert sent == ["BEGIN"] * 2
    engine.dispose()


def test_a_fresh_async_connection_as_well(tmp_path: Path) -> None:
    async def body() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
        sent = _begin_by_event(engine.sync_engine)
        async with AsyncSemel(f"sqlite:///{tmp_path}/shop.db") as once:
            async with engine.connect() as connection:
                assert (await once.within(connection).execute("key", lambda: "made")).value == "made"
                await connection.commit()
            assert (await once.execute("key", str)).value == "made"
        assert sent == ["BEGIN"]
        await engine.dispose()

    asyncio.run(body())


def test_one_that_does_not_open_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with Semel(url) as once, engine.connect() as connection:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                once.within(connection).execute("key", str)
            assert not connection.in_transaction()
        with connection.begin():
            assert connection.execute(text("SELECT 1")).scalar_one() == 1
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                once.within(connection).execute("key", str)
            assert connection.in_transaction()
    engine.dispose()
