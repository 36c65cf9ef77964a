"""One endpoint of a sink that is away stops what goes there, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest
import redis

from semel.messaging import Message, Outbox, Relay, Route, Row, SinkUnavailable
from semel.messaging.away import Away
from semel.messaging.events import RelayEvent, SinkBack, SinkPaused
from semel.messaging.pages import Lane, State
from semel.messaging.parts import Part, Shipment
from semel.messaging.routes import Router
from semel.messaging.sink import Guarantee
from semel.messaging.sinks.webhook import WebhookSink
from semel.testing import services
from semel.testing.services import home as ports
from semel.testing.sinks import rows
from tests.messaging.books import Book
from tests.messaging.conftest import Home, RedisPlace, awaited
from tests.messaging.test_sinks_http import serving

Place = Home | RedisPlace


def fill(place: Place, outbox: Outbox, tenant: str, count: int, keys: int = 3) -> list[str]:
    ids = [f"{tenant}-{n:03}" for n in range(count)]
    with place.transaction() as session:
        for n, name in enumerate(ids):
            outbox.add(session, Message("orders", {"n": n}, key=f"k{n % keys}", id=name, tenant=tenant))
    return ids


@contextlib.asynccontextmanager
async def running(relay: Relay) -> AsyncIterator[None]:
    task = asyncio.create_task(relay.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await relay.aclose()
        relay.outbox.close()


async def until(said: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not said():
            await asyncio.sleep(0.01)


def in_order(ids: Sequence[str]) -> bool:
    """Each key's messages arrived in the order of their numbers: key and number are in the id."""
    numbers = [int(name.rpartition("-")[2]) for name in ids]
    return all(
        sorted(n for n in numbers if n % 3 == key) == [n for n in numbers if n % 3 == key] for key in range(3)
    )


@awaited
async def test_a_dead_endpoint_stops_its_own_messages_and_no_others(place: Place) -> None:
    """Two HTTP servers behind one route, nobody at one of the ports at first; its messages are first in line and many more
    than a batch, in the same part as the others."""
    outbox, dead = place.outbox(parts=1), str(ports.free_port())
    told: list[RelayEvent] = []
    with serving() as alive:
        port = alive.url.rpartition(":")[2].partition("/")[0]
        waiting, flowing = fill(place, outbox, dead, 40), fill(place, outbox, port, 40)
        routes = {"orders": "http://127.0.0.1:{tenant}/hooks"}
        relay = Relay(outbox, routes, batch=10, fair=False, hooks=[told.append], poll=(0.005, 0.05))
        async with running(relay):
            await until(lambda: len(alive.requests) == 40)
            assert not await relay.backing_off()
            assert not await relay.parked(), "no attempt is counted while it is down"
            assert relay.paused == [f"orders (http://127.0.0.1:{dead}/hooks)"]
            more = fill(place, outbox, port, 45)[40:]
            await until(lambda: len(alive.requests) == 45)
            with serving(int(dead)) as back:
                await until(lambda: len(back.requests) == 40)
                await until(lambda: not relay.paused)
                assert sorted(back.ids) == waiting
                assert in_order(back.ids)
        assert sorted(alive.ids) == flowing + more
        assert in_order(alive.ids)
    assert {(event.name, event.endpoint) for event in told if isinstance(event, SinkPaused)} == {
        ("orders", f"http://127.0.0.1:{dead}/hooks")
    }
    assert [event.left for event in told if isinstance(event, SinkBack)] == [0]


@awaited
async def test_an_endpoint_that_hangs_keeps_nobody_waiting(sqlite_home: Home) -> None:
    """It takes requests and does not answer. A round goes on without it; what is behind it waits in order."""
    outbox, answering = sqlite_home.outbox(parts=2), threading.Event()
    with serving() as alive, serving() as hanging:

        def held(*_: object) -> tuple[int, dict[str, str]]:
            answering.wait(30)
            return 200, {}

        hanging.answer = held
        names = [one.url.rpartition(":")[2].partition("/")[0] for one in (hanging, alive)]
        waiting = fill(sqlite_home, outbox, names[0], 30)
        flowing = fill(sqlite_home, outbox, names[1], 30)
        sink = WebhookSink("http://127.0.0.1:{tenant}/hooks", concurrency=2)
        relay = Relay(outbox, {"orders": sink}, batch=5, fair=False, poll=(0.005, 0.05))
        async with sink, running(relay):
            await until(lambda: len(alive.requests) == 30)
            assert not hanging.requests
            answering.set()
            await until(lambda: len(hanging.requests) == 30)
        assert (sorted(alive.ids), sorted(hanging.ids)) == (flowing, waiting)
        assert in_order(hanging.ids)


