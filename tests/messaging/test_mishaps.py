"""Rights that are missing, names that do not fit, rows that somebody deleted: nothing is lost, and only what is bad waits."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from semel import CodecError, ConfigurationError, InvalidKey
from semel.messaging import Inbox, Message, Outbox, Relay, Row
from semel.messaging.events import Alarm, Handled, HandlerFailed, RelayEvent, SinkBack
from semel.messaging.sink import Guarantee, SinkUnavailable
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.envelope import filled
from semel.messaging.sinks.nats import _subject
from semel.messaging.sinks.outbox import OutboxSink
from semel.messaging.sinks.redis import RedisStreamSink
from semel.testing import services
from semel.testing.sinks import rows
from tests.messaging.books import Book, Post
from tests.messaging.conftest import Home, RedisPlace, awaited

Place = Home | RedisPlace


def add(place: Place, outbox: Outbox, *messages: Message) -> None:
    with place.transaction() as session:
        outbox.add(session, *messages)


def limited(client: redis.Redis, url: str, *commands: str) -> tuple[str, str]:
    """A user of Redis that may do these only, and the URL with its name."""
    name = f"u{secrets.token_hex(4)}"
    client.acl_setuser(
        name,
        enabled=True,
        passwords=["+pw"],
        keys=["*"],
        channels=["*"],
        categories=["+@all"],
        commands=list(commands),
    )
    return name, url.replace("redis://", f"redis://{name}:pw@")


# -- rights ---------------------------------------------------------------------------------------------------------
@awaited
async def test_a_user_without_the_right_to_append_loses_nothing(
    sqlite_home: Home, redis_server: services.RedisServer
) -> None:
    client, stream = redis.Redis.from_url(redis_server.url), f"s{secrets.token_hex(4)}"
    name, url = limited(client, redis_server.url, "-xadd")
    outbox = sqlite_home.outbox()
    add(sqlite_home, outbox, *(Message("t", n, key="k") for n in range(5)))
    async with Relay(outbox, {"t": f"{url}?stream={stream}"}) as relay:
        report = await relay.drain()
        assert (report.duplicates, report.pending) == (0, {"t": 5})
        client.acl_setuser(name, commands=["+xadd"])
        assert (await relay.drain()).sent == 5
    assert client.xlen(stream) == 5
    client.acl_deluser(name)
    client.close()
    outbox.close()


def test_a_user_without_a_right_leaves_no_half_message(redis_server: services.RedisServer) -> None:
    client, table = redis.Redis.from_url(redis_server.url), f"r{secrets.token_hex(4)}"
    name, url = limited(client, redis_server.url, "-zadd")
    place = RedisPlace(redis_server.url, table, client)
    with place.outbox() as outbox, redis.Redis.from_url(url) as theirs:
        with theirs.pipeline() as pipe:
            outbox.add(pipe, Message("t", 1, id="m1"))
            with pytest.raises(redis.ResponseError, match=r"(?i)zadd|perm"):
                pipe.execute()
        assert (place.count(), place.count("_outbox_ids")) == (0, 0)
        client.acl_setuser(name, commands=["+zadd"])
        with theirs.pipeline() as pipe:
            outbox.add(pipe, Message("t", 1, id="m1"))
            pipe.execute()
        assert (place.count(), place.count("_outbox_ids")) == (1, 1)
    client.acl_deluser(name)
    client.close()


# -- routes and rows that are gone ------------------------------------------------------------------------------------
@awaited
async def test_nothing_overtakes_a_batch_whose_route_is_gone(home: Home) -> None:
    outbox, book, told = home.outbox(), Book(), list[RelayEvent]()
    add(home, outbox, *(Message("orders", n, key="k", id=f"m{n}") for n in range(3)))
    book.away = True
    await Relay(outbox, {"orders": book}, hooks=()).drain()
    add(home, outbox, *(Message("orders", n, key="k", id=f"m{n}") for n in range(3, 6)))
    add(home, outbox, Message("orders", 9, key="other", id="m9"))
    renamed = Post()
    report = await Relay(outbox, {"orders*": renamed}, hooks=(told.append,)).drain()
    assert renamed.ids == ["m9"]
    assert (report.pending, report.unavailable) == ({"orders": 6}, ("orders (no such route)",))
    assert ["name='orders'" in event.message for event in told if isinstance(event, Alarm)] == [True]
    book.away = False
    assert (await Relay(outbox, {"orders": book}).drain()).sent == 6
    assert book.ids == [f"m{n}" for n in range(6)]
    outbox.close()


@awaited
async def test_rows_that_somebody_deleted_under_way_stop_nobody(home: Home) -> None:
    outbox, book, told = home.outbox(parts=1), Book(), list[RelayEvent]()
    add(home, outbox, Message("t", 1, key="bad", id="bad"))
    book.away = True
    await Relay(outbox, {"t": book}, hooks=()).drain()
    with home.engine.begin() as connection:
        connection.execute(text(f"DELETE FROM {home.table}_outbox"))
    add(home, outbox, *(Message("t", n, key=f"k{n}", id=f"m{n}") for n in range(5)))
    book.away = False
    report = await Relay(outbox, {"t": book}, hooks=(told.append,)).drain()
    assert (sorted(book.ids), report.pending) == ([f"m{n}" for n in range(5)], {})
    assert "rows-gone" in {event.what for event in told if isinstance(event, Alarm)}
    outbox.close()


# -- names and numbers ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "subject"), [("x..y", "x._.y"), ("a...b", "a._._.b"), (".a.", "a"), ("a b", "a_b"), ("..", "_")]
)
def test_a_subject_of_nats_has_no_empty_token(given: str, subject: str) -> None:
    assert _subject(given) == subject


@pytest.mark.parametrize("due", [math.nan, math.inf, True, "soon", timedelta(days=5000)])
def test_a_time_that_never_comes_is_refused(due: Any) -> None:
    with pytest.raises(ConfigurationError, match="due"):
        Message("t", 1, due=due)


@pytest.mark.parametrize("body", [{"x": math.nan}, [1, [math.inf]], -math.inf, {"a": None, "b": (math.nan,)}])
def test_a_number_that_json_cannot_say_is_refused(body: Any) -> None:
    with pytest.raises(CodecError, match="no number of JSON"):
        _ = Message("t", body).data


def test_null_is_a_word_of_json() -> None:
    assert Message("t", {"a": None, "b": "null"}).data == b'{"a":null,"b":"null"}'


@pytest.mark.parametrize("headers", [{"a": "\ud800"}, {"a": "x" * 70_000}])
def test_headers_that_cannot_be_written_are_refused_where_they_are_given(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="headers"):
        Message("t", 1, headers=headers)


@pytest.mark.parametrize("names", [{"id": "m1 "}, {"id": " m1"}, {"tenant": "acme "}])
def test_ids_that_mariadb_does_not_tell_apart_are_refused(names: dict[str, Any]) -> None:
    with pytest.raises(InvalidKey, match="space"):
        Message("t", 1, **names)


@awaited
async def test_a_lane_of_any_length_is_remembered(home: Home) -> None:
    outbox = home.outbox()
    add(home, outbox, Message("a" * 255, 1, tenant="b" * 255))

    class Wide(Book):
        def lane(self, row: Row) -> str:
            return f"{row.tenant}:{row.topic}"

    book = Wide()
    assert (await Relay(outbox, {"*": book}, sink_safety=60).drain()).sent == 1
    assert home.count() == 0
    outbox.close()


@awaited
async def test_lanes_of_a_sink_without_numbers_are_not_remembered(home: Home) -> None:
    outbox, post = home.outbox(parts=1), Post()
    add(home, outbox, *(Message("t", n) for n in range(3)))
    await Relay(outbox, {"t": post}, sink_safety=60).drain()
    assert len(post.ids) == 3
    state = home.scalar("SELECT state FROM {t}_outbox_parts WHERE part = 0")
    assert msgspec.json.decode(str(state))["lanes"] == {}
    outbox.close()


@pytest.mark.parametrize(
    "options",
    [
        {"lease": math.nan}, {"sink_safety": -1}, {"batch": 2.5}, {"topics": "orders", "name": "x"}, {"name": "x" * 121},
        {"topics": ["orders.*"], "name": "x"},
    ],
)  # fmt: skip
def test_options_that_can_only_be_mistakes_are_refused(sqlite_home: Home, options: dict[str, Any]) -> None:
    with sqlite_home.outbox() as outbox, pytest.raises(ConfigurationError):
        Relay(outbox, {"t": Book()}, **options)


@pytest.mark.parametrize(
    "options", [{"retention": -1}, {"retention": math.nan}, {"max_body": 0}, {"parts": True}]
)
def test_options_of_an_outbox_that_can_only_be_mistakes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Outbox("sqlite://", **options)


def test_a_topic_has_one_handler(sqlite_home: Home) -> None:
    with Inbox(sqlite_home.url, consumer="c") as inbox:
        inbox.handler("orders")(print)
        inbox.handler("*")(print)
        for topic in ("orders", "bills"):
            with pytest.raises(ConfigurationError, match="has one handler"):
                inbox.handler(topic)(print)
        with pytest.raises(ConfigurationError, match="backoff"):
            inbox.handler("x", backoff=(5, 1))


# -- keys that back off -----------------------------------------------------------------------------------------------
@awaited
async def test_replay_is_for_what_is_parked(place: Place) -> None:
    outbox, post = place.outbox(), Post()
    add(place, outbox, Message("t", 1, key="k", id="m1"))
    post.bad["m1"] = "no"
    relay = Relay(outbox, {"t": post}, backoff=(60, 60))
    await relay.drain()
    assert [line.attempts for line in await relay.backing_off()] == [1]
    assert await relay.replay() == 0
    assert [line.attempts for line in await relay.backing_off()] == [1], "its attempts are still counted"
    outbox.close()


# -- a relay's life -----------------------------------------------------------------------------------------------------
@awaited
async def test_a_relay_is_one_member_of_its_team(sqlite_home: Home) -> None:
    with sqlite_home.outbox() as outbox:
        relay = Relay(outbox, {"t": Book()})
        running = asyncio.create_task(relay.run())
        while not relay.parts:
            await asyncio.sleep(0.005)
        with pytest.raises(ConfigurationError, match="runs already"):
            await relay.drain()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await relay.drain()


@awaited
async def test_a_drain_forgets_ids_that_are_over(home: Home) -> None:
    with home.outbox(retention=0) as outbox:
        add(home, outbox, Message("t", 1))
        await Relay(outbox, {"t": Book()}).drain()
        await Relay(outbox, {"t": Book()}, name="relay").drain()
        assert home.count("_outbox_ids") == 0


@awaited
async def test_a_pause_that_nothing_waits_for_is_over(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.messaging.away._FORGOTTEN", 0.0)
    told: list[RelayEvent] = []
    with sqlite_home.outbox() as outbox:
        book = Book()
        book.away = True
        relay = Relay(outbox, {"t": book}, lease=0.2, hooks=(told.append,))
        add(sqlite_home, outbox, Message("t", 1, key="k"))
        running = asyncio.create_task(relay.run())
        async with asyncio.timeout(30):
            while not relay.paused:
                await asyncio.sleep(0.005)
            for part in list(relay._carrier.parts.values()):  # as if somebody else had them
                part.state.lanes.clear()
                part.rows.clear()
            with sqlite_home.engine.begin() as connection:
                connection.execute(text(f"DELETE FROM {sqlite_home.table}_outbox"))
            while relay.paused:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert any(isinstance(event, SinkBack) for event in told)


@awaited
async def test_a_store_of_bodies_that_fails_stops_no_sending(sqlite_home: Home) -> None:
    told: list[RelayEvent] = []
    with sqlite_home.outbox() as outbox:

        async def broken(*, orphans: bool) -> None:
            raise PermissionError("the folder is somebody else's")

        outbox.tend = broken  # type: ignore[method-assign]  # to fail
        book = Book()
        running = asyncio.create_task(Relay(outbox, {"t": book}, hooks=(told.append,)).run())
        async with asyncio.timeout(30):
            while not any(isinstance(event, Alarm) and event.what == "bodies" for event in told):
                await asyncio.sleep(0.005)
            add(sqlite_home, outbox, Message("t", 1))
            while not book.ids:
                await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@awaited
async def test_a_relay_waits_for_a_database_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is there, and takes nobody: as while it starts. Then it does."""
    monkeypatch.setattr("semel.messaging.tidying._STARTING", (0.05, 0.1))
    told: list[RelayEvent] = []
    with services.postgres() as server:
        url = server.url.replace("postgresql://", "postgresql+psycopg://")
        outbox, book = Outbox(url, table="late"), Book()
        server.stop()
        relay = Relay(outbox, {"t": book}, hooks=(told.append,))
        running = asyncio.create_task(relay.run())
        async with asyncio.timeout(30):
            while sum(isinstance(event, Alarm) for event in told) < 2:
                await asyncio.sleep(0.01)
            assert all("waits for its outbox" in event.message for event in told if isinstance(event, Alarm))
            assert not running.done()
            server.start()
            while not relay.parts:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        outbox.close()


