"""Large bodies of an outbox in Redis: stored before the EXEC, never removed while their message may be committed."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from semel import ConfigurationError, KeyMismatch, Semel, StoreUnavailable
from semel.messaging import Inbox, Message, Outbox, Relay
from semel.messaging.bodies import HEADER, BodyStore, Reference, Stored
from semel.messaging.bodies.files import FileBodies
from semel.testing import services
from tests.messaging.books import Book
from tests.messaging.conftest import Home, RedisPlace, awaited, redis_place


@pytest.fixture
def place(redis_server: services.RedisServer) -> Iterator[RedisPlace]:
    made = redis_place(redis_server)
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path) -> FileBodies:
    (tmp_path / "bodies").mkdir()
    return FileBodies(tmp_path / "bodies")


def large(word: str = "x") -> dict[str, str]:
    return {"text": word * 500, "of": "ä"}


def opened(place: RedisPlace, store: Any, **options: Any) -> Outbox:
    return place.outbox(claim_check=store, claim_over=100, **options)


def add(place: RedisPlace, outbox: Outbox, *messages: Message) -> None:
    with place.transaction() as pipe:
        outbox.add(pipe, *messages)


def names(store: BodyStore, outbox: Outbox) -> set[str]:
    return {body.name for body in store.stored(outbox.home.identity[:16])}


async def carried(outbox: Outbox) -> list[Message]:
    book = Book()
    async with Relay(outbox, {"*": book}) as relay:
        await relay.drain()
    return [row.message() for row in book.rows]


class Between:
    """A store in whose `put`, after the body is there, something happens: its message is not committed yet."""

    def __init__(self, store: BodyStore, happens: Callable[[], None]) -> None:
        self.store = store
        self.happens = happens
        self.puts: list[str] = []

    def put(self, name: str, data: bytes) -> None:
        self.store.put(name, data)
        self.puts.append(name)
        self.happens()

    def get(self, name: str) -> bytes:
        return self.store.get(name)

    def delete(self, name: str) -> None:
        self.store.delete(name)

    def stored(self, home: str) -> Iterator[Stored]:
        return self.store.stored(home)


# ------------------------------------------------------------------------------------------------ adding
@pytest.mark.parametrize("colour", ["sync", "async"])
@awaited
async def test_a_large_body_travels_as_a_reference_and_comes_back(
    place: RedisPlace, files: FileBodies, sqlite_home: Home, colour: str
) -> None:
    outbox = opened(place, files)
    messages = [
        Message("scans", large(), id="m1"),
        Message("scans", b"\x00" * 500, id="m2", headers={"a": "b"}),
        Message("scans", large(), id="m3", due=0.01),
        Message("scans", {"n": 1}, id="m4"),
    ]
    if colour == "sync":
        add(place, outbox, *messages)
    else:
        client = redis.asyncio.Redis.from_url(place.url)
        async with client.pipeline() as pipe:
            outbox.add(pipe, *messages)
            await pipe.execute()
        await client.aclose()
    assert len(names(files, outbox)) == 3, "each message has a body of its own"
    await asyncio.sleep(0.02)
    found = {message.id: message for message in await carried(outbox)}
    assert [len(found[name].data) < 300 for name in ("m1", "m2", "m3", "m4")] == [True] * 4
    assert HEADER not in found["m4"].headers
    inbox = Inbox(sqlite_home.url, consumer="c", table=sqlite_home.table, claim_check=files)
    seen: dict[Any, Any] = {}
    with sqlite_home.transaction() as session:
        for message in found.values():
            inbox.process(session, message, lambda message: seen.update({message.id: message.body}))
    assert seen == {"m1": large(), "m2": b"\x00" * 500, "m3": large(), "m4": {"n": 1}}
    assert found["m2"].headers["a"] == "b"
    inbox.close()
    outbox.close()


@awaited
async def test_functions_get_the_body(place: RedisPlace, files: FileBodies) -> None:
    outbox = opened(place, files)
    add(place, outbox, Message("scans", large(), id="m1"))
    got: list[Message] = []
    async with Relay(outbox, {"*": got.append}) as relay:
        await relay.drain()
    assert got[0].body == large()
    outbox.close()


def test_a_known_message_stores_no_second_body_and_another_content_is_a_conflict(
    place: RedisPlace, files: FileBodies
) -> None:
    outbox = opened(place, files)
    add(place, outbox, Message("scans", large(), id="m1"), Message("scans", large(), id="m1"))
    stored = names(files, outbox)
    add(place, outbox, Message("scans", large(), id="m1"))
    with pytest.raises(KeyMismatch):
        add(place, outbox, Message("scans", large("y"), id="m1"))
    assert names(files, outbox) == stored
    assert (len(stored), place.count()) == (1, 1)
    plain = place.outbox()  # the content is the same whether or not the body is kept apart
    add(place, plain, Message("scans", large(), id="m1"))
    assert place.count() == 1
    plain.close()
    outbox.close()


def test_a_store_that_is_away_leaves_nothing_applied(place: RedisPlace, tmp_path: Path) -> None:
    outbox = opened(place, FileBodies(tmp_path / "not" / "mounted"))
    with place.client.pipeline() as pipe:
        pipe.set(f"{place.table}:order", 1)
        outbox.add(pipe, Message("scans", large(), id="m1"))
        with pytest.raises(StoreUnavailable):
            pipe.execute()
    assert place.client.get(f"{place.table}:order") is None
    assert place.count() == place.count("_outbox_ids") == 0
    outbox.close()


def test_inside_within(place: RedisPlace, files: FileBodies) -> None:
    outbox = opened(place, files)
    with Semel(place.url, tenant=place.table) as once, place.client.pipeline() as pipe:
        for _ in range(2):
            once.within(pipe).execute("k", lambda: outbox.add(pipe, Message("scans", large(), id="m1")))
    assert (len(names(files, outbox)), place.count()) == (1, 1)
    outbox.close()


def test_a_table_beside_the_outbox_is_refused(place: RedisPlace) -> None:
    with pytest.raises(ConfigurationError, match=r"no tables.*file:///folder"):
        Outbox(place.url, claim_check="sql")
    with pytest.raises(ConfigurationError, match="claim_over"):
        Outbox(place.url, claim_check="file:///srv/bodies", claim_over=-1)


# --------------------------------------------------------------------------------------------- removing
@awaited
async def test_a_body_goes_when_its_message_was_delivered_and_its_time_is_over(
    place: RedisPlace, files: FileBodies
) -> None:
    outbox = opened(place, files, retention=0.001, claim_retention=0.001)
    patient = opened(place, files)
    add(place, outbox, Message("scans", large(), id="m1"), Message("scans", large(), id="m2", due=60))
    add(place, patient, Message("scans", large(), id="m3"))
    assert await outbox.sweep(grace=-1) == 0, "they wait"
    assert len(await carried(outbox)) == 2
    await asyncio.sleep(0.002)
    await outbox.sweep(grace=-1)  # the relay may have done it
    assert len(names(files, outbox)) == 2, "one waits, the other is kept for a week"
    assert len(place.names("body:*")) == 2
    assert await outbox.sweep(grace=-1) == 0
    patient.close()
    outbox.close()


@awaited
async def test_what_was_stored_and_not_committed_is_swept(place: RedisPlace, files: FileBodies) -> None:
    outbox = opened(place, files)
    add(place, outbox, Message("scans", large(), id="m1"))
    pipe: Any
    with place.client.pipeline() as pipe:
        pipe.execute_command("SET", "one argument only")  # EXEC discards everything
        outbox.add(pipe, Message("scans", large(), id="m2"))
        with pytest.raises(redis.ResponseError):
            pipe.execute()
    assert len(names(files, outbox)) == 2
    assert await outbox.sweep(grace=3600) == 0
    assert await outbox.sweep(grace=-1) == 1
    (left,) = names(files, outbox)
    (message,) = await carried(outbox)
    reference = Reference.of(message)
    assert reference is not None
    assert reference.name == left
    outbox.close()


def test_a_sweep_between_a_body_and_its_message_takes_neither_from_the_other(
    place: RedisPlace, files: FileBodies
) -> None:
    """The body is there, its message is not: to a sweep without grace it is an orphan. The EXEC must notice."""
    other = opened(place, files)
    swept: list[int] = []

    def once_only() -> None:
        if not swept:
            swept.append(swept_by(other))

    store = Between(files, once_only)
    outbox = opened(place, store)
    add(place, outbox, Message("scans", large(), id="m1"))
    assert swept == [1]
    assert len(store.puts) == 2, "it was stored again, under another name"
    assert names(files, outbox) == {store.puts[1]}
    (message,) = asyncio.run(carried(outbox))
    assert Reference.of(message).name == store.puts[1]  # type: ignore[union-attr]  # its body is elsewhere
    other.close()
    outbox.close()


def swept_by(outbox: Outbox) -> int:
    """As another process would: in a thread with a loop of its own."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(outbox.sweep(grace=-1))))
    thread.start()
    thread.join()
    return found[0]


