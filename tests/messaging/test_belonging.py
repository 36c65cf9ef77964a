"""A transaction of another database than the outbox's: refused, whenever it comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from semel import ConfigurationError
from semel.messaging import Message, Outbox, Relay
from semel.messaging.events import Alarm, RelayEvent
from semel.testing import services
from tests.messaging.books import Book
from tests.messaging.conftest import Home, awaited


class Base(DeclarativeBase):
    pass


class Thing(Base):
    __tablename__ = "things"
    id: Mapped[int] = mapped_column(primary_key=True)


def other_of(home: Home, folder: Path) -> str:
    """Another database of the same kind."""
    if home.url.startswith("sqlite"):
        return f"sqlite:///{folder}/other.db"
    name = "semel_other"
    options = {"isolation_level": "AUTOCOMMIT"}
    with home.engine.connect().execution_options(**options) as connection:
        known = (
            "pg_database WHERE datname"
            if "postgres" in home.url
            else "information_schema.schemata WHERE schema_name"
        )
        if not connection.execute(text(f"SELECT 1 FROM {known} = :n"), {"n": name}).first():
            connection.execute(text(f"CREATE DATABASE {name}"))
    return home.engine.url.set(database=name).render_as_string(hide_password=False)


@pytest.fixture
def other(home: Home, tmp_path: Path) -> Iterator[Home]:
    url = other_of(home, tmp_path)
    made = Home(url, home.table, create_engine(url))
    yield made
    made.close()


def add(engine: Any, outbox: Outbox) -> None:
    with Session(engine) as session, session.begin():
        outbox.add(session, Message("t", 1))


def test_an_outbox_of_another_database_is_refused_after_its_own_was_used(home: Home, other: Home) -> None:
    outbox, theirs = home.outbox(parts=64), other.outbox()
    add(home.engine, outbox)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="of another database"):
            add(other.engine, outbox)
    again = create_engine(home.url)  # another engine, the same database
    add(again, outbox)
    add(other.engine, theirs)
    assert (home.count(), other.count()) == (2, 1)
    again.dispose()
    outbox.close()
    theirs.close()


def test_a_database_without_tables_is_refused_after_its_own_was_used(
    sqlite_home: Home, tmp_path: Path
) -> None:
    outbox = sqlite_home.outbox()
    add(sqlite_home.engine, outbox)
    empty = create_engine(f"sqlite:///{tmp_path}/empty.db")
    with pytest.raises(ConfigurationError, match="another database or schema"):
        add(empty, outbox)
    empty.dispose()
    outbox.close()


@awaited
async def test_a_drivers_own_connection_is_asked_too(
    postgres_home: Home, tmp_path: Path, postgres_server: services.PostgresServer
) -> None:
    home, name = postgres_home, other_of(postgres_home, tmp_path)
    outbox, theirs = home.outbox(), Outbox(name, table=home.table)
    theirs.create()
    url = postgres_server.url
    there = name.replace("+psycopg", "")
    with psycopg.connect(url) as connection:
        assert await outbox.insert(connection, Message("t", 1)) == 1
        assert await outbox.insert(connection, Message("t", 2)) == 1
    with psycopg.connect(there) as connection, pytest.raises(ConfigurationError, match="of another database"):
        await outbox.insert(connection, Message("t", 1))
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool:
        for _ in range(2):
            async with pool.acquire() as one, one.transaction():
                assert await outbox.insert(one, Message("t", 1)) == 1
    engine = create_async_engine(name.replace("+psycopg", "+asyncpg"))
    with pytest.raises(ConfigurationError, match="of another database"):
        async with AsyncSession(engine) as session, session.begin():
            outbox.add(session, Message("t", 1))
    await engine.dispose()
    assert home.count() == 4
    outbox.close()
    theirs.close()


def test_a_session_with_a_bind_for_each_entity_is_told_what_is_missing(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox()
    with (
        Session(binds={Thing: sqlite_home.engine}) as session,
        session.begin(),
        pytest.raises(ConfigurationError, match=r"Session\(bind=engine, binds="),
    ):
        outbox.add(session, Message("t", 1))
    with Session(bind=sqlite_home.engine, binds={Thing: sqlite_home.engine}) as session, session.begin():
        outbox.add(session, Message("t", 1))
    assert sqlite_home.count() == 1
    outbox.close()


@awaited
async def test_a_connection_without_a_transaction_is_told_so_in_plain_words(postgres_home: Home) -> None:
    outbox = postgres_home.outbox()
    with (
        psycopg.connect(postgres_home.url.replace("+psycopg", ""), autocommit=True) as connection,
        pytest.raises(ConfigurationError, match="open transaction") as told,
    ):
        await outbox.insert(connection, Message("t", 1))
    assert "within" not in str(told.value)
    assert "the record" not in str(told.value)
    outbox.close()


@awaited
async def test_messages_in_parts_that_are_not_there_are_told(home: Home) -> None:
    outbox, told = home.outbox(parts=4), list[RelayEvent]()
    add(home.engine, outbox)
    relay = Relay(outbox, {"t": Book()}, hooks=(told.append,))
    await relay.backlog()
    assert not [event for event in told if isinstance(event, Alarm)]
    with home.engine.begin() as connection:
        connection.execute(text(f"UPDATE {home.table}_outbox SET part = 63"))
    await relay.backlog()
    assert [event.what for event in told if isinstance(event, Alarm)] == ["parts"]
    outbox.close()
