"""A signal's handler raises wherever Python looks for signals, one moment after the other: no connection's place is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from semel.errors import StoreUnavailable
from semel.stores import places
from semel.stores.redis import threads
from semel.stores.redis.link import open_link
from semel.testing import services
from tests.ops.redis_link_lab import ECHO, drive
from tests.ops.strike_lab import strike_each_moment

pytestmark = [
    pytest.mark.services,
    # A coroutine that was made, and struck before it was awaited, is Python's business.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]
STRUCK = (threads, places)


@pytest.fixture
def link(redis_server: services.RedisServer) -> Iterator[Any]:
    """A link of one connection, which is warm. Its patience is for who waits in vain."""
    made = open_link(redis_server.url, colour="sync", timeout=30, max_connections=1)
    call(made)
    yield made
    drive(made.aclose())


def call(link: Any) -> None:
    assert drive(link.call(ECHO, [b"k"], [b"x"])) == [b"k", b"x"]


def test_R29_a_place_is_not_lost_when_a_warm_connection_is_taken_or_given_back(link: Any) -> None:
    assert strike_each_moment(STRUCK, lambda: call(link), then=lambda: call(link)) > 15


@pytest.mark.parametrize("rested", [0.0, 60.0], ids=["in use", "at rest"])
def test_R29_a_place_is_not_lost_when_a_lost_connection_is_replaced(link: Any, rested: float) -> None:
    (stack,) = link._stacks.values()

    def call_on_a_lost_one() -> None:
        for idle in stack._idle:
            idle._made._sock.close() if rested == 0.0 else idle._made._sock.shutdown(2)
            idle.rested -= rested
        call(link)

    assert strike_each_moment(STRUCK, call_on_a_lost_one, then=lambda: call(link)) > 20


def test_R29_a_place_is_not_lost_while_a_thread_waits_for_one(link: Any) -> None:
    (stack,) = link._stacks.values()
    held = stack.take(time.monotonic() + 30)

    def wait_in_vain() -> None:
        with pytest.raises(StoreUnavailable, match="all 1 connections"):
            drive(link.call(ECHO, [b"k"], [b"x"], timeout=0.05))

    def then() -> None:
        stack.give(held)
        call(link)
        assert stack.take(time.monotonic() + 30) is held

    assert strike_each_moment(STRUCK, wait_in_vain, then=then) > 15
    stack.give(held)


def test_what_is_handed_to_a_thread_that_has_just_given_up_goes_back(link: Any) -> None:
    (stack,) = link._stacks.values()
    held = stack.take(time.monotonic() + 30)
    stack._back(held)
    assert stack._idle == [held]
    stack.lose(stack.take(time.monotonic() + 30))
    place = stack.take(time.monotonic() + 30)
    assert isinstance(place, places.Place)
    stack._back(place)
    call(link)
