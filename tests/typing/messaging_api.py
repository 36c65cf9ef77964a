"""Messaging as an editor sees it (R46): the inbox's colour follows the session. mypy --strict and pyright check this file, and a
test runs it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, assert_type

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from semel.messaging import Inbox, Message, Route, Row


def handle(session: Any, message: Message) -> None: ...


def handle_many(session: Any, messages: list[Message]) -> None: ...


def sync_sessions(inbox: Inbox, engine: Engine) -> None:
    message = Message("orders", {"n": 1}, id="m1")
    with Session(engine) as session, session.begin():
        assert_type(session, Session)
        assert_type(inbox.process(session, message, handle), bool)
        assert_type(inbox.process(session, message, handle, business_key="b", own_transaction=False), bool)
        assert_type(inbox.process_batch(session, [message], handle_many), int)
    with engine.begin() as connection:
        assert_type(connection, Connection)
        assert_type(inbox.process(connection, message, handle), bool)
        assert_type(inbox.process_batch(connection, [message], handle_many), int)
    scoped = scoped_session(sessionmaker(engine))
    with scoped.begin():
        assert_type(inbox.process(scoped, message, handle), bool)
        assert_type(inbox.process_batch(scoped, [message], handle_many), int)
    scoped.remove()


async def async_sessions(inbox: Inbox, engine: AsyncEngine) -> None:
    message = Message("orders", {"n": 1}, id="m2")
    async with AsyncSession(engine) as session, session.begin():
        assert_type(await assert_type(inbox.process(session, message, handle), Awaitable[bool]), bool)
        assert_type(await inbox.process_batch(session, [message], handle_many), int)
    async with engine.begin() as connection:
        typed: AsyncConnection = connection
        assert_type(await inbox.process(typed, message, handle), bool)


def of_message(message: Message) -> bool:
    return bool(message.body)


def routes() -> None:
    Route(print, when=of_message, transform=lambda row: row)
    Route(print, when=lambda row: row.key is not None)
    Route(print, when=lambda message: message.body["n"] > 2)
    Route(print, transform=with_message)
    Route(print, when=len)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def with_message(row: Row) -> Message:
    return row.message()
