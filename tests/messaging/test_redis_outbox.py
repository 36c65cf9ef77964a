"""The outbox in Redis: messages and business commands are one EXEC, whatever happens (issue 5; R28, R43, R49).

What relays do with it is in test_relay.py and test_crashes.py, which run on every place that an outbox may have.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import NoPermissionError, ResponseError, WatchError
from sqlalchemy.orm import Session

from semel import AsyncSemel, ConfigurationError, KeyMismatch, Semel, StoreUnavailable, current_run
from semel.messaging import Message, Outbox, Relay
from semel.messaging.events import NotAdded
from semel.messaging.redis.home import RedisHome
from semel.messaging.redis.keys import CHOOSE
from semel.messaging.redis.ledger import RedisPage
from semel.messaging.sinks.outbox import OutboxSink
from semel.runtime import run_sync
from semel.testing import services
from tests.messaging.books import Book, Post
from tests.messaging.conftest import RedisPlace, awaited, redis_place
from tests.messaging.test_crashes import Lab
from tests.within.lab import wait


@pytest.fixture
def place(redis_server: services.RedisServer) -> Iterator[RedisPlace]:
    made = redis_place(redis_server)
    yield made
    made.close()


class Colour:
    """Pipelines, faces and functions of one colour, as a caller has them."""

    def __init__(self, name: str, place: RedisPlace) -> None:
        self.name = name
        self.place = place

    @asynccontextmanager
    async def pipe(self, **options: Any) -> AsyncIterator[Any]:
        kind = redis.Redis if self.name == "sync" else redis.asyncio.Redis
        client: Any = kind.from_url(self.place.url, **options)
        pipe = client.pipeline()
        try:
            yield pipe
        finally:
            await wait(pipe.reset())
            await wait(client.close() if self.name == "sync" else client.aclose())

    @asynccontextmanager
    async def face(self, **options: Any) -> AsyncIterator[Any]:
        face = (Semel if self.name == "sync" else AsyncSemel)(
            self.place.url, tenant=self.place.table, **options
        )
        try:
            yield face
        finally:
            await wait(face.close())

    def fn(self, body: Any) -> Any:
        return body if self.name == "async" else lambda *args: run_sync(body(*args))


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest, place: RedisPlace) -> Colour:
    return Colour(request.param, place)


# ----------------------------------------------------------------------------------------------------- EXEC
@awaited
async def test_a_message_commits_with_the_commands_of_its_pipeline(colour: Colour) -> None:
    place = colour.place
    outbox, order = place.outbox(), f"{place.table}:order"
    async with colour.pipe() as pipe:
        pipe.set(order, "book")
        outbox.add(
            pipe,
            Message("orders", {"id": 1}, key="c", id="m1"),
            Message("orders", {"id": 2}, key="c", id="m2"),
        )
        pipe.get(order)
        assert place.count() == 0, "written before the EXEC"
        assert await wait(pipe.execute()) == [True, 1, 1, b"book"]
        assert place.count() == place.count("_outbox_ids") == 2
        pipe.set(order, "again")
        outbox.add(pipe, Message("orders", {"id": 1}, key="c", id="m1"))
        assert await wait(pipe.execute()) == [True, 0], "a known id counts once"
    assert place.count() == 2
    outbox.close()


@awaited
async def test_a_user_without_channels_adds_without_an_error(colour: Colour) -> None:
    """`within` takes an EXEC in which something failed for one that was not applied as a whole."""
    place = colour.place
    outbox = place.outbox()
    name = f"deaf_{place.table}"
    place.client.acl_setuser(name, enabled=True, nopass=True, keys=["*"], categories=["+@all"])
    try:
        async with colour.pipe(username=name, password="any") as pipe:
            outbox.add(pipe, Message("orders", 1, id="m1"))
            assert await wait(pipe.execute()) == [1]
            outbox.add(pipe, Message("orders", 2, id="m2"))
            errors = place.client.info("stats")["total_error_replies"]
            assert await wait(pipe.execute()) == [1]
            assert place.client.info("stats")["total_error_replies"] == errors
    finally:
        place.client.acl_deluser(name)
    outbox.close()


@awaited
async def test_what_is_not_executed_leaves_nothing(colour: Colour) -> None:
    place = colour.place
    outbox = place.outbox()
    async with colour.pipe() as pipe:
        pipe.set(f"{place.table}:order", 1)
        outbox.add(pipe, Message("orders", 1))
        await wait(pipe.reset())
        assert await wait(pipe.execute()) == []
        pipe.execute_command(
            "SET", "one argument only"
        )  # refused while it is queued: EXEC discards everything
        outbox.add(pipe, Message("orders", 2))
        with pytest.raises(ResponseError):
            await wait(pipe.execute())
    assert place.count() == place.count("_outbox_ids") == 0
    outbox.close()


@awaited
async def test_another_content_is_a_conflict_and_nothing_is_applied(colour: Colour) -> None:
    place = colour.place
    outbox, order = place.outbox(), f"{place.table}:order"
    others = (
        Message("orders", {"n": 2}, id="one"),
        Message("refunds", {"n": 1}, id="one"),
        Message("orders", {"n": 1}, id="one", type="OrderPaid"),
    )
    async with colour.pipe(decode_responses=True) as pipe:
        pipe.set(order, "first")
        outbox.add(pipe, Message("orders", {"n": 1}, id="one"))
        await wait(pipe.execute())
        for other in others:
            pipe.set(order, "conflict")
            outbox.add(pipe, other)
            with pytest.raises(KeyMismatch, match="one"):
                await wait(pipe.execute())
            assert len(pipe) == 0
        pipe.set(order, "conflict")
        outbox.add(pipe, Message("orders", 1, id="x"))
        outbox.add(pipe, Message("orders", 2, id="x"))
        with pytest.raises(KeyMismatch):
            await wait(pipe.execute())
        assert place.client.get(order) == b"first", "a refused message left the business write applied"
        outbox.add(pipe, Message("orders", {"n": 9}, id="one", tenant="other"))
        assert await wait(pipe.execute()) == [1]
    assert place.count() == 2
    outbox.close()


@pytest.mark.parametrize("same", [True, False])
@awaited
async def test_a_twin_between_the_look_and_the_exec_is_seen(
    colour: Colour, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXEC rolls nothing back: the id that was looked at is watched, and looked at again when it changed."""
    from semel.messaging.redis.adding import Adder

    place = colour.place
    outbox, order = place.outbox(), f"{place.table}:order"
    looks, original = [], Adder.watch

    async def watch(self: Any, pipe: Any, commands: Any, slot: Any) -> Any:
        seen = await original(self, pipe, commands, slot)
        looks.append(1)
        if len(looks) == 1:
            with place.client.pipeline() as twin:
                outbox.add(twin, Message("orders", 1 if same else 2, id="m"))
                twin.execute()
        return seen

    monkeypatch.setattr(Adder, "watch", watch)
    async with colour.pipe() as pipe:
        pipe.set(order, "late")
        outbox.add(pipe, Message("orders", 1, id="m"))
        if same:
            assert await wait(pipe.execute()) == [True, 0]
        else:
            with pytest.raises(KeyMismatch):
                await wait(pipe.execute())
    assert place.client.get(order) == (b"late" if same else None)
    assert (place.count(), len(looks)) == (1, 3 if same else 2)
    outbox.close()


