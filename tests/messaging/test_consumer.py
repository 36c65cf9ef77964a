"""A running consumer on Redis Streams: admitted once, in order per key, with retries, dead letters and a graceful end."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import AsyncSemel, ConfigurationError, OutcomeUnknown
from semel.messaging import Inbox, Message, Outbox, Relay
from semel.messaging.consumer import Consumer
from semel.messaging.events import DeadLettered, RelayEvent
from semel.messaging.sources import open_source
from semel.messaging.sources.redis import RedisStreamSource
from semel.testing import services
from tests.messaging.conftest import Home, awaited


class Shop:
    """An outbox, a relay and a stream of one test's own."""

    def __init__(self, home: Home, server: services.RedisServer) -> None:
        self.home = home
        self.stream = f"s{uuid.uuid4().hex[:8]}"
        self.url = f"{server.url}?stream={self.stream}"
        self.client = redis.Redis.from_url(server.url)
        self.outbox = home.outbox()
        with home.engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (id varchar(60), n int)"))

    async def send(self, *messages: Message) -> None:
        with Session(self.home.engine) as session, session.begin():
            self.outbox.add(session, *messages)
        async with Relay(self.outbox, {"*": self.url}) as relay:
            await relay.drain()

    def effects(self) -> list[tuple[str, int]]:
        with self.home.engine.connect() as connection:
            rows = connection.execute(text("SELECT id, n FROM effects ORDER BY rowid"))
            return [(row.id, row.n) for row in rows]

    def pending(self, group: str = "shipping") -> int:
        return int(self.client.xpending(self.stream, group)["pending"])


@pytest.fixture
def shop(sqlite_home: Home, redis_server: services.RedisServer) -> Any:
    made = Shop(sqlite_home, redis_server)
    yield made
    made.client.close()
    made.outbox.close()


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def consuming(
    inbox: Inbox, source: str, check: Callable[[Consumer], Awaitable[None]], **options: Any
) -> Consumer:
    consumer = inbox.consuming(source, **options)
    task = asyncio.create_task(consumer.run())
    try:
        await check(consumer)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await consumer.source.aclose()
    return consumer


def write(session: Session, message: Message) -> None:
    session.execute(text("INSERT INTO effects VALUES (:id, :n)"), {"id": message.id, "n": message.body["n"]})


@awaited
async def test_messages_are_handled_once_and_acknowledged(shop: Shop) -> None:
    inbox = Inbox(shop.home.url, consumer="shipping", table=shop.home.table)
    inbox.handler("orders")(write)
    messages = [Message("orders", {"n": n}, key=f"k{n % 3}", id=f"m{n}") for n in range(30)]
    await shop.send(*messages)
    for message in messages[:10]:  # the same again, as a broker may
        shop.client.xadd(
            shop.stream,
            {
                "id": message.id,
                "topic": "orders",
                "key": message.key or "",
                "headers": "{}",
                "data": message.data,
            },
        )

    async def check(consumer: Consumer) -> None:
        await until(lambda: consumer.counts.handled + consumer.counts.duplicates == 40)

    consumer = await consuming(inbox, shop.url, check)
    assert (consumer.counts.handled, consumer.counts.duplicates) == (30, 10)
    found = shop.effects()
    assert sorted(n for _, n in found) == list(range(30))
    for key in range(3):
        order = [n for _, n in found if n % 3 == key]
        assert order == sorted(order), "a key was handled out of order"
    assert shop.pending() == 0
    inbox.close()


@awaited
async def test_what_a_dead_consumer_had_is_claimed(shop: Shop) -> None:
    """MW9: it died after its commit and before its acknowledgement, and before its handler."""
    inbox = Inbox(shop.home.url, consumer="shipping", table=shop.home.table)
    inbox.handler("orders")(write)
    await shop.send(Message("orders", {"n": 1}, id="m1"), Message("orders", {"n": 2}, id="m2"))
    dead = inbox.consuming(shop.url + "&idle=0.2")
    deliveries = await dead.source.receive(10)
    assert len(deliveries) == 2
    assert await dead._handle(deliveries[0].message) is True  # committed; then the process is gone

    async def check(consumer: Consumer) -> None:
        await until(lambda: shop.pending() == 0 and consumer.counts.received >= 2)

    consumer = await consuming(inbox, shop.url + "&idle=0.2", check)
    assert sorted(shop.effects()) == [("m1", 1), ("m2", 2)]
    assert (consumer.counts.handled, consumer.counts.duplicates) == (1, 1)
    await dead.source.aclose()
    inbox.close()


