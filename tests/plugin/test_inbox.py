"""Handlers that call `inbox.process` in a transaction of their own: the inbox's windows are seen, and what is wrong is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from semel.messaging import Inbox, Message
from semel.testing import services
from semel.testing.plugin import prove
from semel.testing.plugin_report import Report

pytestmark = pytest.mark.slow

INSERT = text("INSERT INTO book VALUES (:id)")
POINTS = ("inbox.admitted", "consumer.handled")


class Shop:
    """A table that handlers write to, and an inbox beside it. Each handler is given the id of its message."""

    def __init__(self, url: str) -> None:
        self.engine = patient(create_engine(url, poolclass=NullPool))
        self.inbox = Inbox(url, consumer="shop")
        with self.engine.begin() as db:
            db.execute(text("CREATE TABLE book (id VARCHAR(60))"))
        self.inbox.create()

    def count(self, key: str) -> int:
        with self.engine.connect() as db:
            return int(db.execute(text("SELECT count(*) FROM book WHERE id = :id"), {"id": key}).scalar_one())

    def prove(self, handler: Callable[[str], Any], faults: Any = ("kill",)) -> Report:
        return prove(handler, arguments=lambda key: (key,), effects=self.count, faults=faults)

    def right(self, key: str) -> None:
        def book(session: Session, message: Message) -> None:
            session.execute(INSERT, {"id": message.id})

        with Session(self.engine) as session, session.begin():
            self.inbox.process(session, Message("orders", 1, id=key), book)

    def right_and_alone(self, key: str) -> None:
        def book(session: Session, message: Message) -> None:
            session.execute(INSERT, {"id": message.id})

        with Session(self.engine) as session, session.begin():
            self.inbox.process(session, Message("orders", 1, id=key), book, own_transaction=True)

    def right_in_a_batch(self, key: str) -> None:
        def book(session: Session, messages: list[Message]) -> None:
            session.execute(INSERT, [{"id": message.id} for message in messages])

        with Session(self.engine) as session, session.begin():
            self.inbox.process_batch(session, [Message("orders", 1, id=key)] * 2, book)

    def in_another_transaction(self, key: str) -> None:
        def book(message: Message) -> None:
            with self.engine.begin() as db:
                db.execute(INSERT, {"id": message.id})

        with Session(self.engine) as session, session.begin():
            self.inbox.process(session, Message("orders", 1, id=key), book)

    def afterwards(self, key: str) -> None:
        def look(message: Message) -> None: ...

        with Session(self.engine) as session, session.begin():
            admitted = self.inbox.process(session, Message("orders", 1, id=key), look)
        if admitted:
            with self.engine.begin() as db:
                db.execute(INSERT, {"id": key})

    def under_a_new_id(self, key: str) -> None:
        def book(session: Session, message: Message) -> None:
            session.execute(INSERT, {"id": key})

        with Session(self.engine) as session, session.begin():
            self.inbox.process(session, Message("orders", 1), book)


def patient(engine: Engine) -> Engine:
    """Several try at a time, and a SQLite file has one writer."""
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda db, _: db.execute("PRAGMA busy_timeout = 20000"))
    return engine


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(f"sqlite:///{tmp_path / 'shop.db'}")
    yield shop
    shop.inbox.close()


@pytest.fixture
def postgres_shop(postgres_server: services.PostgresServer) -> Iterator[Shop]:
    shop = Shop(postgres_server.database().replace("postgresql://", "postgresql+psycopg://"))
    yield shop
    shop.inbox.close()


def points(report: Report) -> tuple[str, ...]:
    """The named points that it was struck at, in their order."""
    return tuple(dict.fromkeys(each.window.name for each in report.tries if each.window.name in POINTS))


@pytest.mark.parametrize("handler", [Shop.right, Shop.right_and_alone, Shop.right_in_a_batch])
def test_a_handler_that_writes_in_the_session_of_the_inbox_is_exactly_once(
    shop: Shop, handler: Callable[[Shop, str], None]
) -> None:
    report = shop.prove(lambda key: handler(shop, key))
    assert report.holds, str(report)
    assert points(report) == POINTS


@pytest.mark.services
@pytest.mark.parametrize("handler", [Shop.right, Shop.right_and_alone])  # and the short way of admitting
def test_it_is_so_under_every_fault_on_a_server(
    postgres_shop: Shop, handler: Callable[[Shop, str], None]
) -> None:
    report = postgres_shop.prove(lambda key: handler(postgres_shop, key), ["kill", "zombie", "interrupt"])
    assert report.holds, str(report)
    assert points(report) == POINTS


@pytest.mark.services
def test_an_async_handler_passes_the_same_windows(postgres_shop: Shop) -> None:
    url = postgres_shop.engine.url.set(drivername="postgresql+asyncpg")
    engine = create_async_engine(url, poolclass=NullPool)
    inbox = Inbox(engine, consumer="shop")

    async def book(session: AsyncSession, message: Message) -> None:
        await session.execute(INSERT, {"id": message.id})

    async def right(key: str) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await inbox.process(session, Message("orders", 1, id=key), book)

    report = postgres_shop.prove(right)
    assert report.holds, str(report)
    assert points(report) == POINTS


@pytest.mark.services
def test_an_effect_in_a_transaction_of_its_own_is_doubled_between_the_two(postgres_shop: Shop) -> None:
    report = postgres_shop.prove(postgres_shop.in_another_transaction)
    assert report.verdict("inbox.admitted", "kill") == "once", str(report)
    assert report.windows("doubled")[0] == "consumer.handled", str(report)
    assert report.verdict("called twice", "none") == "once"
    assert "over the very session that process was given" in str(report)
    assert "no call of semel was seen" not in str(report)


def test_an_effect_after_the_commit_is_lost_between_the_two(shop: Shop) -> None:
    report = shop.prove(shop.afterwards)
    assert report.verdict("consumer.handled", "kill") == "once", str(report)
    assert report.verdict("if admitted:", "kill") == "lost", str(report)
    assert "the message was admitted, and the effect is missing" in str(report)
    assert "no call of semel was seen" not in str(report)


def test_a_message_whose_id_is_new_in_every_call_is_told_so(shop: Shop) -> None:
    report = shop.prove(shop.under_a_new_id)
    assert report.verdict("called twice", "none") == "doubled", str(report)
    assert "of a message: its id" in str(report)