@awaited
async def test_a_drain_waits_for_what_is_slow_and_leaves_what_is_away(sqlite_home: Home) -> None:
    outbox, dead = sqlite_home.outbox(parts=1), str(ports.free_port())
    with serving() as slow:
        slow.answer = lambda *_: (threading.Event().wait(0.3), (200, {}))[1]
        port = slow.url.rpartition(":")[2].partition("/")[0]
        fill(sqlite_home, outbox, dead, 5)
        sent = fill(sqlite_home, outbox, port, 5)
        async with Relay(outbox, {"orders": "http://127.0.0.1:{tenant}/hooks"}, batch=2) as relay:
            report = await relay.drain()
            outbox.close()
        assert sorted(slow.ids) == sent
        assert (report.sent, report.pending) == (5, {"orders": 5})
        assert report.unavailable == (f"orders (http://127.0.0.1:{dead}/hooks)",)


@awaited
async def test_where_a_message_goes_is_decided_by_what_is_sent(sqlite_home: Home) -> None:
    """A transform that changes the topic changes the endpoint, for each message of a batch."""
    outbox = sqlite_home.outbox(parts=1)
    fill(sqlite_home, outbox, "acme", 6)

    def by_key(row: Row) -> Row:
        return msgspec.structs.replace(row, topic=f"to-{row.key}")

    with serving() as endpoint:
        async with Relay(outbox, {"orders": Route(f"{endpoint.url}/{{topic}}", transform=by_key)}) as relay:
            assert (await relay.drain()).sent == 6
            outbox.close()
    got = {(path.rpartition("/")[2], headers["semel-key"]) for path, headers, _ in endpoint.requests}
    assert got == {("to-k0", "k0"), ("to-k1", "k1"), ("to-k2", "k2")}


# -- what is passed over ----------------------------------------------------------------------------------------------
class Hooks:
    """A sink with an endpoint for each topic, or tenant."""

    guarantee: Guarantee = "at-least-once"

    def __init__(self, by: str) -> None:
        self.splits = (by,)
        self._by = by

    def lane(self, row: Row) -> str:
        return str(getattr(row, self._by))

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        raise SinkUnavailable("nobody there", endpoint="x")


def paused(router: Router, topic: str, tenant: str = "acme") -> Away:
    row = msgspec.structs.replace(rows(1, topic=topic)[0], tenant=tenant)
    target = router.of(row)[0]  # type: ignore[index]  # the topic has a route
    away = Away(lambda _: None)
    away.pause(Shipment(0, 1, target.lane(row), 1, [row], target), "nobody there", 60, "x")
    return away


@pytest.mark.parametrize(
    ("by", "topics", "tenant"),
    [("topic", {"orders", "stock"}, None), ("tenant", {"orders", "bills", "stock"}, "acme")],
)
def test_messages_that_would_overtake_at_another_sink_wait_as_well(
    by: str, topics: set[str], tenant: str | None
) -> None:
    """Orders go to the hooks and to a book, stock to the book only: with the hooks away, stock of the same key must not be
    in the book before the order. Bills go to the hooks only: to another endpoint if topics have their own."""
    hooks, book = Hooks(by), Hooks("key")
    router = Router(
        {"orders": [hooks, Route(book, name="book")], "bills": hooks, "stock": Route(book, name="book2")}
    )
    known = {topic: router.ways(topic) for topic in ("orders", "bills", "stock", "mail")}
    away = paused(router, "orders")
    (shut,) = away.shut(known, [], {target.way: target for target in router.targets})
    assert (set(shut.topics), shut.tenant, shut.key) == (topics, tenant, None)
    assert not away.topics(known)


def test_too_many_endpoints_that_are_away_pause_their_sink() -> None:
    router = Router({"orders": Hooks("tenant"), "mail": Hooks("topic")})
    known = {topic: router.ways(topic) for topic in ("orders", "mail")}
    away = paused(router, "orders")
    targets = {target.way: target for target in router.targets}
    for n in range(500):
        row = msgspec.structs.replace(rows(1)[0], tenant=f"t{n}")
        away.pause(Shipment(0, 1, f"orders/t{n}", 1, [row], targets["orders"]), "nobody there", 60, "x")
    assert away.topics(known) == {"orders"}
    assert not away.shut(known, [], targets)


