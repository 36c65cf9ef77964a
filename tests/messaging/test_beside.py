"""A relay that is told another `table=` than its program sends nothing: it says so once, and only where nobody else carries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from typer.testing import CliRunner

from semel.cli.commands import app
from semel.messaging import Message, Outbox, Relay, beside
from semel.messaging.beside import Beside, unserved
from semel.messaging.events import RelayEvent, Unserved
from tests.messaging.books import Book
from tests.messaging.conftest import Home, awaited


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a look may take long, and is to find what is there."""
    monkeypatch.setattr(beside, "_READING", 60)
    monkeypatch.setattr(beside, "_WHOLE", 600.0)


@pytest.fixture
def shop(home: Home) -> Iterator[Home]:
    """Another outbox in the same database, with one message, which nobody carries. It has waited for two minutes."""
    other = Home(home.url, f"{home.table}_shop", home.engine)
    outbox = other.outbox(parts=1)
    with other.transaction() as session:
        outbox.add(session, Message("orders", 1, id="m1"))
    age(other, 120)
    outbox.close()
    yield other
    run(other, "DELETE FROM {t}_outbox", "DELETE FROM {t}_outbox_ids", "DELETE FROM {t}_outbox_parts")


@pytest.fixture
def shop_file(sqlite_home: Home) -> Home:
    """As `shop`, in a file."""
    other = Home(sqlite_home.url, "shop", sqlite_home.engine)
    with other.outbox(parts=1) as outbox, other.transaction() as session:
        outbox.add(session, Message("orders", 1))
    age(other, 120)
    return other


def run(place: Home, *statements: str) -> None:
    with place.engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement.format(t=place.table)))


def age(place: Home, seconds: float) -> None:
    run(place, f"UPDATE {{t}}_outbox SET created = created - {seconds}")


async def seen(place: Home, other: Home) -> list[Unserved]:
    """What is found of that other one: a server of several tests has others still."""
    with place.outbox() as outbox:
        return [found for found in await unserved(outbox) if found.other == other.table]


@awaited
async def test_messages_that_wait_in_another_outbox_are_told_of_with_the_remedy(
    home: Home, shop: Home
) -> None:
    (found,) = await seen(home, shop)
    assert found.oldest >= 120
    assert f"nothing waits in {home.table}_outbox" in found.message
    assert f"semel relay --table {shop.table}" in found.message


@awaited
async def test_nothing_is_said_where_something_waits_here_too(home: Home, shop: Home) -> None:
    with home.outbox() as outbox, home.transaction() as session:
        outbox.add(session, Message("orders", 1))
    assert await seen(home, shop) == []


@awaited
async def test_nothing_is_said_of_an_outbox_that_a_relay_carries_or_carried_lately(
    home: Home, shop: Home
) -> None:
    with shop.outbox() as outbox:
        relay = Relay(outbox, {"bills": Book()}, hooks=())
        running = asyncio.create_task(relay.run())
        async with asyncio.timeout(30):
            while not relay.parts:
                await asyncio.sleep(0.01)
        age(shop, 7200)
        assert await seen(home, shop) == []  # it lives
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(await seen(home, shop)) == 1  # for hours now
    age(shop, -7200)
    assert await seen(home, shop) == []  # a relay that is away for minutes is no news


@awaited
async def test_messages_that_are_young_or_not_due_are_no_news(home: Home, shop: Home) -> None:
    age(shop, -100)
    assert await seen(home, shop) == []
    age(shop, 100)
    run(shop, "UPDATE {t}_outbox SET due = created + 100000")
    assert await seen(home, shop) == []


@pytest.mark.parametrize("waits", ["first", "last"])
@awaited
async def test_a_message_behind_or_before_many_that_are_not_due_is_seen(
    home: Home, shop: Home, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "_FROM_EACH_END", 3)
    with shop.outbox() as outbox, shop.transaction() as session:
        outbox.add(session, *(Message("orders", n, due=86_400) for n in range(9)))
    if waits == "last":
        run(shop, "UPDATE {t}_outbox SET seq = seq + 1000 WHERE id = 'm1'")
    assert len(await seen(home, shop)) == 1
    run(shop, "UPDATE {t}_outbox SET due = created + 100000 WHERE id = 'm1'")
    assert await seen(home, shop) == []