@awaited
async def test_a_callers_own_watch_is_kept(colour: Colour) -> None:
    place = colour.place
    outbox, stock = place.outbox(), f"{place.table}:stock"
    async with colour.pipe() as pipe:
        for disturbed in (True, False):
            await wait(pipe.watch(stock))
            with pytest.raises(ConfigurationError, match="multi"):
                outbox.add(pipe, Message("orders", 1))
            pipe.multi()
            pipe.set(stock, 1)
            outbox.add(pipe, Message("orders", 1, id="m"))
            if disturbed:
                place.client.set(stock, 7)
                with pytest.raises(WatchError):
                    await wait(pipe.execute())
                assert place.count() == 0
            else:
                assert await wait(pipe.execute()) == [True, 1]
    outbox.close()


def test_refused_without_a_transaction(place: RedisPlace, tmp_path: Path) -> None:
    outbox = place.outbox()
    with pytest.raises(ConfigurationError, match=r"client\.pipeline\(\)"):
        outbox.add(place.client, Message("orders", 1))
    with pytest.raises(ConfigurationError, match="transaction=False"):
        outbox.add(place.client.pipeline(transaction=False), Message("orders", 1))
    with pytest.raises(ConfigurationError, match="redis-py pipeline"):
        outbox.add(Session(), Message("orders", 1))
    with pytest.raises(ConfigurationError, match=r"outbox\.add"):
        run_sync(outbox.insert(place.client.pipeline(), Message("orders", 1)))
    with pytest.raises(ConfigurationError, match="Cluster"):
        Outbox("redis+cluster://localhost:1").add(place.client.pipeline(), Message("orders", 1))
    with pytest.raises(ConfigurationError, match="Redis pipeline commits nothing there"):
        Outbox(f"sqlite:///{tmp_path}/x.db").add(place.client.pipeline(), Message("orders", 1))
    with pytest.raises(ConfigurationError, match="no tables"):
        Outbox(place.url, claim_check="sql")
    with pytest.raises(ConfigurationError, match="parts=N"):
        OutboxSink(Outbox("redis+cluster://localhost:1"))
    assert place.count() == 0
    outbox.close()


def test_a_pipeline_of_another_server_is_refused(place: RedisPlace) -> None:
    outbox, name = place.outbox(), f"{place.table}:order"
    with redis.Redis.from_url(place.url.replace("/0", "/5")) as elsewhere, elsewhere.pipeline() as pipe:
        pipe.set(name, 1)
        outbox.add(pipe, Message("orders", 1))
        with pytest.raises(ConfigurationError, match="another Redis server or database"):
            pipe.execute()
        assert elsewhere.exists(name) == 0
    outbox.close()


