"""NOTIFY: a relay hears of commits in other processes at once, and needs nobody to tell it (PostgreSQL)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from semel import ConfigurationError
from semel.messaging import Message, Outbox, Relay
from semel.messaging.events import Alarm, RelayEvent
from semel.testing.services import home as places
from tests.messaging.books import Book
from tests.messaging.conftest import Home, awaited

# Longer than any test waits: what arrives was told, not found by looking.
SELDOM = (60.0, 60.0)


def listeners(home: Home, outbox: Outbox) -> list[int]:
    with home.engine.connect() as connection:
        said = text("SELECT pid FROM pg_stat_activity WHERE query = :said")
        return list(connection.execute(said, {"said": f"LISTEN {outbox.channel}"}).scalars())


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(relay: Relay) -> AsyncIterator[None]:
    task = asyncio.create_task(relay.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def add(home: Home, outbox: Outbox, *ids: str) -> None:
    with Session(home.engine) as session, session.begin():
        outbox.add(session, *(Message("orders", 1, id=name) for name in ids))


@awaited
async def test_a_commit_of_another_process_is_heard(postgres_home: Home) -> None:
    home = postgres_home
    first = home.outbox(notify=True)
    outbox = home.outbox()  # says nothing, as `semel relay` does: the tables say it
    book = Book()
    async with running(Relay(outbox, {"orders": book}, poll=SELDOM)):
        await until(lambda: listeners(home, outbox))
        program = (
            "from sqlalchemy import create_engine; from semel.messaging import Message, Outbox; import sys\n"
            "engine = create_engine(sys.argv[1]); outbox = Outbox(sys.argv[1], table=sys.argv[2], notify=True)\n"
            "with engine.begin() as c: outbox.add(c, Message('orders', 1, id='far'))"
        )
        command = [sys.executable, "-c", program, home.url, home.table]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=30)
        await until(lambda: book.ids == ["far"])
        with Session(home.engine) as session:  # what is rolled back is not told
            session.begin()
            first._write(session.connection(), [first._prepare(Message("orders", 1))])
            session.rollback()
        add(home, first, "near", "nearer")
        await until(lambda: set(book.ids) == {"far", "near", "nearer"})
    await until(lambda: not listeners(home, outbox))
    first.close()
    outbox.close()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@awaited
async def test_an_async_engine_listens_too(postgres_home: Home, driver: str) -> None:
    home = postgres_home
    home.outbox(notify=True).close()
    engine = create_async_engine(home.url.replace("psycopg", driver))
    outbox = Outbox(engine, table=home.table)
    writer = home.outbox()
    book = Book()
    async with running(Relay(outbox, {"orders": book}, poll=SELDOM)):
        for name in ("one", "two"):
            await until(lambda: listeners(home, writer) or _asyncpg_listens(home, writer))
            add(home, writer, name)
            await until(lambda name=name: name in book.ids)  # type: ignore[misc]  # the name of this turn of the loop
    writer.close()
    await engine.dispose()


def _asyncpg_listens(home: Home, outbox: Outbox) -> bool:
    with home.engine.connect() as connection:
        said = text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE :said")
        return bool(connection.execute(said, {"said": f"LISTEN%{outbox.channel}%"}).scalar())


@awaited
async def test_a_listener_that_is_lost_is_opened_again(postgres_home: Home) -> None:
    home = postgres_home
    outbox, writer = home.outbox(notify=True), home.outbox()
    told: list[RelayEvent] = []
    book = Book()
    async with running(Relay(outbox, {"orders": book}, poll=SELDOM, hooks=[told.append])):
        await until(lambda: listeners(home, writer))
        (lost,) = listeners(home, writer)
        with home.engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": lost})
        add(home, writer, "meanwhile")
        await until(lambda: any(isinstance(event, Alarm) and event.what == "listener" for event in told))
        await until(lambda: book.ids == ["meanwhile"])  # found by looking, as soon as it listens again
        await until(lambda: listeners(home, writer) not in ([], [lost]))
        add(home, writer, "afterwards")
        await until(lambda: book.ids == ["meanwhile", "afterwards"])
    outbox.close()
    writer.close()


@awaited
async def test_without_a_listener_the_relay_looks(postgres_home: Home) -> None:
    home = postgres_home
    outbox, writer = home.outbox(notify=True), home.outbox()
    told: list[RelayEvent] = []
    book = Book()
    nowhere = f"postgresql+psycopg://postgres@127.0.0.1:{places.free_port()}/x"
    relay = Relay(outbox, {"orders": book}, poll=(0.01, 0.1), listen=nowhere, hooks=[told.append])
    async with running(relay):
        await until(lambda: any(isinstance(event, Alarm) and event.what == "listener" for event in told))
        for name in ("one", "two"):
            add(home, writer, name)
            await until(lambda name=name: name in book.ids)  # type: ignore[misc]  # the name of this turn of the loop
    book = Book()
    async with running(Relay(outbox, {"orders": book}, poll=SELDOM, listen=home.url)):
        await until(lambda: listeners(home, writer))
        add(home, writer, "three")
        await until(lambda: book.ids == ["three"])
    outbox.close()
    writer.close()


def test_other_databases_have_no_notify(sqlite_home: Home) -> None:
    with pytest.raises(ConfigurationError, match="PostgreSQL"):
        sqlite_home.outbox(notify=True)
    outbox = sqlite_home.outbox(notify=False)
    assert outbox.channel is None
    outbox.close()


def test_one_statement_tells_and_only_when_asked(postgres_home: Home) -> None:
    """Without notify nothing is told; with it no further round trip is made."""
    home = postgres_home

    def statements(outbox: Outbox) -> int:
        from sqlalchemy import event

        seen: list[str] = []

        def count(*args: Any) -> None:
            seen.append(args[2])

        event.listen(home.engine, "before_cursor_execute", count)
        add(home, outbox, f"m{len(seen)}{outbox.channel}")
        event.remove(home.engine, "before_cursor_execute", count)
        assert any("pg_notify" in said for said in seen) == (outbox.channel is not None)
        return len(seen)

    quiet = home.outbox()
    add(home, quiet, "first")
    few = statements(quiet)
    loud = home.outbox(notify=True)
    assert statements(loud) == few
    quiet.close()
    loud.close()
