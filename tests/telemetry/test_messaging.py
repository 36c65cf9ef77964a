"""Figures of outbox, relay and inbox, scraped over HTTP from real runs: what goes wrong is a series."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from semel import CodecError, ConfigurationError, KeyMismatch
from semel.cli.relay import relay as command
from semel.messaging import Inbox, Message, Outbox, Rejected, Relay, Row
from semel.telemetry.relays import exposed, health
from semel.telemetry.server import MetricsServer, address
from semel.testing import services
from tests.telemetry.conftest import Figures, awaited, until

SEMEL = str(Path(sys.executable).with_name("semel"))


@dataclass
class Shop:
    """An outbox in a file, a stream on the server, and the hook in all of them."""

    url: str
    engine: Engine
    outbox: Outbox
    sink: str
    figures: Figures

    def send(self, *messages: Message) -> None:
        with Session(self.engine) as session, session.begin():
            self.outbox.add(session, *messages)

    @asynccontextmanager
    async def running(self, relay: Relay) -> AsyncIterator[httpx.AsyncClient]:
        """The relay runs; what it serves can be asked for."""
        async with exposed(relay, self.figures.hook, "127.0.0.1", 0, every=0.05) as server:
            task = asyncio.create_task(relay.run())
            try:
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
                    yield client
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await relay.aclose()


@pytest.fixture
def shop(tmp_path: Path, redis_server: services.RedisServer, figures: Figures) -> Iterator[Shop]:
    url = f"sqlite:///{tmp_path}/shop.db"
    outbox = Outbox(url, parts=4, max_body=1000, hooks=[figures.hook])
    outbox.create()
    made = Shop(
        url, create_engine(url), outbox, f"{redis_server.url}?stream=s{uuid.uuid4().hex[:8]}", figures
    )
    yield made
    made.engine.dispose()
    outbox.close()


async def scraped(client: httpx.AsyncClient) -> dict[tuple[str, tuple[str, ...]], float]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@awaited
async def test_a_relay_with_a_poison_message_can_be_watched(shop: Shop) -> None:
    def handle(row: Row) -> None:
        if row.id == "poison":
            raise Rejected({row.id: "I will not"})

    relay = Relay(
        shop.outbox,
        {"orders": shop.sink, "mails": handle},
        max_attempts=2,
        backoff=(0.01, 0.02),
        hooks=[shop.figures.hook],
    )
    shop.send(*(Message("orders", {"n": n}) for n in range(20)))
    shop.send(Message("mails", {}, id="poison", key="k"), Message("mails", {}, key="k"), Message("mails", {}))
    async with shop.running(relay) as client:
        await until(lambda: shop.figures("semel_relay_parked_keys") == 1)
        await until(lambda: shop.figures("semel_relay_sent_total", route="orders") == 20)
        await until(lambda: shop.figures("semel_relay_backlog", topic="mails") == 2)
        found = await scraped(client)
        well = await client.get("/health")
        assert (await client.get("/elsewhere")).status_code == 404
    assert found["semel_relay_sent_total", ("mails",)] == 1
    assert found["semel_relay_declined_total", ("mails", "mails")] == 2
    assert found["semel_relay_parked_total", ("mails",)] == 1
    assert found["semel_relay_backlog", ("mails",)] == 2
    assert found["semel_relay_lag_seconds", ()] > 0
    assert found["semel_relay_parts", ()] == 4
    assert found["semel_relay_publish_seconds_count", ("orders",)] >= 1
    assert well.status_code == 200
    assert well.json()["status"] == "ok"
    assert health(relay)["relay"] == relay.id


@awaited
async def test_a_topic_that_nobody_knows_and_a_backlog_that_goes_are_told(shop: Shop) -> None:
    relay = Relay(shop.outbox, {"orders": shop.sink}, hooks=[shop.figures.hook])
    shop.send(Message("orders", {}), Message("surprise", {}))
    async with shop.running(relay):
        await until(lambda: shop.figures("semel_relay_unroutable", topic="surprise") == 1)
        await until(lambda: shop.figures("semel_relay_backlog", topic="surprise") == 1)
        assert shop.figures("semel_relay_alarms_total", what="unroutable") == 1
        with shop.engine.begin() as connection:
            connection.execute(text("DELETE FROM semel_outbox WHERE topic = 'surprise'"))
        await until(lambda: shop.figures("semel_relay_unroutable", topic="surprise") == 0)
        await until(lambda: shop.figures("semel_relay_backlog", topic="surprise") == 0)


@awaited
async def test_the_backlog_of_an_outbox_in_redis_is_told_too(
    redis_server: services.RedisServer, figures: Figures
) -> None:
    outbox = Outbox(redis_server.url, table=f"t{uuid.uuid4().hex[:8]}", parts=4, hooks=[figures.hook])
    with redis.Redis.from_url(redis_server.url) as client, client.pipeline() as pipe:
        outbox.add(pipe, Message("orders", {}), Message("surprise", {}))
        pipe.execute()
        async with Relay(outbox, {"orders": lambda _: None}, hooks=[figures.hook]) as relay:
            await relay.drain()
            found = await relay.backlog()
    assert (found.pending, found.unroutable) == ({"surprise": 1}, ("surprise",))
    assert figures("semel_relay_unroutable", topic="surprise") == 1
    assert figures("semel_relay_lag_seconds") > 0
    outbox.close()


@awaited
async def test_wrong_credentials_and_a_full_broker_pause_the_sink(shop: Shop) -> None:
    with services.redis(password="secret") as locked, services.redis(config={"maxmemory": "1"}) as small:
        stranger = f"redis://:wrong@127.0.0.1:{locked.port}/0?stream=s"
        relay = Relay(
            shop.outbox, {"orders": stranger, "mails": f"{small.url}?stream=s"}, hooks=[shop.figures.hook]
        )
        shop.send(Message("orders", {}), Message("mails", {}))
        async with shop.running(relay) as client:
            await until(lambda: shop.figures("semel_relay_paused", route="orders") == 1)
            await until(lambda: shop.figures("semel_relay_paused", route="mails") == 1)
            assert shop.figures("semel_relay_pauses_total", route="mails") >= 1
            assert shop.figures("semel_relay_alarms_total", what="configuration") >= 1
            told = await client.get("/health")
            assert told.status_code == 200, "a broker that is away is no reason to kill the relay"
            assert told.json()["status"] == "degraded"
            assert told.json()["paused"] == ["mails", "orders"]
            with redis.Redis.from_url(small.url) as room:
                room.config_set("maxmemory", 0)
            await until(lambda: shop.figures("semel_relay_paused", route="mails") == 0)
            await until(lambda: shop.figures("semel_relay_sent_total", route="mails") == 1)


def test_what_an_outbox_refuses_is_counted_by_its_reason(shop: Shop) -> None:
    refused = "semel_outbox_refused_total"
    with Session(shop.engine) as session, session.begin():
        with pytest.raises(ConfigurationError, match="max_body=1000"):
            shop.outbox.add(session, Message("orders", "x" * 2000))
        with pytest.raises(CodecError):
            shop.outbox.add(session, Message("orders", {"what": object()}))
    with Session(shop.engine) as session, pytest.raises(ConfigurationError, match="no transaction"):
        shop.outbox.add(session, Message("orders", {}))
    shop.send(Message("orders", {"n": 1}, id="m"))
    with pytest.raises(KeyMismatch):
        shop.send(Message("orders", {"n": 2}, id="m"))
    for what in ("too-large", "malformed", "configuration", "conflict"):
        assert shop.figures(refused, topic="orders", what=what) == 1, what
    with pytest.raises(OperationalError, match="full"), Session(shop.engine) as session, session.begin():
        pages = session.execute(text("PRAGMA page_count")).scalar()
        session.execute(text(f"PRAGMA max_page_count = {pages}"))
        for _ in range(50):
            shop.outbox.add(session, Message("orders", "x" * 900))
    assert shop.figures(refused, topic="orders", what="database") == 1


@awaited
async def test_a_consumer_is_counted_with_its_duplicates_conflicts_and_dead_letters(shop: Shop) -> None:
    inbox = Inbox(shop.url, consumer="shipping", hooks=[shop.figures.hook])
    tried: list[str] = []

    @inbox.handler("orders", max_attempts=2, backoff=(0.01, 0.02))
    def ship(session: Session, message: Message) -> None:
        tried.append(message.id)
        if message.id == "bad":
            raise ValueError("cannot")

    shop.send(*(Message("orders", {"n": n}, id=f"m{n}") for n in range(3)), Message("orders", {}, id="bad"))
    shop.send(Message("surprise", {}))
    async with Relay(shop.outbox, {"*": shop.sink}) as relay:
        await relay.drain()
    address_, _, stream = shop.sink.partition("?stream=")
    with redis.Redis.from_url(address_) as client:
        for body in (b'{"n":0}', b'{"n":99}'):  # a duplicate, and another message under a known id
            client.xadd(stream, {"id": "m0", "topic": "orders", "key": "", "headers": "{}", "data": body})
    task = asyncio.create_task(inbox.run(shop.sink))
    where = {"consumer": "shipping", "topic": "orders"}
    await until(lambda: shop.figures("semel_inbox_dead_letters_total", what="ValueError", **where) == 1)
    await until(lambda: shop.figures("semel_inbox_dead_letters_total", what="KeyMismatch", **where) == 1)
    await until(lambda: shop.figures("semel_inbox_admitted_total", **where) == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert shop.figures("semel_inbox_duplicates_total", **where) == 1
    assert shop.figures("semel_inbox_conflicts_total", **where) == 1
    assert shop.figures("semel_inbox_failures_total", error="ValueError", **where) == 2
    assert shop.figures("semel_inbox_handling_seconds_count", **where) == 4
    lost = {"consumer": "shipping", "topic": "surprise"}
    assert shop.figures("semel_inbox_dead_letters_total", what="unhandled", **lost) == 1
    assert tried.count("bad") == 2
    inbox.close()


@awaited
async def test_a_relay_whose_database_is_gone_is_failing(shop: Shop) -> None:
    relay = Relay(shop.outbox, {"orders": shop.sink}, lease=0.2, hooks=[shop.figures.hook])
    assert health(relay)["status"] == "failing", "it never ran"
    async with shop.running(relay) as client:
        await until(lambda: health(relay)["status"] == "ok")
        holder = shop.engine.connect()
        holder.exec_driver_sql("BEGIN EXCLUSIVE")  # nobody else reads or writes the file
        await until(lambda: health(relay)["status"] == "failing")
        assert (await client.get("/health")).status_code == 503
        holder.rollback()
        holder.close()
        await until(lambda: health(relay)["status"] == "ok")


# ------------------------------------------------------------------------------------------------------- the command
def test_the_command_serves_its_figures(shop: Shop) -> None:
    shop.send(Message("orders", {}), Message("surprise", {}))
    called = [
        SEMEL, "relay", shop.url, "--route", f"orders={shop.sink}", "--metrics", "127.0.0.1:0",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with subprocess.Popen(called, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            lines = (re.search(r"metrics at (http://\S+)/metrics", line) for line in process.stdout)
            asyncio.run(look(next(found[1] for found in lines if found)))
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0
    assert "sent 1" in rest


async def look(place: str) -> None:
    async with httpx.AsyncClient(base_url=place) as client, asyncio.timeout(20):
        alarm, sent = ("semel_relay_alarms_total", ("unroutable",)), ("semel_relay_sent_total", ("orders",))
        while not {alarm, sent} <= (await scraped(client)).keys():
            await asyncio.sleep(0.05)
        assert (await client.get("/health")).json()["status"] == "ok"


def test_the_command_refuses_what_makes_no_sense(shop: Shop) -> None:
    routes = [f"orders={shop.sink}"]
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        command(shop.url, routes, metrics="nonsense")
    with pytest.raises(ConfigurationError, match="--drain"):
        command(shop.url, routes, metrics=":0", drain=True)


def test_an_address_is_a_host_and_a_port(figures: Figures) -> None:
    assert address("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert address("9464") == address(":9464") == ("127.0.0.1", 9464)
    assert address("[::1]:9464") == ("::1", 9464)
    with (
        MetricsServer("127.0.0.1", 0, figures.registry, lambda: {"status": "ok"}) as taken,
        pytest.raises(ConfigurationError, match="cannot be served"),
    ):
        MetricsServer("127.0.0.1", taken.port, figures.registry, lambda: {"status": "ok"})
