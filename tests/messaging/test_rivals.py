"""Relays of two names that carry the same messages: whoever delivers first deletes, so they would double some and miss others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from semel import ConfigurationError
from semel.messaging import Message, Outbox, Relay
from semel.messaging.events import Alarm, RelayEvent
from semel.messaging.scopes import Scope, common, scope_of
from tests.messaging.books import Book
from tests.messaging.conftest import Home, RedisPlace, awaited

Place = Home | RedisPlace


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def ended(*tasks: asyncio.Task[Any]) -> list[Any]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


def relay(outbox: Outbox, name: str, **options: Any) -> Relay:
    routes = options.pop("routes", {"orders": Book()})
    return Relay(outbox, routes, name=name, lease=options.pop("lease", 4.0), hooks=(), **options)


@awaited
async def test_a_second_name_for_the_same_messages_is_refused(place: Place) -> None:
    """Also with another sink: a message that one of them delivered is gone for the other."""
    outbox = place.outbox(parts=4)
    first = relay(outbox, "a", routes={"orders*": Book()})
    running = asyncio.create_task(first.run())
    await until(lambda: len(first.parts) == 4)
    for way in ("run", "drain"):
        with pytest.raises(
            ConfigurationError, match=r"'b' and relay 'a'.* both carry .*orders.*the same name="
        ):
            await getattr(relay(outbox, "b"), way)()
    third = relay(outbox, "c", routes={"bills": (book := Book())})  # that is nobody else's
    with place.transaction() as session:
        outbox.add(session, Message("bills", 1, id="b1"))
    await third.drain()
    assert book.ids == ["b1"]
    assert len(first.parts) == 4, "the one that was there is left alone"
    await ended(running)
    assert (await relay(outbox, "b").drain()).sent == 0, "the first one has left"
    outbox.close()


@awaited
async def test_a_rival_that_died_is_waited_for(place: Place) -> None:
    outbox = place.outbox(parts=4)
    dead, book = relay(outbox, "a", lease=0.2), Book()
    await dead._membership.join()  # and nothing more is heard of it
    with place.transaction() as session:
        outbox.add(session, Message("orders", 1, id="m1"))
    assert (await relay(outbox, "b", routes={"orders": book}).drain()).sent == 1
    outbox.close()


@awaited
async def test_of_two_that_start_at_once_one_at_most_begins(place: Place) -> None:
    outbox = place.outbox(parts=4)
    pair = [relay(outbox, name) for name in "ab"]
    tasks = [asyncio.create_task(each.run()) for each in pair]
    await until(lambda: any(task.done() for task in tasks) or any(len(each.parts) == 4 for each in pair))
    await asyncio.sleep(0.3)  # the other one has had its lease to find out
    assert sum(bool(each.parts) for each in pair) <= 1
    await ended(*tasks)
    outbox.close()


@awaited
async def test_a_relay_that_was_stopped_and_goes_on_meets_its_rival(place: Place) -> None:
    outbox, told = place.outbox(parts=4), list[RelayEvent]()
    elder = Relay(outbox, {"orders": Book()}, name="a", hooks=(told.append,))
    await elder._membership.join()
    younger = relay(outbox, "b", lease=10)
    await younger._membership.join()  # as if the lease of the other one had been over then
    with pytest.raises(ConfigurationError, match="'b' and relay 'a'"):
        await younger._rivals.check()
    for _ in range(2):
        await elder._rivals.check()
    assert [event.what for event in told if isinstance(event, Alarm)] == ["overlap"]
    outbox.close()


def scope(*patterns: str, topics: tuple[str, ...] = (), tenants: tuple[str, ...] = ()) -> Scope:
    return Scope("here:1", patterns, topics, tenants)


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        (scope("orders"), scope("bills"), None),
        (scope("orders"), scope("x", "orders"), "topic 'orders'"),
        (scope("orders.*"), scope("*.eu"), "topics of both 'orders.*' and '*.eu'"),
        (scope("a?"), scope("abc"), None),
        (scope("a*c"), scope("a*b*d"), None),
        (scope("[ab]1"), scope("b1"), "topics of both '[ab]1' and 'b1'"),
        (scope("[!b]1"), scope("b1"), None),
        (scope("*", topics=("t1", "t2")), scope("t2", "t3"), "topic 't2'"),
        (scope("*", topics=("t1",)), scope("*", topics=("t2",)), None),
        (scope("t1", topics=("t1", "t2")), scope("t2"), None),
        (scope("*", tenants=("x",)), scope("*", tenants=("y",)), None),
        (scope("*", tenants=("x", "y")), scope("*", tenants=("y",)), "topic '*' of tenant 'y'"),
        (scope("*", tenants=("x",)), scope("*"), "topic '*' of tenant 'x'"),
    ],
)
def test_what_two_relays_both_carry(a: Scope, b: Scope, both: str | None) -> None:
    assert common(a, b) == both
    assert (common(b, a) is None) is (both is None)


def test_what_a_relay_carries_is_read_as_it_was_written() -> None:
    said = scope("orders.*", topics=("a",), tenants=("t",))
    assert scope_of(said.told()) == said
    assert scope_of("host:123") is None, "of one that says nothing nothing is known"


@awaited
async def test_relays_of_one_name_with_other_routes_are_told_to_take_names(place: Place) -> None:
    """They are not refused: a new version of the program is deployed beside the old one."""
    outbox = place.outbox(parts=4)
    told: list[RelayEvent] = []
    relays = [
        Relay(outbox, {topic: Book()}, lease=0.3, hooks=(told.append,))
        for topic in ("orders", "bills", "bills")
    ]
    tasks = [asyncio.create_task(each.run()) for each in relays]

    def said() -> list[str]:
        return [each.message for each in told if isinstance(each, Alarm) and each.what == "routes"]

    await until(lambda: len(said()) == 4)  # the first one of two, and these of it
    await asyncio.sleep(0.3)
    assert len(said()) == 4, "once for each"
    assert all("name= each" in message and "'orders'" in message for message in said())
    assert not any(task.done() for task in tasks)
    await ended(*tasks)
    outbox.close()