@contextlib.contextmanager
def locked(place: Home) -> Iterator[None]:
    """As by a migration of whoever it belongs to."""
    mysql = place.engine.dialect.name in {"mysql", "mariadb"}
    name = f"{place.table}_outbox"
    with place.engine.connect() as connection:
        connection.execute(
            text(f"LOCK TABLES {name} WRITE" if mysql else f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
        )
        try:
            yield
        finally:
            if mysql:
                connection.execute(text("UNLOCK TABLES"))


def locks_waited_for(engine: Engine) -> set[Any]:
    """The setting of each connection in the pool."""
    pool: Any = engine.pool
    asked = (
        "SHOW lock_timeout" if engine.dialect.name == "postgresql" else "SELECT @@SESSION.lock_wait_timeout"
    )
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(engine.connect()) for _ in range(pool.checkedin())]
        return {connection.execute(text(asked)).scalar() for connection in connections}


@pytest.mark.parametrize("home", ["postgres", "mariadb"], indirect=True)
@awaited
async def test_an_outbox_that_is_locked_is_passed_by_and_holds_nobody_up(home: Home, shop: Home) -> None:
    told: list[RelayEvent] = []
    with home.outbox(parts=1) as outbox:
        engine = outbox.database.engine
        assert engine is not None
        before = locks_waited_for(engine)
        around = Beside(outbox, told.append)
        with locked(shop):
            async with asyncio.timeout(60):
                await around.at_once()
                await Relay(outbox, {"orders": Book()}, hooks=(told.append,)).drain()
            assert shop.table not in [found.other for found in told if isinstance(found, Unserved)]
        assert locks_waited_for(engine) == before
        assert len(before) == 1
        assert shop.table in [found.other for found in await around.find()]  # another time


@awaited
async def test_what_a_relay_parked_is_no_news_nor_what_waits_behind_it(sqlite_home: Home) -> None:
    other = Home(sqlite_home.url, "shop", sqlite_home.engine)

    class Poison(Exception): ...

    async def refuses(message: Message) -> None:
        raise Poison

    with other.outbox(parts=1) as outbox:
        with other.transaction() as session:
            outbox.add(
                session, Message("orders", 1, key="k"), Message("orders", 2, key="k"), Message("orders", 3)
            )
        await Relay(outbox, {"orders": refuses}, max_attempts=1, hooks=()).drain()
    assert other.count("_outbox_lines") == 2
    age(other, 7200)
    assert await seen(sqlite_home, other) == []
    with other.outbox(parts=1) as outbox, other.transaction() as session:
        outbox.add(session, Message("orders", 4))
    age(other, 4000)
    (found,) = await seen(sqlite_home, other)
    assert 4000 <= found.oldest < 7200  # that of the one that nobody ever took


@awaited
async def test_a_relay_that_died_a_while_ago_is_no_news(sqlite_home: Home) -> None:
    """However old its messages are: for so long nobody has carried them."""
    other = Home(sqlite_home.url, "shop", sqlite_home.engine)
    with other.outbox(parts=1) as outbox, other.transaction() as session:
        outbox.add(session, Message("orders", 1))
    age(other, 7200)
    clock = "(SELECT max(created) + 7200 FROM {t}_outbox)"
    run(
        other,
        f"INSERT INTO {{t}}_outbox_relays SELECT 'relay', 'r1', {clock} - 300, 0, ''",
        "INSERT INTO {t}_outbox_parts VALUES ('relay', 0, 1, 'r1', '{{}}')",
    )
    assert await seen(sqlite_home, other) == []
    run(other, "UPDATE {t}_outbox_relays SET until = until - 3500")
    (found,) = await seen(sqlite_home, other)
    assert 3800 <= found.oldest < 7200


@awaited
async def test_relays_that_are_started_together_do_not_accuse_each_other(
    sqlite_home: Home, shop_file: Home
) -> None:
    told: list[RelayEvent] = []
    with sqlite_home.outbox() as outbox:
        around = Beside(outbox, told.append)
        await around.look()
        assert told == []  # the other one may be about to start
        run(shop_file, "DELETE FROM {t}_outbox")
        await around.look()
        assert told == []