def test_a_sweep_that_sleeps_before_it_removes_takes_nothing_that_was_committed_meanwhile(
    place: RedisPlace, files: FileBodies
) -> None:
    """It found an orphan, and stops. The message is committed. It goes on: the name that it has is nobody's."""
    asleep, wake = threading.Event(), threading.Event()

    class Sleepy(Between):
        def delete(self, name: str) -> None:
            asleep.set()
            assert wake.wait(60)
            super().delete(name)

    sleeper = opened(place, Sleepy(files, lambda: None))
    sweeping = threading.Thread(target=lambda: asyncio.run(sleeper.sweep(grace=-1)))

    def begin() -> None:
        if not sweeping.ident:
            sweeping.start()
            assert asleep.wait(60)

    store = Between(files, begin)
    outbox = opened(place, store)
    add(place, outbox, Message("scans", large(), id="m1"))
    wake.set()
    sweeping.join()
    assert len(store.puts) == 2
    assert names(files, outbox) == {store.puts[1]}
    got: list[Message] = []

    async def drain() -> None:
        async with Relay(outbox, {"*": got.append}) as relay:
            await relay.drain()

    asyncio.run(drain())
    assert got[0].body == large()
    sleeper.close()
    outbox.close()


def test_many_writers_and_sweeps_without_grace_lose_no_body(place: RedisPlace, files: FileBodies) -> None:
    outbox, sweeper = opened(place, files), opened(place, files)
    over = threading.Event()

    def write(number: int) -> None:
        for n in range(15):
            client = redis.Redis.from_url(place.url)
            with client.pipeline() as pipe:
                outbox.add(pipe, Message("scans", large(), id=f"{number}-{n}"))
                pipe.execute()
            client.close()

    async def sweep() -> None:
        while not over.is_set():
            await sweeper.sweep(grace=-1)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    sweeping = threading.Thread(target=lambda: asyncio.run(sweep()))
    for thread in (*writers, sweeping):
        thread.start()
    for thread in writers:
        thread.join()
    over.set()
    sweeping.join()
    got: list[Message] = []

    async def drain() -> None:
        async with Relay(outbox, {"*": got.append}) as relay:
            await relay.drain()

    asyncio.run(drain())
    assert sorted(message.id for message in got) == sorted(f"{a}-{b}" for a in range(3) for b in range(15))
    assert all(message.body == large() for message in got)
    sweeper.close()
    outbox.close()