@awaited
async def test_failures_are_tried_again_in_order_and_die_at_last(shop: Shop) -> None:
    told: list[RelayEvent] = []
    inbox = Inbox(shop.home.url, consumer="shipping", table=shop.home.table, hooks=(told.append,))
    broken = True

    @inbox.handler("orders", max_attempts=3, backoff=(0.02, 0.05))
    def handle(session: Session, message: Message) -> None:
        write(session, message)
        if message.id == "bad" and broken:
            raise ValueError("not today")

    await shop.send(
        Message("orders", {"n": 1}, id="bad", key="k"),
        Message("orders", {"n": 2}, id="next", key="k"),
        Message("orders", {"n": 3}, id="other", key="j"),
    )

    async def check(consumer: Consumer) -> None:
        nonlocal broken
        await until(lambda: consumer.counts.dead == 1 and consumer.counts.handled == 2)
        assert sorted(shop.effects()) == [("next", 2), ("other", 3)], "a failed attempt left something behind"
        (letter,) = await inbox.dead_letters()
        assert (letter.id, letter.attempts) == ("bad", 3)
        assert "not today" in letter.reason
        broken = False
        assert await inbox.replay(["bad"]) == 1
        await until(lambda: consumer.counts.handled == 3)
        assert await inbox.dead_letters() == []

    await consuming(inbox, shop.url, check)
    assert ("bad", 1) in shop.effects()
    assert [event.message for event in told if isinstance(event, DeadLettered)] == ["bad"]
    assert shop.pending() == 0
    inbox.close()


@awaited
async def test_attempts_survive_the_consumer(shop: Shop) -> None:
    inbox = Inbox(shop.home.url, consumer="shipping", table=shop.home.table)
    tries: list[int] = []
    loop, second, told = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    @inbox.handler("orders", max_attempts=4, backoff=(0.05, 0.05))
    def handle(message: Message) -> None:
        tries.append(1)
        if len(tries) == 2:  # told to end before this fails: the third try is the other one's
            loop.call_soon_threadsafe(second.set)
            assert told.wait(30)
        raise ValueError("never")

    await shop.send(Message("orders", {"n": 1}, id="bad", key="k"))

    async def two(consumer: Consumer) -> None:
        async with asyncio.timeout(30):
            await second.wait()
        loop.call_soon(told.set)  # after the cancellation that comes next

    async def rest(consumer: Consumer) -> None:
        await until(lambda: consumer.counts.dead == 1)

    await consuming(inbox, shop.url + "&idle=0.1", two)
    assert len(tries) == 2
    await consuming(inbox, shop.url + "&idle=0.1", rest)
    assert len(tries) == 4
    inbox.close()


@awaited
async def test_unknown_topics_are_dead_letters(shop: Shop) -> None:
    inbox = Inbox(shop.home.url, consumer="shipping", table=shop.home.table)
    inbox.handler("orders.*")(write)
    await shop.send(Message("mails", {"n": 1}, id="m1"), Message("orders.paid", {"n": 2}, id="m2"))

    async def check(consumer: Consumer) -> None:
        await until(lambda: consumer.counts.unhandled == 1 and consumer.counts.handled == 1)

    await consuming(inbox, shop.url, check)
    (letter,) = await inbox.dead_letters()
    assert "no handler knows topic 'mails'" in letter.reason
    inbox.close()


@awaited
async def test_outside_effects_go_through_once(shop: Shop) -> None:
    inbox = Inbox(shop.home.url, consumer="shipping", table=shop.home.table)
    sent: list[str] = []
    async with AsyncSemel("memory://") as once:

        @inbox.handler("mails", once=once, on_unknown="hold", max_attempts=2, backoff=(0.01, 0.01))
        async def mail(message: Message) -> None:
            sent.append(message.id)
            if message.body["n"] == 2:
                raise RuntimeError("did it go out?")

        await shop.send(Message("mails", {"n": 1}, id="m1"), Message("mails", {"n": 2}, id="m2"))
        shop.client.xadd(
            shop.stream, {"id": "m1", "topic": "mails", "key": "", "headers": "{}", "data": '{"n":1}'}
        )

        async def check(consumer: Consumer) -> None:
            await until(lambda: consumer.counts.received == 3 and shop.pending() == 0)

        await consuming(inbox, shop.url, check)
        assert sorted(sent) == ["m1", "m2"], "an effect whose outcome is not known was made again"
        (letter,) = await inbox.dead_letters()
        assert OutcomeUnknown.__name__ in letter.reason
    inbox.close()


