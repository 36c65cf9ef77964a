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
async def test_a_relay_over_asyncpg_waits_for_a_database_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
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
        await until(lambda: not relay.parts)  # a round met it; heartbeats and rounds try to connect from now on
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
        assert [each.state for each in tray.all] == ["", ""], "handed back: others of its key would overtake it"
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
