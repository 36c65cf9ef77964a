"""The inbox: the admission commits with what the handler did (R46; MW9-MW11, MW18)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import ConfigurationError, KeyMismatch
from semel.messaging import Inbox, Message, Outbox, Relay, Windows, letters
from tests.messaging.books import Book
from tests.messaging.conftest import Home, awaited


@pytest.fixture
def effects(home: Home) -> str:
    """A table for what handlers do."""
    name = f"{home.table}_effects"
    home.outbox().close()
    with home.engine.begin() as connection:
        connection.execute(text(f"DROP TABLE IF EXISTS {name}"))
        connection.execute(text(f"CREATE TABLE {name} (n int)"))
    return name


def test_a_message_is_handled_once(home: Home, effects: str) -> None:
    inbox = Inbox(home.url, consumer="shipping", table=home.table)
    message = Message("orders", {"n": 1}, id="m1")

    def handler(session: Session, got: Message) -> dict[str, int]:
        session.execute(text(f"INSERT INTO {effects} VALUES (:n)"), {"n": got.body["n"]})
        return {"shipped": 1}

    for expected in (True, False):
        with Session(home.engine) as session, session.begin():
            assert inbox.process(session, message, handler, business_key="order-1") is expected
    assert home.count("_effects") == 1
    other = Inbox(home.url, consumer="billing", table=home.table)
    with Session(home.engine) as session, session.begin():
        assert other.process(session, message, handler) is True
        assert other.process(session, Message("orders", {"n": 1}, id="m1", tenant="x"), handler) is True
    (line,) = asyncio.run(inbox.log(business_key="order-1"))
    assert (line.message, line.result) == ("m1", '{"shipped":1}')
    other.close()
    inbox.close()


def test_an_error_undoes_handler_and_admission_and_leaves_the_transaction(home: Home, effects: str) -> None:
    inbox = Inbox(home.url, consumer="shipping", table=home.table)

    def fails(session: Session, message: Message) -> None:
        session.execute(text(f"INSERT INTO {effects} VALUES (1)"))
        raise RuntimeError(message.id)

    with Session(home.engine) as session, session.begin():
        session.execute(text(f"INSERT INTO {effects} VALUES (7)"))
        with pytest.raises(RuntimeError, match="m1"):
            inbox.process(session, Message("orders", 1, id="m1"), fails)
        session.execute(text(f"INSERT INTO {effects} VALUES (8)"))
    assert (home.count("_effects"), home.count("_inbox")) == (2, 0)
    with Session(home.engine) as session, session.begin():
        assert inbox.process(session, Message("orders", 1, id="m1"), lambda message: None) is True
    inbox.close()


def test_another_body_under_a_known_id_is_a_conflict(home: Home, effects: str) -> None:
    inbox = Inbox(home.url, consumer="shipping", table=home.table)
    with Session(home.engine) as session, session.begin():
        inbox.process(session, Message("orders", 1, id="m1"), lambda message: None)
    with Session(home.engine) as session, session.begin():
        with pytest.raises(KeyMismatch, match="m1"):
            inbox.process(session, Message("orders", 2, id="m1"), lambda message: None)
        assert session.execute(text(f"SELECT count(*) FROM {effects}")).scalar() == 0
    inbox.close()


def test_two_copies_at_once_are_handled_once(home: Home, effects: str) -> None:
    """MW10: the second waits for the first, whatever comes of it."""
    inbox = Inbox(home.url, consumer="shipping", table=home.table)
    inbox.create()
    inside, leave = threading.Event(), threading.Event()
    answers: list[bool] = []

    def slow(session: Session, message: Message) -> None:
        session.execute(text(f"INSERT INTO {effects} VALUES (1)"))
        inside.set()
        leave.wait(30)

    def copy() -> None:
        with Session(home.engine) as session, session.begin():
            answers.append(inbox.process(session, Message("orders", 1, id="m1"), slow))

    threads = [threading.Thread(target=copy) for _ in range(2)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == [False, True]
    assert home.count("_effects") == 1
    inbox.close()


def test_outgoing_messages_commit_with_the_admission(home: Home, effects: str) -> None:
    """MW11: rolled back, neither is there; committed, both are."""
    inbox, outbox = Inbox(home.url, consumer="s", table=home.table), home.outbox()
    message = Message("orders", {"n": 1}, id="m1")

    def handler(session: Session, got: Message) -> None:
        outbox.add(session, Message("shipments", got.body, id="s1", causation=got.id))

    with Session(home.engine) as session:
        session.begin()
        inbox.process(session, message, handler)
        session.rollback()
    assert (home.count(), home.count("_inbox")) == (0, 0)
    with Session(home.engine) as session, session.begin():
        inbox.process(session, message, handler)
    assert (home.count(), home.count("_inbox")) == (1, 1)
    assert effects
    inbox.close()
    outbox.close()


def test_a_batch_runs_what_is_new(home: Home, effects: str) -> None:
    inbox = Inbox(home.url, consumer="s", table=home.table)
    got: list[list[str]] = []
    batch = [Message("t", n, id=f"m{n}") for n in range(5)]
    with Session(home.engine) as session, session.begin():
        assert inbox.process_batch(session, batch[:2], lambda messages: None) == 2
    with Session(home.engine) as session, session.begin():
        done = inbox.process_batch(
            session, [*batch, batch[4]], lambda messages: got.append([m.id for m in messages])
        )
    assert done == 3
    assert got == [["m2", "m3", "m4"]]

    def fails(messages: list[Message]) -> None:
        raise RuntimeError

    with Session(home.engine) as session, session.begin(), pytest.raises(RuntimeError):
        inbox.process_batch(session, [Message("t", 9, id="m9")], fails)
    assert home.count("_inbox") == 5
    assert effects
    inbox.close()


def test_batches_with_the_same_messages_in_another_order_do_not_deadlock(home: Home, effects: str) -> None:
    inbox = Inbox(home.url, consumer="s", table=home.table)
    seen: list[list[str]] = []

    def work(batch: list[Message], gate: threading.Barrier) -> None:
        with Session(home.engine) as session:
            gate.wait()
            with session.begin():
                inbox.process_batch(session, batch, lambda messages: seen.append([m.id for m in messages]))

    for turn in range(10):
        batch = [Message("t", n, id=f"{turn}-{n}", tenant=t) for n in range(10) for t in ("a", "b")]
        gate = threading.Barrier(2)
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(work, some, gate) for some in (batch, batch[::-1])]
            for one in both:
                one.result(60)
        ids = [message.id for message in batch]
        assert seen.pop() in (ids, ids[::-1]), "handed over in the order of arrival"
        assert seen == []
    assert effects
    inbox.close()


@awaited
async def test_async_sessions(home: Home, effects: str) -> None:
    url = home.url
    for sync, other in {"psycopg": "asyncpg", "pymysql": "asyncmy", "sqlite": "sqlite+aiosqlite"}.items():
        url = url.replace(sync, other, 1)
    engine = create_async_engine(url)
    inbox = Inbox(home.url, consumer="s", table=home.table)

    async def handler(session: AsyncSession, message: Message) -> None:
        await session.execute(text(f"INSERT INTO {effects} VALUES (1)"))

    async def fails(message: Message) -> None:
        raise RuntimeError("no")

    for expected in (True, False):
        async with AsyncSession(engine) as session, session.begin():
            assert await inbox.process(session, Message("t", 1, id="m1"), handler) is expected
            with pytest.raises(RuntimeError):
                await inbox.process(session, Message("t", 1, id=f"m2{expected}"), fails)
    assert home.count("_effects") == 1
    assert home.count("_inbox") == 1
    await engine.dispose()
    inbox.close()


def test_a_coroutine_function_in_a_sync_session_is_refused(sqlite_home: Home) -> None:
    inbox = Inbox(sqlite_home.url, consumer="s", table=sqlite_home.table)
    inbox.create()

    async def handler(message: Message) -> None:
        pass

    with (
        Session(sqlite_home.engine) as session,
        session.begin(),
        pytest.raises(ConfigurationError, match="async session"),
    ):
        inbox.process(session, Message("t", 1), handler)
    inbox.close()


@awaited
async def test_attempts_survive_rollbacks_and_dead_letters_are_replayed(home: Home) -> None:
    inbox = Inbox(home.url, consumer="s", table=home.table)
    await inbox.acreate()
    database, message = inbox.database, Message("t", {"n": 1}, id="m1", key="k", headers={"a": "b"})
    assert await database.run(letters.failed, database.tables, "s", message, "first", 0.0) == 1
    assert await database.run(letters.failed, database.tables, "s", message, "second", None) == 2
    (letter,) = await inbox.dead_letters()
    assert (letter.message.body, letter.message.headers, letter.attempts, letter.reason) == (
        {"n": 1}, {"a": "b"}, 2, "second",
    )  # fmt: skip
    assert await inbox.replay(["other"]) == 0
    assert await inbox.replay(["m1"]) == 1
    assert await inbox.dead_letters() == []
    (due,) = await database.read(letters.due, database.tables, "s")
    assert (due.id, due.attempts) == ("m1", 0)
    await database.run(letters.failed, database.tables, "s", message, "third", None)
    assert await inbox.delete(["m1"]) == 1
    assert home.count("_inbox_dead") == 0
    inbox.close()


@awaited
async def test_admissions_are_forgotten_after_the_retention(home: Home, effects: str) -> None:
    inbox = Inbox(home.url, consumer="s", table=home.table, retention=3600, windows=Windows(0, 0))
    with Session(home.engine) as session, session.begin():
        inbox.process(session, Message("t", 1, id="m1"), lambda message: None)
    assert await inbox.purge() == 0
    with home.engine.begin() as connection:  # an hour later
        connection.execute(text(f"UPDATE {home.table}_inbox SET at = at - 3601"))
    assert await inbox.purge() == 1
    assert effects
    inbox.close()


def test_window_algebra_refuses_and_says_which_number(tmp_path: Any) -> None:
    """MW18."""
    url = f"sqlite:///{tmp_path}/x.db"
    relay = Relay(Outbox(url), {"t": Book()}, max_attempts=3, backoff=(1, 300), sink_safety=7)
    assert relay.horizon == pytest.approx(1 + 2 + 7 + 10)
    windows = Windows.of(relay, redelivery=timedelta(days=7), replay=3600)
    with pytest.raises(ConfigurationError, match=r"retention=…\) to at least 608420.*redelivery"):
        Inbox(url, consumer="c", retention=86_400, windows=windows)
    Inbox(url, consumer="c", retention=timedelta(days=8), windows=windows)
    usual = Relay(Outbox(url), {"t": Book()}).horizon
    with pytest.raises(ConfigurationError, match=f"default options may send a message again for {usual:g} s"):
        Inbox(url, consumer="c", retention=usual - 1)
    Inbox(url, consumer="c", retention=usual)
    with pytest.raises(ConfigurationError, match="consumer"):
        Inbox(url, consumer="")