@awaited
async def test_what_was_told_of_or_cannot_be_read_is_not_looked_at_again(
    sqlite_home: Home, shop_file: Home
) -> None:
    run(sqlite_home, "CREATE TABLE my_outbox_relays (x int)")
    asked: list[str] = []
    told: list[RelayEvent] = []
    with sqlite_home.outbox() as outbox:
        around = Beside(outbox, told.append)
        event.listen(outbox.database.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
        for _ in range(2):
            await around.look()
        assert [found.other for found in told if isinstance(found, Unserved)] == ["shop"]
        assert any("my_outbox" in each for each in asked)
        asked.clear()
        await around.look()
        assert asked
        assert not [each for each in asked if "shop_outbox" in each or "my_outbox" in each]


@awaited
async def test_drains_in_a_row_look_once(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    find = Beside.find

    async def counted(self: Beside) -> list[Unserved]:
        looks.append(1)
        return await find(self)

    monkeypatch.setattr(Beside, "find", counted)
    with sqlite_home.outbox(parts=1) as outbox:
        relay = Relay(outbox, {"orders": Book()}, hooks=())
        await relay.drain()
        await relay.drain()
    assert len(looks) == 1


@awaited
async def test_a_look_at_many_that_answer_slowly_ends(
    sqlite_home: Home, shop_file: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "_WHOLE", -1.0)
    assert await seen(sqlite_home, shop_file) == []


@awaited
async def test_a_running_relay_says_it_once_and_as_a_warning(
    sqlite_home: Home, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "_EVERY", 0.0)
    monkeypatch.setattr("semel.messaging.tidying._CLEANING", 0.01)
    for name in ("shop", "mail"):
        other = Home(sqlite_home.url, name, sqlite_home.engine)
        with other.outbox(parts=1) as outbox, other.transaction() as session:
            outbox.add(session, Message("orders", 1))
        age(other, 120)
    looks = 0
    look = Beside.look

    async def counted(self: Beside) -> None:
        nonlocal looks
        await look(self)
        looks += 1

    monkeypatch.setattr(Beside, "look", counted)
    with sqlite_home.outbox(parts=1) as outbox:
        relay = Relay(outbox, {"orders": Book()})
        running = asyncio.create_task(relay.run())
        async with asyncio.timeout(30):
            while looks < 3:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    told = [record for record in caplog.records if "Unserved" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING] * 2
    assert sorted(record.__dict__["semel_other"] for record in told) == ["mail", "shop"]


@awaited
async def test_a_relay_that_is_busy_does_not_look(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_EVERY", 0.0)
    looks: list[int] = []

    async def look(self: Beside) -> None:
        looks.append(1)

    monkeypatch.setattr(Beside, "look", look)
    with sqlite_home.outbox() as outbox:
        around = Beside(outbox, lambda event: None)
        for moved, expected in ((0, 1), (5, 1), (9, 1), (9, 2)):
            await around.now_and_then(moved)
            assert len(looks) == expected
        monkeypatch.setattr(beside, "_EVERY", 60.0)
        await around.now_and_then(9)  # nor so soon again
        assert len(looks) == 2


@awaited
async def test_a_drain_that_moved_nothing_looks(sqlite_home: Home) -> None:
    other = Home(sqlite_home.url, "shop", sqlite_home.engine)
    with other.outbox(parts=1) as outbox, other.transaction() as session:
        outbox.add(session, Message("orders", 1))
    age(other, 120)
    told: list[RelayEvent] = []
    with sqlite_home.outbox(parts=1) as outbox:
        relay = Relay(outbox, {"orders": Book()}, hooks=(told.append,))
        await relay.drain()
        await relay.drain()
        assert [event.other for event in told if isinstance(event, Unserved)] == ["shop"]


@awaited
async def test_tables_of_others_that_only_look_alike_are_left_alone(sqlite_home: Home) -> None:
    run(sqlite_home, "CREATE TABLE my_outbox_relays (x int)", 'CREATE TABLE "a b_outbox_relays" (x int)')
    with sqlite_home.outbox() as outbox:
        assert await unserved(outbox) == []


@awaited
async def test_nothing_is_known_of_other_outboxes_in_redis(redis_server: Any) -> None:
    with Outbox(redis_server.url, table="beside") as outbox:
        assert await unserved(outbox) == []


def test_commands_ask_whether_the_table_is_the_right_one(sqlite_home: Home, redis_server: Any) -> None:
    sqlite_home.outbox(parts=1).close()
    other = Home(sqlite_home.url, "shop", sqlite_home.engine)
    with other.outbox(parts=1) as outbox, other.transaction() as session:
        outbox.add(session, Message("orders", 1))
    age(other, 120)
    route = f"orders={redis_server.url}?stream=orders"
    table = ["--table", sqlite_home.table]
    for words in (
        ["outbox", "ls", sqlite_home.url, *table],
        ["outbox", "stats", sqlite_home.url, *table],
        ["relay", sqlite_home.url, *table, "--route", route, "--drain"],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert result.output.count("caution: nothing waits in") == 1
        assert "semel relay --table shop" in result.output
    result = CliRunner().invoke(app, ["outbox", "ls", sqlite_home.url, "--table", "shop"])
    assert "caution" not in result.output