@awaited
async def test_async_handlers_middlewares_and_the_outbox(shop: Shop) -> None:
    engine = create_async_engine(shop.home.url.replace("sqlite:", "sqlite+aiosqlite:"))
    inbox = Inbox(engine, consumer="shipping", table=shop.home.table)
    seen: list[str] = []

    @inbox.use
    async def watch(message: Message, call_next: Callable[[Message], Awaitable[bool]]) -> bool:
        seen.append(f"before {message.id}")
        done = await call_next(message)
        seen.append(f"after {message.id}")
        return done

    @inbox.handler("orders", business_key=lambda message: f"order-{message.body['n']}")
    async def ship(session: AsyncSession, message: Message) -> str:
        shop.outbox.add(session, Message("shipments", message.body, id=f"s-{message.id}"))
        return "shipped"

    await shop.send(Message("orders", {"n": 1}, id="m1"))

    async def check(consumer: Consumer) -> None:
        await until(lambda: consumer.counts.handled == 1)

    await consuming(inbox, shop.url, check)
    assert seen == ["before m1", "after m1"]
    assert shop.home.count() == 1
    (line,) = await inbox.log(business_key="order-1")
    assert (line.message, line.result) == ("m1", '"shipped"')
    await engine.dispose()
    inbox.close()


@awaited
async def test_a_graceful_end_finishes_what_is_under_way(shop: Shop) -> None:
    inbox = Inbox(shop.home.url, consumer="shipping", table=shop.home.table)
    inside, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @inbox.handler("orders")
    def slow(session: Session, message: Message) -> None:
        loop.call_soon_threadsafe(inside.set)
        asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(5)
        write(session, message)

    await shop.send(
        Message("orders", {"n": 1}, id="m1", key="k"), Message("orders", {"n": 2}, id="m2", key="k")
    )
    consumer = inbox.consuming(shop.url, concurrency=1)
    task = asyncio.create_task(consumer.run())
    await inside.wait()
    task.cancel()
    await asyncio.sleep(0.05)
    leave.set()
    await asyncio.gather(task, return_exceptions=True)
    assert shop.effects() == [("m1", 1)]
    assert shop.pending() == 1, "m2 was not begun: it stays with the broker"
    await consumer.source.aclose()
    inbox.close()


def test_mistakes_are_told_when_the_consumer_is_made(tmp_path: Any) -> None:
    inbox = Inbox(f"sqlite:///{tmp_path}/x.db", consumer="c")
    with pytest.raises(ConfigurationError, match="no handlers"):
        inbox.consuming("redis://localhost?stream=s")

    @inbox.handler("t")
    async def handle(message: Message) -> None:
        pass

    with pytest.raises(ConfigurationError, match="sessions are sync"):
        inbox.consuming("redis://localhost?stream=s")
    with pytest.raises(ConfigurationError, match=r"\?stream=NAME"):
        inbox.consuming("redis://localhost")
    with pytest.raises(ConfigurationError, match="scheme 'ftp'"):
        inbox.consuming("ftp://localhost")
    with pytest.raises(ConfigurationError, match="only a handler with once="):
        inbox.handler("t", on_unknown="hold")
    with pytest.raises(ConfigurationError, match="max_attempts"):
        inbox.handler("t", max_attempts=0)
    with pytest.raises(ConfigurationError, match="sessions="):
        inbox.consuming("redis://localhost?stream=s", sessions=5)
    inbox.close()


@awaited
async def test_redis_that_goes_away_is_waited_for(sqlite_home: Home) -> None:
    with services.redis(appendonly="always") as server:
        shop = Shop(sqlite_home, server)
        inbox = Inbox(sqlite_home.url, consumer="shipping", table=sqlite_home.table)
        inbox.handler("orders")(write)
        await shop.send(Message("orders", {"n": 1}, id="m1"))

        async def check(consumer: Consumer) -> None:
            await until(lambda: consumer.counts.handled == 1)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await until(lambda: shop.client.ping() is True)
            await shop.send(Message("orders", {"n": 2}, id="m2"))
            await until(lambda: consumer.counts.handled == 2, 20)

        await consuming(inbox, shop.url, check)
        assert shop.effects() == [("m1", 1), ("m2", 2)]
        inbox.close()
        shop.outbox.close()
        shop.client.close()