def test_a_lost_answer_is_not_sent_again_by_the_client(place: RedisPlace) -> None:
    """redis-py repeats a transaction whose answer was lost, ten times; with a message in it, it says so instead."""
    outbox, name = place.outbox(), f"{place.table}:count"
    sent: list[float] = []

    class Cut(redis.Connection):
        """Goes away when the EXEC has arrived, before its answer is read."""

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]  # redis-py has no types there
            if b"EXEC" in b"".join(command):
                sent.append(time.monotonic())
                while not place.count() and time.monotonic() < sent[0] + 5:
                    time.sleep(0.01)
                raise redis.ConnectionError("cut")

    kwargs = redis.ConnectionPool.from_url(place.url).connection_kwargs
    client = redis.Redis(connection_pool=redis.ConnectionPool(connection_class=Cut, **kwargs))
    with client, client.pipeline() as pipe:
        pipe.incr(name)
        outbox.add(pipe, Message("orders", 1, id="m"))
        with pytest.raises(redis.ConnectionError, match="either all of it was applied or nothing"):
            pipe.execute()
    assert (len(sent), place.client.get(name), place.count()) == (1, b"1", 1)
    outbox.close()


def test_a_full_server_refuses_the_whole_transaction() -> None:
    """A script that found out inside the EXEC would leave the other commands applied."""
    with services.redis() as server, redis.Redis.from_url(server.url) as client:
        told: list[Any] = []
        outbox = Outbox(server.url, hooks=(told.append,))
        outbox.create()
        client.set("order", 1)
        client.config_set("maxmemory", "1")
        with client.pipeline() as pipe:
            pipe.delete("order")  # allowed, however full it is
            outbox.add(pipe, Message("orders", 1, id="m"))
            with pytest.raises(ResponseError, match="maxmemory"):
                pipe.execute()
        client.config_set("maxmemory", "0")
        assert client.get("order") == b"1"
        with client.pipeline() as pipe:
            outbox.add(pipe, Message("orders", 1, id="m"))
            pipe.execute()
            outbox.add(pipe, Message("orders", 2, id="m"))
            with pytest.raises(KeyMismatch):
                pipe.execute()
        assert [(event.topic, event.what) for event in told if isinstance(event, NotAdded)] == [
            ("orders", "conflict")
        ]
        outbox.close()


def test_due_is_by_the_servers_clock(place: RedisPlace) -> None:
    outbox = place.outbox(parts=1)
    before = time.time()
    with place.transaction() as pipe:
        later = datetime.now(UTC) + timedelta(hours=1)
        outbox.add(
            pipe, Message("t", 1, due=later), Message("t", 2, due=300), Message("t", 3, due=timedelta(0))
        )
        outbox.add(pipe, Message("t", 4, due=datetime.now(UTC) - timedelta(hours=1)))
    (due,) = place.names("due:*")
    client: Any = place.client
    first, second = (score for _, score in client.zrange(due, 0, -1, withscores=True))
    assert before - 0.01 <= first / 1000 - 300 <= time.time() + 0.01, "another clock than the server's"
    assert second / 1000 == pytest.approx(later.timestamp(), abs=0.01)
    assert client.xlen(place.names("messages:*")[0]) == 2
    outbox.close()


@awaited
async def test_messages_that_are_due_together_go_in_the_order_in_which_they_were_added(
    place: RedisPlace,
) -> None:
    outbox, book = place.outbox(parts=1), Book()
    at = datetime.now(UTC) + timedelta(seconds=0.5)
    with place.transaction() as pipe:
        outbox.add(pipe, *(Message("t", n, key="k", id=f"m{9 - n}", due=at) for n in range(10)))
    assert [each.id for each in await outbox.waiting()] == [f"m{9 - n}" for n in range(10)]
    async with Relay(outbox, {"t": book}) as relay:
        while (await relay.drain()).pending:
            await asyncio.sleep(0.05)
    assert book.ids == [f"m{9 - n}" for n in range(10)]
    outbox.close()