@pytest.mark.parametrize("wrong", ["user", "database", "tables"])
@awaited
async def test_a_relay_that_is_not_wanted_is_told_so_at_once(
    postgres_server: services.PostgresServer, wrong: str
) -> None:
    url = postgres_server.url.replace("postgresql://", "postgresql+psycopg://")
    if wrong == "user":
        url = url.replace("postgres@", "nobody@")
    if wrong == "database":
        url = f"{url.rpartition('/')[0]}/nosuch"
    with Outbox(url, table="unwanted", create=False) as outbox:
        async with asyncio.timeout(30):
            with pytest.raises(ConfigurationError, match=r"(?i)does not exist|no messaging tables"):
                await Relay(outbox, {"t": Book()}, hooks=()).run()


# -- closing ------------------------------------------------------------------------------------------------------------
def test_a_relay_and_its_sinks_are_closed_by_a_plain_call(
    sqlite_home: Home, redis_server: services.RedisServer
) -> None:
    loop = asyncio.new_event_loop()
    with sqlite_home.outbox() as outbox:
        add(sqlite_home, outbox, Message("t", 1))
        with Relay(outbox, {"t": f"{redis_server.url}?stream=s{secrets.token_hex(4)}"}) as relay:
            loop.run_until_complete(relay.drain())
            client = relay.router.targets[0].sink._client  # type: ignore[attr-defined]  # the sink of a Redis has it
            pool: Any = client.connection_pool
            assert pool._available_connections[0].is_connected
        assert not any(connection.is_connected for connection in pool._available_connections)
        relay.close()
    loop.close()


