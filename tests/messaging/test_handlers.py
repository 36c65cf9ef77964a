"""What a handler may do wrong costs it an attempt, and never a message or an order."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import ConfigurationError, StoreUnavailable
from semel.messaging import Inbox, Message
from semel.messaging.calling import takes_two
from semel.messaging.consumer import Counts
from semel.messaging.sources import Delivery
from semel.messaging.standing import Undone
from tests.messaging.conftest import Home, awaited


class Handed:
    """A message that a broker handed out."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.state = ""

    async def ack(self) -> None:
        self.state = "ack"

    async def nack(self) -> None:
        self.state = "nack"

    async def extend(self) -> None:
        return None


class Tray:
    """A source in memory."""

    extends_every = 5.0

    def __init__(self, messages: Sequence[Message]) -> None:
        self.all = [Handed(message) for message in messages]
        self._left = list(self.all)

    def add(self, *messages: Message) -> None:
        handed = [Handed(message) for message in messages]
        self.all += handed
        self._left += handed

    async def receive(self, limit: int) -> Sequence[Delivery]:
        found, self._left = self._left[:limit], self._left[limit:]
        await asyncio.sleep(0 if found else 0.005)
        return found

    async def aclose(self) -> None:
        return None


async def consumed(inbox: Inbox, *messages: Message, **options: Any) -> tuple[list[str], Counts]:
    tray = Tray(messages)
    consumer = inbox.consuming(tray, **options)
    task = asyncio.create_task(consumer.run())
    async with asyncio.timeout(30):
        while not all(each.state for each in tray.all):
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return [each.state for each in tray.all], consumer.counts


@pytest.fixture
def effects(home: Home) -> Any:
    name = f"{home.table}_eff"
    with home.engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {name} (id varchar(20) PRIMARY KEY)"))
    yield name
    with home.engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {name}"))


def count(home: Home, what: str) -> object:
    return home.scalar(f"SELECT count(*) FROM {what}")


@pytest.mark.parametrize("driver", ["psycopg", "psycopg_async", "asyncpg"])
@awaited
async def test_a_handler_that_swallows_an_error_of_postgresql_has_failed(
    postgres_home: Home, driver: str
) -> None:
    """COMMIT answers ROLLBACK then: to acknowledge it would lose the message."""
    home, name = postgres_home, f"{postgres_home.table}_eff"
    with home.engine.begin() as connection:
        connection.execute(text(f"DROP TABLE IF EXISTS {name}"))
        connection.execute(text(f"CREATE TABLE {name} (id varchar(20) PRIMARY KEY)"))
    word = text(f"INSERT INTO {name} VALUES ('x')")

    def swallow(session: Session, message: Message) -> None:
        session.execute(word)
        try:
            session.execute(word)
        except DBAPIError:
            return

    async def swallow_too(session: AsyncSession, message: Message) -> None:
        await session.execute(word)
        try:
            await session.execute(word)
        except DBAPIError:
            return

    sync = driver == "psycopg"
    engine: Any = (create_engine if sync else create_async_engine)(home.url.replace("+psycopg", f"+{driver}"))
    inbox = Inbox(engine, consumer="c", table=home.table, hooks=())
    await inbox.acreate()
    inbox.handler("t", max_attempts=2, backoff=(0.01, 0.01))(swallow if sync else swallow_too)
    states, counts = await consumed(inbox, Message("t", 1, id="m1"))
    assert (states, counts.handled, counts.failed) == (["ack"], 0, 2)
    (letter,) = await inbox.dead_letters()
    assert "Undone" in letter.reason or "aborted" in letter.reason
    assert count(home, name) == 0
    await engine.dispose() if not sync else engine.dispose()
    with home.engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {name}"))


@pytest.mark.parametrize("verb", ["rollback", "commit"])
@pytest.mark.parametrize("fails", [False, True])
@awaited
async def test_a_handler_that_ends_the_transaction_by_itself_is_told_of(
    home: Home, effects: str, verb: str, fails: bool
) -> None:
    def ends(session: Session, message: Message) -> None:
        session.execute(text(f"INSERT INTO {effects} VALUES ('x')"))
        getattr(session, verb)()
        if fails:
            raise ValueError("afterwards")

    engine = create_engine(home.url)
    inbox = Inbox(engine, consumer="c", table=home.table, hooks=())
    inbox.create()
    inbox.handler("t", max_attempts=5)(ends)
    states, counts = await consumed(inbox, Message("t", 1, id="m1"))
    assert (states, counts.handled, counts.dead) == (["ack"], 0, 1)
    (letter,) = await inbox.dead_letters()
    assert "by itself" in letter.reason
    engine.dispose()