@awaited
async def test_a_key_that_flows_again_between_two_pages_of_a_look_is_not_overtaken(
    place: RedisPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.messaging.redis.ledger._LOOKS", 3)
    outbox, post = place.outbox(parts=1), Post()
    post.bad["m0"] = "no"
    async with Relay(outbox, {"t": post}, max_attempts=1, fair=False) as relay:
        with place.transaction() as pipe:
            outbox.add(pipe, Message("t", 0, key="k", id="m0"))
        await relay.drain()
        post.bad.clear()
        with place.transaction() as pipe:
            outbox.add(pipe, *(Message("t", n, key="k", id=f"m{n}") for n in range(1, 9)))
            outbox.add(pipe, Message("t", 0, key="another", id="x"))  # so that there is something to look for
        call_many, looks = RedisHome.call_many, list[int]()

        def in_between(home: RedisHome, calls: Any) -> Any:
            answers = call_many(home, calls)
            if any(
                call.script is CHOOSE and call.args[1] > 1 for call in calls
            ):  # not only whether there are any
                looks.append(len(calls))
                if len(looks) == 1:
                    page = RedisPage(home, "relay")
                    assert page.unpark(key="k", tenant=None, identity=None) == 1
            return answers

        monkeypatch.setattr(RedisHome, "call_many", in_between)
        while (await relay.drain()).pending:
            await asyncio.sleep(0.05)
    assert len(looks) > 3
    assert [i for i in post.ids if i != "x"] == [f"m{n}" for n in range(9)]
    outbox.close()


@awaited
async def test_a_message_that_becomes_due_later_is_not_lost_between_relays(place: RedisPlace) -> None:
    outbox, book = place.outbox(parts=2), Book()
    with place.transaction() as pipe:
        for n in range(6):
            outbox.add(pipe, Message("t", n, key=f"k{n % 2}", id=f"m{n}", due=3600 if n % 3 == 0 else None))
    relays = [Relay(outbox, {"t": book}, lease=0.5) for _ in range(2)]
    reports = [await relay.drain() for relay in relays]
    assert reports[-1].pending == {"t": 2}
    client: Any = place.client
    for name in place.names("due:*"):  # an hour later
        for packed in client.zrange(name, 0, -1):
            client.zincrby(name, -3_600_000, packed)
    await asyncio.gather(*(relay.drain() for relay in relays))
    assert sorted(book.ids) == [f"m{n}" for n in range(6)]
    assert place.count() == 0
    outbox.close()


@awaited
async def test_everything_of_a_message_travels(place: RedisPlace) -> None:
    outbox, book, before = place.outbox(), Book(), time.time()
    raw = bytes(range(256))
    with place.transaction() as pipe:
        outbox.add(
            pipe,
            Message(
                "t",
                raw,
                key="ключ",
                id="m1",
                type="T",
                schema="s",
                headers={"ü": "ß"},
                tenant="äöü",
                version=3,
            ),
            Message("t", {"ü": 1}, id="m2", due=0.01),
        )
    relay = Relay(outbox, {"t": book})
    await relay.drain()
    await asyncio.sleep(0.02)
    await relay.drain()
    first, second = sorted(book.rows, key=lambda row: row.id)
    assert (first.body, first.raw, first.key, first.tenant, first.type, first.schema) == (
        raw,
        True,
        "ключ",
        "äöü",
        "T",
        "s",
    )
    assert first.headers == {"ü": "ß", "schema-version": "3"}
    assert (second.message().body, second.key, second.type, second.headers) == ({"ü": 1}, None, None, {})
    assert before - 0.01 <= second.created <= time.time() + 0.01
    outbox.close()


@awaited
async def test_tenants_take_turns(place: RedisPlace) -> None:
    """Each gets its share of the first batch, however far behind the others its messages are; all keep their order."""
    outbox, book = place.outbox(parts=1), Book()
    for tenant, count in (("large", 2500), ("small", 10), ("large", 1000), ("small", 3), ("late", 5)):
        with place.transaction() as pipe:
            messages = [Message("t", n, key=f"k{n % 3}", tenant=tenant) for n in range(count)]
            outbox.add(pipe, *messages)
    relay = Relay(outbox, {"*": book}, batch=60, loops=1, hooks=())
    report = await relay.drain()
    assert (report.sent, report.pending, place.names("tenants:*")) == (3518, {}, [])
    first = [row.tenant for row in book.rows[:60]]
    assert (first.count("small"), first.count("late")) == (10, 5)
    assert sum(row.tenant == "small" for row in book.rows[:1500]) == 13, (
        "its later ones waited for all of the large one's"
    )
    last: dict[tuple[str, str | None], int] = {}
    for row in book.rows:
        assert last.get((row.tenant, row.key), 0) < row.seq
        last[row.tenant, row.key] = row.seq
    outbox.close()


@awaited
async def test_what_was_delivered_is_counted_by_topic_also_in_large_batches(place: RedisPlace) -> None:
    """Removed many at a time: a message that somebody has removed by hand is not counted off again."""
    outbox, client = place.outbox(parts=1), place.client
    with place.transaction() as pipe:
        outbox.add(pipe, *(Message(f"t{n % 3}", n, id=f"m{n}") for n in range(1203)))
    client.hincrby(place.names("waiting")[0], "t0", -1)
    client.xdel(place.names("messages:*")[0], "1-0")
    book = Book()
    async with Relay(outbox, {"*": book}, batch=1500) as relay:
        report = await relay.drain()
    assert (report.sent, report.pending, place.count()) == (1202, {}, 0)
    lives = [client.pttl(name) for name in place.names("id:*")]
    assert sum(life < 0 for life in lives) == 1, "an id whose message was never delivered stays"
    outbox.close()


# --------------------------------------------------------------------------------------------------- within
@pytest.mark.filterwarnings("ignore:Semel blocks the running event loop")
@awaited
async def test_within_record_commands_and_messages_commit_together(colour: Colour) -> None:
    place = colour.place
    outbox, balance = place.outbox(), f"{place.table}:balance"
    async with colour.face() as once, colour.pipe() as pipe:

        async def work(fails: bool) -> str:
            pipe.set(balance, 90)
            outbox.add(current_run(), Message("paid", {"n": 1}, id="m1"))
            outbox.add(pipe, Message("paid", {"n": 2}, id="m2"))
            if fails:
                raise ValueError("no")
            return "paid"

        with pytest.raises(ValueError, match="no"):
            await wait(once.within(pipe).execute("k", colour.fn(work), True))
        assert (place.count(), place.client.get(balance)) == (0, None)
        for replayed in (False, True):
            outcome = await wait(once.within(pipe).execute("k", colour.fn(work), False))
            assert (outcome.value, outcome.replayed) == ("paid", replayed)
            assert (place.count(), place.client.get(balance)) == (2, b"90")
        with pytest.raises(ConfigurationError, match="not inside within"):
            await wait(once.execute("other", colour.fn(work), False))
    outbox.close()


@pytest.mark.filterwarnings("ignore:Semel blocks the running event loop")
@awaited
async def test_within_a_conflict_leaves_the_key_free_and_nothing_applied(colour: Colour) -> None:
    place = colour.place
    outbox, balance = place.outbox(), f"{place.table}:balance"
    with place.transaction() as first:
        outbox.add(first, Message("paid", 1, id="m"))
    async with colour.face() as once, colour.pipe() as pipe:

        async def work(body: int) -> int:
            pipe.set(balance, body)
            outbox.add(current_run(), Message("paid", body, id="m"))
            return body

        with pytest.raises(KeyMismatch, match="'m'"):
            await wait(once.within(pipe).execute("k", colour.fn(work), 2))
        assert place.client.get(balance) is None
        assert (await wait(once.within(pipe).execute("k", colour.fn(work), 1))).value == 1
    assert (place.count(), place.client.get(balance)) == (1, b"1")
    outbox.close()


@pytest.mark.filterwarnings("ignore:Semel blocks the running event loop")
@awaited
async def test_within_a_server_that_refuses_the_look_at_the_ids_is_a_known_failure(colour: Colour) -> None:
    """R28: the key waited for its lease, and under `hold` for a person, although nothing was applied."""
    place = colour.place
    outbox = place.outbox()
    outbox.create()
    user = f"narrow-{place.table}"
    server: Any = place.client
    server.execute_command("ACL", "SETUSER", user, "on", ">pw", "~*", "&*", "+@all", "-mget")
    async with colour.face(lease=60) as once, colour.pipe(username=user, password="pw") as pipe:

        async def work() -> None:
            outbox.add(current_run(), Message("paid", 1, id="m"))

        with pytest.raises(NoPermissionError):
            await wait(once.within(pipe).execute("k", colour.fn(work)))
        assert (await wait(once.peek("k"))).state == "released"
    server.execute_command("ACL", "DELUSER", user)
    assert place.count() == 0
    outbox.close()


# ---------------------------------------------------------------------------------------------- its place
def test_made_on_first_use_or_refused(place: RedisPlace) -> None:
    closed = Outbox(place.url, table=place.table, create=False)
    with place.client.pipeline() as pipe:
        closed.add(pipe, Message("t", 1))
        with pytest.raises(ConfigurationError, match=r"create\(\)"):
            pipe.execute()
    with place.transaction() as pipe:
        Outbox(place.url, table=place.table, parts=8).add(pipe, Message("t", 1))
    with place.transaction() as pipe:  # it learns the number of parts before the EXEC
        Outbox(place.url, table=place.table).add(pipe, *(Message("t", n) for n in range(40)))
    assert {int(name.rpartition(b":")[2]) for name in place.names("messages:*")} <= set(range(8))
    assert place.count() == 41
    with pytest.raises(ConfigurationError, match="divided into 8 parts"):
        Outbox(place.url, table=place.table, parts=4).create()
    with pytest.raises(ConfigurationError, match="cannot begin a Redis key"):
        Outbox(place.url, table="a{b}")


@pytest.mark.parametrize("kind", ["client", "async client", "pool"])
@awaited
async def test_a_client_is_a_place_too(place: RedisPlace, kind: str) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "client": lambda: place.client,
        "async client": lambda: redis.asyncio.Redis.from_url(place.url),
        "pool": lambda: redis.ConnectionPool.from_url(place.url),
    }
    given = makers[kind]()
    async with Outbox(given, table=place.table) as outbox:
        with place.transaction() as pipe:
            outbox.add(pipe, Message("t", 1, id="m"))
        book = Book()
        assert (await Relay(outbox, {"t": book}).drain()).sent == 1
    assert place.client.ping(), "a client that was handed in was closed"