@pytest.mark.parametrize(
    "url", ["redis://localhost/0", "https://h/x", "nats://localhost?stream=S&subject=s", "amqp://localhost/", "kafka://h:1?topic=t",
            "rabbitmq+stream://localhost:5552/?stream=s"],
)  # fmt: skip
def test_every_sink_has_both_ways_to_close(url: str) -> None:
    with open_sink(url) as sink:  # type: ignore[attr-defined]  # every sink of a URL has it
        assert sink.guarantee
    asyncio.run(sink.aclose())


@awaited
async def test_a_plain_close_inside_of_a_loop_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="aclose"):
        open_sink("https://h/x").close()  # type: ignore[attr-defined]  # every sink of a URL has it


def test_a_sink_that_cannot_be_a_key_is_a_sink(sqlite_home: Home) -> None:
    @dataclass
    class Plain:
        guarantee: Guarantee = "exact"

        async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
            raise SinkUnavailable("never")

    with sqlite_home.outbox() as outbox:
        asyncio.run(Relay(outbox, {"t": Plain()}).drain())


# -- metrics ------------------------------------------------------------------------------------------------------------
@awaited
async def test_what_is_processed_without_a_consumer_is_counted_too(home: Home) -> None:
    told: list[RelayEvent] = []

    def fails(_: Message) -> None:
        raise ValueError("no")

    with Inbox(home.url, consumer="c", table=home.table, hooks=(told.append,)) as inbox:
        inbox.create()
        with Session(home.engine) as session, session.begin():
            for _ in range(2):
                inbox.process(session, Message("t", 1, id="m1"), lambda message: None)
            inbox.process_batch(session, [Message("t", n, id=f"m{n}") for n in (1, 2)], lambda messages: None)
            with pytest.raises(ValueError, match="no"):
                inbox.process(session, Message("t", 1, id="m3"), fails)
    assert [(event.message, event.admitted) for event in told if isinstance(event, Handled)] == [
        ("m1", True),
        ("m1", False),
        ("m1", False),
        ("m2", True),
    ]
    assert [(event.message, event.error) for event in told if isinstance(event, HandlerFailed)] == [
        ("m3", "ValueError")
    ]


