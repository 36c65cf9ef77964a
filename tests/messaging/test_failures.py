"""A database that cannot be had is waited for, whichever driver says so in whichever words; what only sounds so is a failure."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import asyncpg
import psycopg
import pymysql
import pytest
from sqlalchemy import text
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import StoreUnavailable
from semel.messaging import Inbox, Message, Outbox, Relay
from semel.messaging.events import Alarm, RelayEvent
from semel.messaging.failures import is_away, translating
from semel.testing import services
from tests.messaging.books import Book
from tests.messaging.conftest import Home, awaited
from tests.messaging.test_attempts import ended, until
from tests.messaging.test_handlers import Tray, consumed


# -- asyncpg, whose errors SQLAlchemy does not translate while it connects ---------------------------------------------
@awaited
async def test_a_relay_over_asyncpg_waits_for_a_database_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the start, and while it runs."""
    monkeypatch.setattr("semel.messaging.tidying._STARTING", (0.05, 0.1))
    told: list[RelayEvent] = []
    with services.postgres() as server:
        engine = create_async_engine(server.url.replace("postgresql://", "postgresql+asyncpg://"))
        outbox = Outbox(engine, table="late")
        server.stop()
        with pytest.raises(StoreUnavailable):
            await outbox.acreate()
        relay = Relay(outbox, {"t": Book()}, lease=1, hooks=(told.append,))
        running = asyncio.create_task(relay.run())
        await until(lambda: any(isinstance(event, Alarm) for event in told))
        await asyncio.to_thread(server.start)
        await until(lambda: bool(relay.parts))
        await asyncio.to_thread(server.stop)
        await until(
            lambda: not relay.parts
        )  # a round met it; heartbeats and rounds try to connect from now on
        await asyncio.sleep(1)
        assert not running.done()
        await asyncio.to_thread(server.start)
        await until(lambda: bool(relay.parts))
        await ended(running)
        await engine.dispose()


@awaited
async def test_a_consumer_over_asyncpg_waits_for_a_database_that_is_away() -> None:
    with services.postgres() as server:
        engine = create_async_engine(server.url.replace("postgresql://", "postgresql+asyncpg://"))
        inbox = Inbox(engine, consumer="c", hooks=())
        await inbox.acreate()

        async def handle(session: AsyncSession, message: Message) -> None:
            await session.execute(text("SELECT 1"))

        inbox.handler("t")(handle)
        tray = Tray([])
        consumer = inbox.consuming(tray)
        running = asyncio.create_task(consumer.run())
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.stop)
        await engine.dispose()  # from now on it has to connect
        tray.add(Message("t", 1, id="m1", key="k"), Message("t", 2, id="m2", key="k"))
        await asyncio.sleep(1)
        assert [each.state for each in tray.all] == ["", ""], (
            "handed back: others of its key would overtake it"
        )
        await asyncio.to_thread(server.start)
        await until(lambda: all(each.state == "ack" for each in tray.all))
        assert (consumer.counts.handled, consumer.counts.failed) == (2, 0)
        await ended(running)
        await engine.dispose()


def test_what_asyncpg_says_of_the_server_is_sorted_by_its_code() -> None:
    for error, away in (
        (asyncpg.CannotConnectNowError("the database system is starting up"), True),
        (asyncpg.TooManyConnectionsError("sorry, too many clients already"), True),
        (asyncpg.InvalidPasswordError("password authentication failed"), False),
        (ConnectionRefusedError(111, "Connect call failed"), True),
    ):
        with pytest.raises(OperationalError) as told, translating():
            raise error
        assert is_away(told.value) is away
    with pytest.raises(KeyError), translating():
        raise KeyError


# -- codes before words ------------------------------------------------------------------------------------------------
def _said(error: Exception, kind: type[OperationalError | InterfaceError] = OperationalError) -> Any:
    return kind("SELECT 1", None, error)


@pytest.mark.parametrize(
    "error",
    [
        pymysql.OperationalError(1644, "this account is closed"),
        pymysql.OperationalError(1054, "Unknown column 'terminated_at' in 'SET'"),
        psycopg.errors.lookup("55000")("the period is closed"),
        psycopg.errors.lookup("57014")("canceling statement due to statement timeout"),
    ],
)
def test_a_word_of_the_servers_is_no_outage(error: Exception) -> None:
    assert not is_away(_said(error))


@pytest.mark.parametrize(
    "error",
    [
        pymysql.OperationalError(
            2003, "Can't connect to MySQL server on 'db' ([Errno 113] No route to host)"
        ),
        pymysql.OperationalError(1040, "Too many connections"),
        pymysql.OperationalError(1213, "Deadlock found when trying to get lock"),
        psycopg.OperationalError("connection failed: FATAL:  sorry, too many clients already"),
        psycopg.OperationalError(
            "failed to resolve host 'db': [Errno -3] Temporary failure in name resolution"
        ),
        psycopg.OperationalError("the connection is closed"),
        psycopg.errors.lookup("57P03")("das Datenbanksystem startet"),
        psycopg.errors.lookup("40P01")("deadlock detected"),
    ],
)
def test_an_outage_is_one_whatever_it_is_called(error: Exception) -> None:
    assert is_away(_said(error))


def test_a_mistake_of_a_handler_with_its_connection_is_no_outage() -> None:
    mixed = Exception("cannot perform operation: another operation is in progress")  # asyncpg
    assert not is_away(_said(mixed, InterfaceError))
    assert is_away(_said(pymysql.InterfaceError(0, ""), InterfaceError))
    assert is_away(_said(Exception("connection is closed"), InterfaceError))


def test_a_locked_file_is_away(sqlite_home: Home) -> None:
    sqlite_home.outbox().close()
    file = str(sqlite_home.engine.url.database)
    with sqlite3.connect(file) as first, sqlite3.connect(file, timeout=0) as second:
        first.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError) as locked:
            second.execute("BEGIN IMMEDIATE")
        assert is_away(_said(locked.value))


@awaited
async def test_a_handler_whose_table_is_missing_fails_whatever_the_table_is_called(sqlite_home: Home) -> None:
    inbox = Inbox(sqlite_home.url, consumer="c", table=sqlite_home.table, hooks=())
    inbox.create()

    def handle(session: Session, message: Message) -> None:
        session.execute(text("INSERT INTO closed_orders VALUES (1)"))

    inbox.handler("t", max_attempts=2, backoff=(0.01, 0.01))(handle)
    states, counts = await consumed(inbox, Message("t", 1))
    assert (states, counts.failed, counts.dead) == (["ack"], 2, 1)
    inbox.close()
