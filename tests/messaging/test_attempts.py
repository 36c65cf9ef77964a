"""How often, how many at a time and by whom a message is tried."""

from __future__ import annotations

import asyncio
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import ConfigurationError
from semel.messaging import Inbox, Message, letters
from semel.messaging.sources import PROBLEM, malformed, message_of
from semel.testing import services
from tests.messaging.conftest import Home, awaited
from tests.messaging.test_handlers import Tray, consumed


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def inbox_of(home: Home, **options: Any) -> Inbox:
    inbox = Inbox(home.url, consumer="c", table=home.table, hooks=(), **options)
    inbox.create()
    return inbox


# -- at a time ------------------------------------------------------------------------------------------------------
@awaited
async def test_as_many_plain_functions_run_at_a_time_as_was_asked_for(postgres_home: Home) -> None:
    """asyncio's own threads are a few more than there are cores."""
    inbox, many = inbox_of(postgres_home), 12
    together = threading.Barrier(many)
    inbox.handler("t", max_attempts=1)(lambda message: together.wait(30) and None)
    states, counts = await consumed(inbox, *(Message("t", n) for n in range(many)), concurrency=many)
    assert (states, counts.handled) == (["ack"] * many, many)
    await until(lambda: not [each for each in threading.enumerate() if each.name.startswith("semel-handler")])
    inbox.close()


# -- how often ------------------------------------------------------------------------------------------------------
@awaited
async def test_more_consumers_do_not_try_more_often(postgres_home: Home) -> None:
    """Each attempt is one consumer's, when its time has come; the one that waits for it is told nothing is left to do."""
    inbox, tried, lock = inbox_of(postgres_home), list[str](), threading.Lock()

    @inbox.handler("t", max_attempts=4, backoff=(0.3, 0.3))
    def fail(message: Message) -> None:
        with lock:
            tried.append(threading.current_thread().name)
        raise ValueError("no")

    tray = Tray([Message("t", 1, id="m1", key="k")])
    consumers = [inbox.consuming(each) for each in (tray, Tray([]), Tray([]))]
    tasks = [asyncio.create_task(consumer.run()) for consumer in consumers]
    await until(lambda: bool(tray.all[0].state))
    await asyncio.sleep(0.7)  # the others look every half second
    await ended(*tasks)
    assert (len(tried), tray.all[0].state) == (4, "ack")
    assert sum(consumer.counts.failed for consumer in consumers) == 4
    (letter,) = await inbox.dead_letters()
    assert letter.attempts == 4
    inbox.close()


@awaited
async def test_a_turn_is_one_consumers(home: Home) -> None:
    inbox, message = inbox_of(home), Message("t", 1, id="m1")
    database, tables = inbox.database, inbox.database.tables

    def turn(fn: Any, *args: Any) -> Any:
        return database.run_now(fn, tables, "c", message, *args)

    assert turn(letters.turn_of).is_ours, "the first attempt is anybody's"
    turn(letters.failed, "why", 30.0)
    early = turn(letters.turn_of)
    assert (early.known, early.attempts, early.has_come) == (True, 1, False)
    assert 25 < early.left <= 30
    assert not turn(letters.claim, early, 10.0).is_ours, "its time has not come"
    turn(letters.failed, "why", -1.0)
    due = turn(letters.turn_of)
    assert (due.attempts, due.has_come, due.is_ours) == (2, True, False)
    assert turn(letters.claim, due, 10.0).is_ours
    second = turn(letters.claim, due, 10.0)
    assert (second.is_ours, second.known) == (False, True)
    assert 5 < second.left <= 10
    turn(letters.hold, 2, 60.0)
    assert turn(letters.turn_of).left > 50
    turn(letters.hold, 1, 600.0)  # of an attempt that is over: it must not touch the next one
    assert turn(letters.turn_of).left < 100
    turn(letters.failed, "why", None)
    assert turn(letters.turn_of).dead
    inbox.close()


@awaited
async def test_what_a_consumer_died_over_in_its_second_attempt_is_tried_by_another(
    postgres_home: Home,
) -> None:
    inbox, message, done = inbox_of(postgres_home), Message("t", 1, id="m1"), list[str]()
    inbox.handler("t", backoff=(0.01, 0.01))(lambda message: done.append(message.id))
    database, tables = inbox.database, inbox.database.tables
    database.run_now(letters.failed, tables, "c", message, "why", -1.0)
    turn = database.run_now(letters.turn_of, tables, "c", message)
    assert database.run_now(letters.claim, tables, "c", message, turn, 0.2).is_ours  # and then it died
    states, counts = await consumed(inbox, message)
    assert (states, done, counts.handled) == (["ack"], ["m1"], 1)
    assert not database.run_now(letters.turn_of, tables, "c", message).known
    inbox.close()