def test_shared_stream_two_groups(tmp_path: Any) -> None:
    """Each consumer admits a message once: the identity is tenant, consumer and message id."""
    url = f"sqlite:///{tmp_path}/x.db"
    engine = create_engine(url)
    outbox = Outbox(url)
    outbox.create()
    message = Message("t", 1, id="m")
    for name in ("a", "b"):
        inbox = Inbox(url, consumer=name)
        with Session(engine) as session, session.begin():
            assert inbox.process(session, message, lambda message: None) is True
        inbox.close()
    engine.dispose()
    outbox.close()


@awaited
async def test_a_group_that_was_lost_begins_at_the_beginning_whatever_start_says(
    redis_server: services.RedisServer,
) -> None:
    stream = f"s{uuid.uuid4().hex}"
    client = redis.Redis.from_url(redis_server.url)
    source = RedisStreamSource.from_url(f"{redis_server.url}?stream={stream}&start=$", group="g")
    entry: dict[Any, Any] = {"topic": "t", "headers": "{}", "data": "1"}
    client.xadd(stream, {**entry, "id": "before"})
    assert await source.receive(10) == []
    client.delete(stream)
    client.xadd(stream, {**entry, "id": "after"})
    found: list[Any] = []
    while not found:
        found = list(await source.receive(10))
    assert [each.message.id for each in found] == ["after"]
    await source.aclose()
    client.close()


@awaited
async def test_what_a_closed_source_had_read_is_not_waited_for(redis_server: services.RedisServer) -> None:
    """R49: entries that were read and not begun go to the next consumer at once, not when they have been idle for long."""
    stream = uuid.uuid4().hex
    client = redis.Redis.from_url(redis_server.url)
    client.xadd(stream, {"id": "m1", "topic": "t", "data": "1"})
    async with RedisStreamSource(redis_server.url, stream, group="g", idle=600) as first:
        assert len(await first.receive(10)) == 1
    async with RedisStreamSource(redis_server.url, stream, group="g", idle=600) as second:
        (found,) = await second.receive(10)
        assert found.message.id == "m1"
        await found.ack()
    client.close()


def test_a_consumer_and_a_source_are_closed_as_everything_that_opens(sqlite_home: Home) -> None:
    """R49: both colours, twice, and before they were used."""
    inbox = Inbox(sqlite_home.url, consumer="c")
    inbox.handler("t")(print)
    urls = ("redis://127.0.0.1:1/0?stream=s", "amqp://127.0.0.1:1/?queue=q", "nats://127.0.0.1:1?stream=S")
    for url in urls:
        source: Any = open_source(url, group="g")
        with inbox.consuming(url) as consumer, source:
            pass
        consumer.close()
        source.close()
        asyncio.run(consumer.run())  # ends at once: it is closed
    inbox.close()


class _Two:
    """A source with two messages, and no more."""

    extends_every = 5.0

    def __init__(self) -> None:
        self.left = ["m1", "m2"]
        self.back: list[str] = []

    async def receive(self, limit: int) -> list[Any]:
        if not self.left:
            await asyncio.sleep(0.05)
            return []
        return [_Delivered(self, Message("t", 1, id=self.left.pop(0)))]

    async def aclose(self) -> None:
        pass


class _Delivered:
    def __init__(self, source: _Two, message: Message) -> None:
        self._source = source
        self.message = message

    async def ack(self) -> None:
        pass

    async def nack(self) -> None:
        self._source.back.append(self.message.id)

    async def extend(self) -> None:
        pass


@awaited
async def test_a_consumer_that_can_take_no_more_is_closed_all_the_same_and_runs_once(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'semel.db'}")
    inbox = Inbox(engine, consumer="c")
    began = asyncio.Event()

    @inbox.handler("t")
    async def slow(message: Message) -> None:
        began.set()
        await asyncio.sleep(60)

    consumer = inbox.consuming(cast("Any", _Two()), concurrency=1, grace=0.5)
    running = asyncio.create_task(consumer.run())
    await began.wait()
    await asyncio.sleep(0.2)
    async with asyncio.timeout(20):
        await consumer.aclose()
        await running
    with pytest.raises(ConfigurationError, match="runs once"):
        await consumer.run()
    await engine.dispose()