@awaited
async def test_an_outbox_is_not_relayed_into_itself(place: Place) -> None:
    told: list[RelayEvent] = []
    with place.outbox() as outbox, place.outbox() as itself:
        add(place, outbox, Message("t", 1))
        report = await Relay(outbox, {"t": OutboxSink(itself)}, hooks=(told.append,)).drain()
        assert (report.sent, report.pending) == (0, {"t": 1})
    assert any("into itself" in event.message for event in told if isinstance(event, Alarm))


def test_who_catches_a_handlers_error_cannot_commit_half_of_it(home: Home) -> None:
    def fails(_: Message) -> None:
        raise ValueError("no")

    with Inbox(home.url, consumer="c", table=home.table, hooks=()) as inbox:
        inbox.create()
        for handler, expected in ((fails, None), (lambda _: None, True)):
            with Session(home.engine) as session:
                try:
                    done = inbox.process(session, Message("t", 1, id="m1"), handler, own_transaction=True)
                except ValueError:
                    done = None
                session.commit()
            assert done is expected, "its admission was undone with it"


# -- names in names ---------------------------------------------------------------------------------------------------
def test_a_name_is_filled_in_once() -> None:
    """A topic may be called as a place to fill in."""
    row = msgspec.structs.replace(rows(1, topic="{tenant}")[0], tenant="{key}", key="k")
    assert filled("{topic}.{tenant}.{key}.{other}", row) == "{tenant}.{key}.k.{other}"
    sink = RedisStreamSink("redis://localhost", "{topic}:{tenant}:{key}")
    assert sink.lane(row) == "{tenant}:{key}:{key}"