def test_a_transaction_that_the_database_undid_is_not_taken_for_done(home: Home, effects: str) -> None:
    """As a deadlock does that a handler swallowed: what admitted the message is gone, what came after is there."""

    def undone(session: Session, message: Message) -> None:
        raw: Any = session.connection().connection
        raw.rollback()
        if home.engine.dialect.name != "postgresql":
            session.execute(text(f"INSERT INTO {effects} VALUES ('x')"))

    engine = create_engine(home.url)
    inbox = Inbox(engine, consumer="c", table=home.table, hooks=())
    inbox.create()
    with Session(engine) as session:
        session.begin()
        with pytest.raises(Undone):
            inbox.process(session, Message("t", 1, id="m1"), undone, own_transaction=True)
        session.rollback()
    assert count(home, effects) == 0
    engine.dispose()
    inbox.close()


@awaited
async def test_a_database_that_is_away_for_one_message_keeps_the_rest_of_its_key_waiting(home: Home) -> None:
    """Handed back to its broker it would come again after them."""
    handled: list[str] = []
    misses = iter([StoreUnavailable("deadlock"), StoreUnavailable("deadlock")])

    def stumbles(message: Message) -> None:
        if message.id == "m0" and (error := next(misses, None)) is not None:
            raise error
        handled.append(message.id)

    engine = create_engine(home.url)
    inbox = Inbox(engine, consumer="c", table=home.table, hooks=())
    inbox.create()
    inbox.handler("t")(stumbles)
    messages = [Message("t", n, id=f"m{n}", key="k") for n in range(3)]
    states, counts = await consumed(inbox, *messages)
    assert handled == ["m0", "m1", "m2"]
    assert (states, counts.failed) == (["ack"] * 3, 0), "no attempt is counted, nothing is handed back"
    engine.dispose()


@awaited
async def test_each_attempt_gets_the_message_as_it_came(home: Home) -> None:
    seen: list[Any] = []

    def spoils(message: Message) -> None:
        seen.append(dict(message.body))
        message.body["cents"] = message.body.pop("amount", 0) * 100
        raise ValueError("no")

    engine = create_engine(home.url)
    inbox = Inbox(engine, consumer="c", table=home.table, hooks=())
    inbox.create()
    inbox.handler("t", max_attempts=2, backoff=(0.01, 0.01))(spoils)
    await consumed(inbox, Message("t", {"amount": 1}, id="m1"))
    (letter,) = await inbox.dead_letters()
    assert (seen, letter.message.body) == ([{"amount": 1}] * 2, {"amount": 1})
    engine.dispose()


@awaited
async def test_letters_of_one_tenant_are_replayed_and_deleted_apart(sqlite_home: Home) -> None:
    inbox = Inbox(sqlite_home.url, consumer="c", table=sqlite_home.table, hooks=())
    inbox.create()

    def fails(_: Message) -> None:
        raise ConfigurationError("never")

    inbox.handler("t")(fails)
    await consumed(inbox, *(Message("t", 1, id="m1", tenant=tenant) for tenant in ("acme", "globex")))
    assert await inbox.replay(["m1"], tenant="acme") == 1
    assert await inbox.delete(["m1"], tenant="globex") == 1
    assert await inbox.delete() == 0, "the other one is to be tried again"
    inbox.close()


@pytest.mark.parametrize("writes", [False, True])
def test_a_connection_that_begins_by_itself_may_be_processed_in(
    home: Home, effects: str, writes: bool
) -> None:
    def handle(connection: Connection, message: Message) -> None:
        if writes:
            connection.execute(text(f"INSERT INTO {effects} VALUES ('x')"))

    with Inbox(home.url, consumer="c", table=home.table, hooks=()) as inbox:
        inbox.create()
        for expected in (True, False):
            with home.engine.connect() as connection:
                done = inbox.process(connection, Message("t", 1, id="m1"), handle, own_transaction=True)
                connection.commit()
            assert done is expected, "its admission was committed"
        assert count(home, effects) == int(writes)


# -- what it is called with -------------------------------------------------------------------------------------------------
class Handlers:
    def of_message(self, message: Message) -> None: ...

    def of_both(self, session: Session, message: Message) -> None: ...

    def __call__(self, session: Session, message: Message) -> None: ...


@dataclass
class Unhashable:
    count: int = 0

    def __call__(self, session: Session, message: Message) -> None: ...


def signed_for_one(*args: Any) -> None: ...


signed_for_one.__signature__ = inspect.signature(lambda message: None)  # type: ignore[attr-defined]  # inspect looks for it


@pytest.mark.parametrize(
    ("handler", "two"),
    [
        (lambda message: None, False),
        (lambda session, message: None, True),
        (lambda message, retries=3: None, False),
        (lambda message, *, log=print: None, False),
        (lambda *args: None, True),
        (lambda session, message, extra=None: None, True),
        (Handlers().of_message, False),
        (Handlers().of_both, True),
        (Handlers(), True),
        (Unhashable(), True),
        (functools.partial(Handlers().of_both, Session()), False),
        (signed_for_one, False),
        (functools.wraps(lambda message: None)(lambda *args: None), False),
        (print, True),
        (int, False),
    ],
)
def test_a_handler_of_two_gets_the_session_too(handler: Any, two: bool) -> None:
    assert takes_two(handler) is two