def test_one_batch_tries_first_when_a_pause_is_over() -> None:
    router = Router({"orders": Hooks("tenant")})
    row = msgspec.structs.replace(rows(1)[0], tenant="acme")
    target = router.targets[0]
    away = Away(lambda _: None)
    here = [Shipment(part, 1, "orders/acme", 1, [row], target) for part in range(3)]
    elsewhere = Shipment(0, 1, "orders/other", 1, [row], target)
    away.pause(here[0], "nobody there", 1e-9, "x")
    assert away.sift([*here, elsewhere]) == [here[1], elsewhere], "not the one that failed"
    away.begins(here[1])
    assert away.sift([*here, elsewhere]) == [elsewhere]
    away.ended(1, "orders/acme")
    assert away.sift(here[:1]) == here[:1], "unless there is no other"
    part = Part(0, 1, State())
    assert not away.shut({"orders": {"orders"}}, [part], {"orders": target}), "over, and nothing is under way"
    part.state.lanes["orders/acme"] = Lane(no=1, open=[1])
    assert away.shut({"orders": {"orders"}}, [part], {"orders": target})
    away.back(here[0])
    assert not away


@awaited
async def test_a_message_that_its_endpoint_falls_over_is_to_blame_alone(sqlite_home: Home) -> None:
    """The endpoint drops the connection for one message, and takes all others, also those that come later."""
    outbox = sqlite_home.outbox(parts=1)
    with serving() as endpoint:
        endpoint.answer = lambda _, headers, __: (503 if headers["webhook-id"] == "bad" else 200, {})
        with sqlite_home.transaction() as session:
            outbox.add(session, Message("orders", 0, key="bad", id="bad"))
        sink = WebhookSink(endpoint.url)
        relay = Relay(outbox, {"orders": sink}, backoff=(60, 60), poll=(0.005, 0.02))
        async with sink, running(relay):
            await until(lambda: bool(relay.paused))
            with sqlite_home.transaction() as session:
                for n in range(6):
                    outbox.add(session, Message("orders", n, key=f"k{n % 3}", id=f"m{n}"))
            await until(lambda: len(endpoint.requests) == 6)
            await until(lambda: not relay.paused)
            (line,) = await relay.backing_off()
            assert (line.id, line.attempts) == ("bad", 1)
            assert "takes others" in line.reason


@awaited
async def test_a_stream_that_is_none_stops_its_own_messages(
    sqlite_home: Home, redis_server: services.RedisServer
) -> None:
    client, name = redis.Redis.from_url(redis_server.url), f"s{uuid.uuid4().hex[:8]}"
    client.set(f"{name}-bad", "a string")
    with sqlite_home.outbox(parts=1) as outbox:
        with sqlite_home.transaction() as session:
            outbox.add(session, *(Message(topic, 1) for topic in ("bad", "bad", "good", "good")))
        async with Relay(outbox, {"*": f"{redis_server.url}?stream={name}-{{topic}}"}) as relay:
            report = await relay.drain()
        assert (report.sent, report.pending) == (2, {"bad": 2})
        assert report.unavailable == (f"* (stream {name}-bad)",)
    client.close()


@awaited
async def test_a_lane_that_fails_alone_is_found_out_and_paused_alone(sqlite_home: Home) -> None:
    """By a sink that does not say which of its places is away."""

    class Halls(Book):
        def lane(self, row: Row) -> str:
            return row.topic

        async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
            if rows[0].topic == "bad":
                raise SinkUnavailable("the hall is locked")
            self.frontier.pop(part, None)  # of another hall
            self.frontier[part] = batch - 1
            return await super().publish(part, epoch, batch, rows)

    outbox, halls = sqlite_home.outbox(parts=1), Halls()
    relay = Relay(outbox, {"*": halls}, poll=(0.005, 0.02), batch=2)
    with sqlite_home.transaction() as session:
        outbox.add(session, *(Message("bad", n, key="b") for n in range(5)), Message("good", 0, id="g0"))
    async with running(relay):
        await until(lambda: "g0" in halls.ids)
        await until(lambda: relay.paused == ["* (*/bad)"])
        for n in range(1, 4):
            with sqlite_home.transaction() as session:
                outbox.add(session, Message("good", n, id=f"g{n}"))
            await until(lambda n=n: f"g{n}" in halls.ids)  # type: ignore[misc]  # the number of this turn of the loop
        assert not await relay.backing_off()