@awaited
async def test_who_waits_for_another_consumer_looks_again_soon(
    postgres_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done any moment, and what follows under the key waits for it."""
    monkeypatch.setattr("semel.messaging.consumer._HOLD", 100.0)  # long beside what a busy machine takes
    inbox, message = inbox_of(postgres_home), Message("t", 1, id="m1")
    inbox.handler("t")(lambda message: None)
    database, tables = inbox.database, inbox.database.tables
    database.run_now(letters.failed, tables, "c", message, "why", -1.0)
    turn = database.run_now(letters.turn_of, tables, "c", message)
    assert database.run_now(letters.claim, tables, "c", message, turn, 90.0).is_ours
    waiting = asyncio.create_task(consumed(inbox, message))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    database.run_now(letters.forget, tables, "c", message)  # the other one has done it
    async with asyncio.timeout(30):
        states, _ = await waiting
    assert states == ["ack"]
    inbox.close()


@awaited
async def test_a_letter_that_is_replayed_is_handled_once_by_many(postgres_home: Home) -> None:
    inbox, done, lock = inbox_of(postgres_home), list[str](), threading.Lock()
    well = threading.Event()

    @inbox.handler("t", max_attempts=1)
    def handle(message: Message) -> None:
        if not well.is_set():
            raise ValueError("no")
        with lock:
            done.append(message.id)

    await consumed(inbox, *(Message("t", n, id=f"m{n}") for n in range(5)))
    well.set()
    assert await inbox.replay() == 5
    consumers = [inbox.consuming(Tray([])) for _ in range(3)]
    tasks = [asyncio.create_task(consumer.run()) for consumer in consumers]
    await until(lambda: len(done) == 5 and not postgres_home.count("_inbox_dead"))
    await ended(*tasks)
    assert sorted(done) == [f"m{n}" for n in range(5)]
    assert sum(consumer.counts.handled for consumer in consumers) == 5
    inbox.close()


# -- what a handler may raise ---------------------------------------------------------------------------------------
def leave(message: Message) -> None:
    sys.exit(3)


async def leave_too(session: AsyncSession, message: Message) -> None:
    sys.exit(3)


async def cancel(session: AsyncSession, message: Message) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("handler", [leave, leave_too, cancel], ids=lambda each: each.__name__)
@awaited
async def test_a_handler_that_wants_to_end_the_process_has_failed(postgres_home: Home, handler: Any) -> None:
    """Otherwise its message would end one process after the other, and no attempt would count."""
    home = postgres_home
    engine: Any = None if handler is leave else create_async_engine(home.url)
    inbox = Inbox(engine or home.url, consumer="c", table=home.table, hooks=())
    await inbox.acreate()
    inbox.handler("bad", max_attempts=2, backoff=(0.01, 0.01))(handler)
    inbox.handler("good")(lambda message: None)
    states, counts = await consumed(inbox, Message("bad", 1, id="m1"), Message("good", 2))
    assert (states, counts.failed, counts.handled) == (["ack", "ack"], 2, 1)
    (letter,) = await inbox.dead_letters()
    assert (letter.id, letter.attempts) == ("m1", 2)
    assert letter.reason.startswith("Quit: ")
    inbox.close()
    if engine is not None:
        await engine.dispose()


# -- what cannot be read --------------------------------------------------------------------------------------------
@awaited
async def test_a_malformed_entry_is_one_letter_however_often_it_is_handed_out(
    sqlite_home: Home, redis_server: services.RedisServer
) -> None:
    client, stream = redis.Redis.from_url(redis_server.url), f"s{uuid.uuid4().hex[:8]}"
    for _ in range(2):
        client.xadd(stream, {"id": "x" * 300, "topic": "t", "data": "1"})
    inbox = inbox_of(sqlite_home)
    inbox.handler("t")(lambda message: None)
    for _ in range(2):  # the acknowledgement of the first one got lost
        consumer = inbox.consuming(f"{redis_server.url}?stream={stream}&group=g{uuid.uuid4().hex[:6]}")
        task = asyncio.create_task(consumer.run())
        await until(lambda consumer=consumer: consumer.counts.dead == 2)  # type: ignore[misc]  # the consumer of this turn of the loop
        await ended(task)
        await consumer.source.aclose()
    found = await inbox.dead_letters()
    assert [letter.attempts for letter in found] == [2, 2]
    client.close()
    inbox.close()


def test_malformed_entries_are_told_apart_by_their_names() -> None:
    ids = {malformed(b"x", topic="t", problem="p", entry=entry).id for entry in ("1-0", "2-0")}
    assert len(ids) == 2
    assert malformed(b"x", topic="t", problem="p").id == malformed(b"x", topic="t", problem="q").id
    assert malformed(b"x", topic="t", problem="p").id != malformed(b"y", topic="t", problem="p").id


def test_a_senders_own_header_does_not_make_its_message_a_problem() -> None:
    given: dict[str, Any] = {"identity": "m", "topic": "t", "fields": {}, "delivery": 1}
    message = message_of(b"1", headers={PROBLEM: "x", "Semel-Problem": "y", "mine": "z"}, **given)
    assert message.headers == {"mine": "z"}


@awaited
async def test_json_that_is_nested_too_deeply_ends_no_consumer(
    sqlite_home: Home, redis_server: services.RedisServer
) -> None:
    """It stays bytes, for the handler to judge."""
    client, stream, seen = (
        redis.Redis.from_url(redis_server.url),
        f"s{uuid.uuid4().hex[:8]}",
        dict[str, object](),
    )
    deep = b"[" * 5000 + b"]" * 5000
    client.xadd(stream, {"id": "deep", "topic": "t", "data": deep})
    client.xadd(stream, {"id": "next", "topic": "t", "data": "1"})
    inbox = inbox_of(sqlite_home)
    inbox.handler("t")(lambda message: seen.update({message.id: message.body}))
    consumer = inbox.consuming(f"{redis_server.url}?stream={stream}")
    task = asyncio.create_task(consumer.run())
    await until(lambda: consumer.counts.handled == 2 or task.done())
    assert seen == {"deep": deep, "next": 1}
    await ended(task)
    await consumer.aclose()
    client.close()
    inbox.close()


# -- what is given --------------------------------------------------------------------------------------------------
def test_a_business_key_that_has_no_room_is_refused(home: Home) -> None:
    """MariaDB would cut it silently, PostgreSQL raise an error of its own."""
    inbox = inbox_of(home)
    with Session(home.engine) as session, session.begin():
        with pytest.raises(ConfigurationError, match="255"):
            inbox.process(session, Message("t", 1), lambda message: None, business_key="k" * 256)
        assert inbox.process(session, Message("t", 1), lambda message: None, business_key="k" * 255)
    inbox.close()


@awaited
async def test_a_business_key_that_has_no_room_is_a_dead_letter_at_once(sqlite_home: Home) -> None:
    inbox = inbox_of(sqlite_home)
    inbox.handler("t", business_key=lambda message: "k" * 256)(lambda message: None)
    await consumed(inbox, Message("t", 1))
    (letter,) = await inbox.dead_letters()
    assert (letter.attempts, "255" in letter.reason) == (1, True)
    inbox.close()


def test_what_is_no_message_is_refused_by_name(sqlite_home: Home) -> None:
    inbox = inbox_of(sqlite_home)
    given: Any = {"id": 1}
    with Session(sqlite_home.engine) as session, session.begin():
        with pytest.raises(ConfigurationError, match="takes a Message"):
            inbox.process(session, given, lambda message: None)
        with pytest.raises(ConfigurationError, match="takes a Message"):
            inbox.process(session, given, lambda message: None, own_transaction=True)
    inbox.close()


# -- what is the database's fault, and what only looks so ----------------------------------------------------------------
@awaited
async def test_a_statement_that_a_timeout_cuts_each_time_is_its_handlers_failure(postgres_home: Home) -> None:
    """The database answers right afterwards: it is not away. One that is lost once costs no attempt."""
    inbox, runs = inbox_of(postgres_home, timeout=0.2), list[int]()

    def handle(session: Session, message: Message) -> None:
        runs.append(message.body)
        if message.body == 1 or runs.count(2) == 1:
            session.execute(text("SELECT pg_sleep(0.4)"))

    inbox.handler("t", max_attempts=2, backoff=(0.01, 0.01))(handle)
    states, counts = await consumed(inbox, Message("t", 1, id="cut"), Message("t", 2, id="once"))
    assert (states, counts.handled, counts.failed, counts.dead) == (["ack", "ack"], 1, 2, 1)
    assert (runs.count(1), runs.count(2)) == (6, 2)
    (letter,) = await inbox.dead_letters()
    assert letter.id == "cut"
    assert "pg_sleep" in letter.reason
    inbox.close()


@awaited
async def test_a_copy_that_waits_for_one_that_takes_long_has_not_failed(postgres_home: Home) -> None:
    """Its admission is cut each time, by the same timeout."""
    inbox = inbox_of(postgres_home, timeout=0.1)
    go = threading.Event()
    inbox.handler("t", max_attempts=1)(lambda message: go.wait(30) and None)
    tray = Tray([Message("t", 1, id="m1"), Message("t", 1, id="m1")])
    consumer = inbox.consuming(tray)
    running = asyncio.create_task(consumer.run())
    await asyncio.sleep(3)
    go.set()
    await until(lambda: all(each.state for each in tray.all))
    assert (consumer.counts.handled, consumer.counts.duplicates, consumer.counts.failed) == (1, 1, 0)
    await ended(running)
    inbox.close()
