"""What goes wrong again and again is told once, and what nobody would notice is told at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import text

from semel import StoreUnavailable
from semel.messaging import Message, Outbox, Relay, Route, Row, hearing
from semel.messaging.events import Alarm, DatabaseBack, Declined, Parked, RelayEvent
from semel.messaging.sql_ledger import SqlLedger
from semel.testing.proxy import Proxy
from tests.messaging.books import Book
from tests.messaging.conftest import Home, RedisPlace, awaited

Place = Home | RedisPlace


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def of(told: list[RelayEvent], kind: type[Any]) -> list[Any]:
    return [event for event in told if isinstance(event, kind)]


# -- conditions of routes -------------------------------------------------------------------------------------------
@awaited
async def test_a_condition_that_raises_is_told_and_parks_its_key_at_last(place: Place) -> None:
    outbox, book, told, broken = place.outbox(parts=1), Book(), list[RelayEvent](), True

    def when(row: Row) -> bool:
        if row.key == "bad" and broken:
            raise ValueError("no such field")
        return True

    with place.transaction() as session:
        outbox.add(
            session, *(Message("t", n, key=key, id=f"{key}{n}") for n in range(2) for key in ("bad", "good"))
        )
    routes = {"t": Route(book, when=when)}
    async with Relay(outbox, routes, max_attempts=1, hooks=(told.append,)) as relay:
        report = await relay.drain()
        assert (book.ids, report.rejected, report.parked) == (["good0", "good1"], 1, 1)
        (declined,), (parked,) = of(told, Declined), of(told, Parked)
        assert (declined.message, declined.topic) == ("bad0", "t")
        assert "no such field" in declined.reason
        assert (parked.message, parked.key, parked.attempts) == ("bad0", "bad", 1)
        broken = False
        assert await relay.replay(key="bad") == 1
        assert (await relay.drain()).sent == 2
        assert await relay.parked() == []
    assert book.ids == ["good0", "good1", "bad0", "bad1"]
    outbox.close()


@awaited
async def test_a_condition_that_raised_and_then_leaves_a_message_out_holds_nothing_back(home: Home) -> None:
    outbox, answers = home.outbox(parts=1), list[bool]()

    def when(row: Row) -> bool:
        if not answers:
            raise ValueError("not yet")
        return answers[0]

    with home.transaction() as session:
        outbox.add(session, Message("t", 1, key="k"))
    relay = Relay(outbox, {"t": Route(Book(), when=when)}, max_attempts=1, hooks=())
    await relay.drain()
    answers.append(False)
    await relay.replay()
    await relay.drain()
    assert (home.count(), home.count("_outbox_lines")) == (0, 0)
    outbox.close()


# -- outages --------------------------------------------------------------------------------------------------------
@awaited
async def test_an_outage_of_the_database_is_one_alarm_and_one_end(postgres_home: Home) -> None:
    home, told = postgres_home, list[RelayEvent]()
    home.outbox(parts=4).close()
    with Proxy(home.engine.url.host or "127.0.0.1", home.engine.url.port or 0) as proxy:
        url = home.engine.url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        outbox = Outbox(url, table=home.table)
        relay = Relay(outbox, {"t": Book()}, lease=0.6, hooks=(told.append,))
        running = asyncio.create_task(relay.run())
        await until(lambda: len(relay.parts) == 4)
        proxy.refuse()
        proxy.cut()
        await until(lambda: bool(of(told, Alarm)))
        await asyncio.sleep(1.0)  # three loops ask it all the time
        assert [event.what for event in of(told, Alarm)] == ["database"]
        assert not of(told, DatabaseBack)
        proxy.refuse(refusing=False)
        await until(lambda: bool(of(told, DatabaseBack)) and len(relay.parts) == 4)
        assert len(of(told, DatabaseBack)) == 1
        assert of(told, DatabaseBack)[0].away > 0.9
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        outbox.close()


@awaited
async def test_a_listener_that_found_nobody_at_the_start_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "_BACKOFF", (0.01, 0.01))
    told, woken, stopping = list[RelayEvent](), asyncio.Event(), asyncio.Event()

    class Late:
        """Its Redis answers the third time."""

        asked = 0
        ended = False

        async def listen(self, wake: Callable[[], None]) -> Callable[[], Awaitable[None]]:
            self.asked += 1
            if self.asked < 3:
                raise StoreUnavailable("not yet")
            wake()
            return self.end

        async def end(self) -> None:
            self.ended = True

    late: Any = Late()
    task = asyncio.create_task(hearing.hear(late, woken.set, told.append, stopping))
    async with asyncio.timeout(30):
        await woken.wait()
    stopping.set()
    await task
    assert (late.asked, late.ended) == (3, True)
    assert [event.what for event in of(told, Alarm)] == ["listener"]


# -- clocks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hours", [-3, 3])
@awaited
async def test_how_long_an_id_stays_known_is_told_by_the_servers_clock(
    home: Home, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that waited long is known for a retention from its delivery, whatever the relay's clock says."""
    outbox = home.outbox(retention=3600)
    with home.transaction() as session:
        outbox.add(session, Message("t", 1, id="m1"))
    with home.engine.begin() as connection:  # two hours ago
        connection.execute(text(f"UPDATE {home.table}_outbox SET created = created - 7200"))
        connection.execute(text(f"UPDATE {home.table}_outbox_ids SET at = at - 7200"))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    relay = Relay(outbox, {"t": Book()}, hooks=())
    assert (await relay.drain()).sent == 1
    ledger = relay._ledger
    assert isinstance(ledger, SqlLedger)
    assert await ledger.run(lambda page: page.clean(3600, 0)) == 0
    assert home.count("_outbox_ids") == 1
    outbox.close()