# ---------------------------------------------------------------------------------------------- cluster
@awaited
async def test_cluster(redis_cluster: services.RedisCluster, files: FileBodies) -> None:
    host, port = redis_cluster.addresses[0]
    client: Any = redis.RedisCluster(host, port)
    table = f"b{uuid.uuid4().hex[:8]}"
    outbox = Outbox(
        redis_cluster.url,
        table=table,
        parts=8,
        claim_check=files,
        claim_over=100,
        retention=0.001,
        claim_retention=0.001,
    )
    outbox.create()
    for number in range(6):
        with client.pipeline(transaction=True) as pipe:
            pipe.set(f"{outbox.tag(f'k{number}')}:order", number)
            outbox.add(pipe, Message("scans", large(), key=f"k{number}"), Message("scans", large()))
            pipe.execute()
    assert len(names(files, outbox)) == 12
    stray = Reference.to(b"body", home=outbox.home.identity[:16], raw=True, mark="003" + "0" * 13).name
    files.put(stray, b"body")
    assert await outbox.sweep(grace=-1) == 1
    got: list[Message] = []
    async with Relay(outbox, {"*": got.append}) as relay:
        await relay.drain()
    assert [message.body for message in got] == [large()] * 12
    await asyncio.sleep(0.002)
    await outbox.sweep(grace=-1)
    assert names(files, outbox) == set()
    client.close()
    outbox.close()