def test_a_newer_outbox_and_an_evicting_server_are_refused() -> None:
    with services.redis() as server, redis.Redis.from_url(server.url) as client:
        client.set("{semel:outbox}:meta", '{"version": 99, "identity": "x", "parts": 64}')
        with pytest.raises(ConfigurationError, match="version 99"):
            Outbox(server.url).create()
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigurationError, match="noeviction"):
            Outbox(server.url).create()


@awaited
async def test_a_server_that_is_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.messaging.redis.home._TIMEOUT", 0.4)
    with services.redis() as server:
        outbox = Outbox(server.url)
        outbox.create()
        relay = Relay(outbox, {"t": Book()})
        await relay.drain()
        server.kill()
        with pytest.raises(StoreUnavailable):
            await relay.drain()
        outbox.close()


def test_the_commands_take_its_url(place: RedisPlace) -> None:
    from typer.testing import CliRunner

    from semel.cli.commands import app

    def semel(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--table", place.table], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    outbox = place.outbox(parts=2)
    with place.transaction() as pipe:
        outbox.add(pipe, Message("orders", 1, key="bad", id="m1"), Message("orders", 2, key="good", id="m2"))
    post = Post()
    post.bad["m1"] = "malformed"
    asyncio.run(Relay(outbox, {"orders": post}, max_attempts=1).drain())
    stats = semel("outbox", "stats", place.url)
    assert "waiting 1," in stats
    assert "caution: appendonly is off" in stats
    assert "acks" not in stats
    assert "malformed" in semel("outbox", "parked", place.url)
    assert "1 key flows again" in semel("outbox", "replay", place.url, "--key", "bad")
    route = f"orders={place.url}?stream={place.table}-stream"
    assert "sent 1," in semel("relay", place.url, "--drain", "--route", route)
    assert "nothing is held back" in semel("outbox", "parked", place.url)
    assert (place.count(), place.client.xlen(f"{place.table}-stream")) == (0, 1)
    outbox.close()


@awaited
async def test_valkey(valkey_server: services.RedisServer) -> None:
    place, book = redis_place(valkey_server), Book()
    outbox = Outbox(valkey_server.url.replace("redis://", "valkey://"), table=place.table)
    with place.transaction() as pipe:
        outbox.add(pipe, Message("t", 1, id="m1"), Message("t", 2, id="m2", due=0.01))
    await asyncio.sleep(0.02)
    assert (await Relay(outbox, {"t": book}).drain()).sent == 2
    assert sorted(book.ids) == ["m1", "m2"]
    outbox.close()
    place.close()


@awaited
async def test_a_commit_of_another_process_wakes_the_relay(place: RedisPlace) -> None:
    """The relay looks every minute only; the script that adds tells it."""
    outbox, book = place.outbox(parts=2), Book()
    relay = Relay(outbox, {"t": book}, poll=(60, 60), lease=30)
    task = asyncio.create_task(relay.run())
    while len(relay.parts) < 2 or not place.client.pubsub_shardnumsub(*place.names("meta"))[0][1]:
        await asyncio.sleep(0.01)
    elsewhere = Outbox(place.url, table=place.table)  # knows no relay
    for n in range(2):
        with place.transaction() as pipe:
            elsewhere.add(pipe, Message("t", n, id=f"m{n}"))
        async with asyncio.timeout(30):
            while len(book.rows) <= n:
                await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert place.client.pubsub_shardnumsub(*place.names("meta"))[0][1] == 0, "it listens on"
    elsewhere.close()
    outbox.close()


@awaited
async def test_sentinel(redis_sentinel: services.RedisSentinel) -> None:
    outbox, book = Outbox(redis_sentinel.url, table=f"s{time.time_ns()}"), Book()
    sentinel: Any = redis.Sentinel(list(_hosts(redis_sentinel.url)))  # type: ignore[no-untyped-call]  # redis-py has no types there
    client = sentinel.master_for(redis_sentinel.url.partition("://")[2].split("/")[1])
    with client.pipeline() as pipe:
        outbox.add(pipe, Message("t", 1, id="m"))
        assert pipe.execute() == [1]
    assert (await Relay(outbox, {"t": book}).drain()).sent == 1
    client.close()
    outbox.close()


def _hosts(url: str) -> Iterator[tuple[str, int]]:
    for place in url.partition("://")[2].partition("/")[0].rpartition("@")[2].split(","):
        host, _, port = place.partition(":")
        yield host, int(port)


@awaited
async def test_large_bodies_come_in_pages(place: RedisPlace) -> None:
    """More than one answer holds: each asks for what its size allows, and nothing is left out."""
    outbox, book = place.outbox(parts=1, max_body=1 << 20), Book()
    for n in range(3):
        with place.transaction() as pipe:
            outbox.add(pipe, *(Message("t", bytes(600_000), key="k", id=f"m{n}-{i}") for i in range(8)))
    report = await Relay(outbox, {"t": book}, batch=500).drain()
    assert (report.sent, report.pending) == (24, {})
    assert book.ids == [f"m{n}-{i}" for n in range(3) for i in range(8)]
    outbox.close()


# ----------------------------------------------------------------------------------------------- crashes
async def _drain(place: RedisPlace, sink: str) -> None:
    outbox = Outbox(place.url, table=place.table)
    async with Relay(outbox, {"*": sink}, lease=0.5) as relay:
        await relay.drain()
    outbox.close()


@pytest.mark.slow
def test_storm_around_a_redis_that_holds_both_ends() -> None:
    """Writer, relays and the server itself are killed: each order has one message at the sink, in order, and no other."""
    with services.redis(appendonly="always") as server:
        place = RedisPlace(server.url, "storm", redis.Redis.from_url(server.url))
        lab = Lab(place, server)
        relays = [lab.start("relay") for _ in range(2)]
        victim = lab.start("write", "--count", "5000", "--name", "v")
        writer = lab.start("write", "--count", "400", "--name", "w")
        assert victim.stdout is not None
        assert writer.stdout is not None
        victim.stdout.readline()
        told = [writer.stdout.readline().strip() for _ in range(20)]
        relays[0].kill()
        server.kill()
        time.sleep(0.1)
        server.start()
        victim.stdout.readline()
        victim.send_signal(signal.SIGKILL)
        told += writer.stdout.read().split()  # not `communicate`: it would pass by what was read ahead
        writer.wait(60)
        assert len(told) == 400
        relays[1].terminate()
        for process in (*relays, victim):
            process.wait(60)
        asyncio.run(_drain(place, lab.sink))
        orders = [name.decode().removeprefix("order:") for name in lab.client.scan_iter("order:*")]
        lab.check(orders)
        assert place.client.xlen(lab.stream) == len(orders), "a message without its order"
        assert place.count() == 0
        lab.close()
        place.close()


def test_torn_log() -> None:
    """A log that is cut anywhere holds of each transaction both order and message, or neither."""
    with services.redis(appendonly="always") as server:
        place = RedisPlace(server.url, "torn", redis.Redis.from_url(server.url))
        outbox = place.outbox()
        (log,) = server.folder.glob("**/*.incr.aof")
        kept = len(log.read_bytes())
        for n in range(5):
            with place.transaction() as pipe:
                pipe.set(f"order:{n}", n)
                outbox.add(pipe, Message("t", {"n": n}, id=f"m{n}", due=3600 if n == 4 else None))
        whole = log.read_bytes()
        seen = set()
        for cut in (2, 150, 700, (len(whole) - kept) // 2, len(whole) - kept - 10):
            server.kill()
            log.write_bytes(whole[:-cut])
            server.start()
            orders = len(place.client.keys("order:*"))
            assert orders == place.count() == place.count("_outbox_ids")
            assert sum(map(int, place.client.hgetall("{torn:outbox}:waiting").values())) == orders
            seen.add(orders)
        assert len(seen) > 2, "the cuts took nothing away"
        outbox.close()
        place.close()


# ----------------------------------------------------------------------------------------------- cluster
@pytest.fixture
def cluster(redis_cluster: services.RedisCluster) -> Iterator[Any]:
    client = redis.RedisCluster(*next(_hosts(redis_cluster.url)))
    yield client
    client.close()


@awaited
async def test_cluster_one_slot_for_orders_and_messages(
    redis_cluster: services.RedisCluster, cluster: Any
) -> None:
    table = f"c{time.time_ns()}"
    outbox, book = Outbox(redis_cluster.url, table=table, parts=8), Book()
    host, port = cluster.get_default_node().host, cluster.get_default_node().port
    loose = redis.asyncio.RedisCluster(host, port)
    for n, key in enumerate(("a", "b", "a", "c")):
        order = f"{outbox.tag(key)}:order"
        with cluster.pipeline(transaction=True) as pipe:
            pipe.set(order, n)
            outbox.add(pipe, Message("t", n, key=key, id=f"m{n}"), Message("t", n, id=f"free{n}"))
            assert pipe.execute() == [True, 1, 1]
        async with loose.pipeline(transaction=True) as async_pipe:
            async_pipe.set(order, n)  # type: ignore[unused-awaitable]  # it queues, and is not awaited
            outbox.add(async_pipe, Message("t", n, key=key, id=f"async{n}"))
            assert await async_pipe.execute() == [True, 1]
        with cluster.pipeline(transaction=True) as pipe:
            pipe.set(order, "conflict")
            outbox.add(pipe, Message("t", "other", key=key, id=f"m{n}"))
            with pytest.raises(KeyMismatch):
                pipe.execute()
        assert cluster.get(order) == b"%d" % n
    relay = Relay(outbox, {"t": book}, lease=2)
    report = await relay.drain()
    assert (report.sent, report.pending) == (12, {})
    assert [i for i in book.ids if i in {"m0", "async0", "m2", "async2"}] == ["m0", "async0", "m2", "async2"]
    await loose.aclose()
    outbox.close()


def test_cluster_a_message_without_a_key_goes_where_its_transaction_is(
    redis_cluster: services.RedisCluster, cluster: Any
) -> None:
    outbox = Outbox(redis_cluster.url, table=f"c{time.time_ns()}", parts=8)
    for n in range(4):  # one way or another each of them would belong elsewhere
        with cluster.pipeline(transaction=True) as pipe:
            pipe.set(f"{outbox.tag('a')}:order", n)
            outbox.add(pipe, Message("t", n))
            assert pipe.execute() == [True, 1]
        with cluster.pipeline(transaction=True) as pipe:
            outbox.add(pipe, Message("t", n))
            assert pipe.execute() == [1]
    outbox.close()


def test_cluster_a_slot_that_was_moved_is_found(redis_cluster: services.RedisCluster, cluster: Any) -> None:
    """The client's map is out of date: nothing is applied at the wrong node, and the right one is asked."""
    outbox = Outbox(redis_cluster.url, table=f"c{time.time_ns()}", parts=8)
    order = f"{outbox.tag('a')}:order"
    cache, slot = cluster.nodes_manager.slots_cache, cluster.keyslot(order)
    cache[slot] = next(nodes for nodes in cache.values() if nodes[0] != cache[slot][0])
    with cluster.pipeline(transaction=True) as pipe:
        pipe.incr(order)
        outbox.add(pipe, Message("t", 1, key="a"))
        assert pipe.execute() == [1, 1]
    assert cluster.get(order) == b"1"
    outbox.close()


def test_cluster_another_slot_is_refused(redis_cluster: services.RedisCluster, cluster: Any) -> None:
    outbox = Outbox(redis_cluster.url, table=f"c{time.time_ns()}", parts=8)
    with cluster.pipeline(transaction=True) as pipe:
        pipe.set("{elsewhere}:order", 1)
        outbox.add(pipe, Message("t", 1, key="a"))
        with pytest.raises(ConfigurationError, match=r"outbox\.tag\(key\)"):
            pipe.execute()
    with cluster.pipeline(transaction=True) as pipe:
        pipe.set("{elsewhere}:order", 1)
        pipe.set("{nowhere}:order", 1)
        outbox.add(pipe, Message("t", 1))
        with pytest.raises(ConfigurationError, match="one hash tag"):
            pipe.execute()
    with cluster.pipeline(transaction=True) as pipe:
        outbox.add(pipe, Message("t", 1))
        pipe.reset()
        pipe.set("{elsewhere}:other", 1)
        assert len(pipe.execute()) == 1
    with pytest.raises(ConfigurationError, match="transaction=False"):
        outbox.add(cluster.pipeline(), Message("t", 1))
    with pytest.raises(ConfigurationError, match="hash tags"):
        Outbox("sqlite:///nowhere.db").tag("a")
    assert cluster.exists("{elsewhere}:order") == 0
    outbox.close()


def test_cluster_within(redis_cluster: services.RedisCluster, cluster: Any) -> None:
    """A record is in its shard's slot; the part with the same hash tag takes its messages."""
    prefix = f"c{time.time_ns()}"
    outbox = Outbox(redis_cluster.url, table=prefix, parts=1024)
    with Semel(redis_cluster.url, prefix=prefix) as once:
        pipe = cluster.pipeline(transaction=True)
        balance = f"{once.tag('k')}:balance"

        def work() -> int:
            pipe.set(balance, 7)
            outbox.add(current_run(), Message("t", 1, id="m"))
            return 7

        assert once.within(pipe).execute("k", work).value == 7
        assert once.within(pipe).execute("k", work).replayed
        assert cluster.get(balance) == b"7"

        def keyed() -> None:
            outbox.add(current_run(), Message("t", 2, key="elsewhere"))

        with pytest.raises(ConfigurationError, match="another slot"):
            once.within(pipe).execute("k2", keyed)
    waiting = asyncio.run(outbox.home.ledger("relay").run(lambda page: page.pending()))
    assert waiting == {"t": 1}
    outbox.close()


def test_a_program_that_knows_another_division_is_refused_before_anything_is_applied(
    place: RedisPlace,
) -> None:
    early = place.outbox(parts=8)
    late = place.outbox(parts=4)  # nothing was added yet
    with (
        place.client.pipeline() as pipe,
        pytest.raises(ConfigurationError, match="divided into 4 parts since"),
    ):
        pipe.set(f"{place.table}-order", 1)
        early.add(pipe, Message("t", 1, key="k"))
        pipe.execute()
    assert place.client.get(f"{place.table}-order") is None
    early.close()
    late.close()


def test_the_division_in_a_cluster_is_fixed_when_it_is_made(redis_cluster: Any) -> None:
    table = f"c{time.time_ns()}"
    outbox = Outbox(redis_cluster.url, table=table, parts=8)
    outbox.create()
    with pytest.raises(ConfigurationError, match="divided into 8 parts, and parts=16 was given"):
        Outbox(redis_cluster.url, table=table, parts=16).create()
    outbox.close()
