"""A signal's handler raises wherever Python looks for signals, one moment after the other: no place in the pool is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from semel.errors import StoreUnavailable
from semel.runtime import run_sync
from semel.store import Settings
from semel.stores import places
from semel.stores.postgres import home, talk
from semel.stores.postgres import psycopg as by_psycopg
from semel.stores.postgres import url as postgres_url
from semel.stores.postgres.link import Link
from semel.testing import services
from tests.ops.postgres_lab import Lab, lab, scope_of
from tests.ops.strike_lab import strike_each_moment

# A coroutine that was made, and struck before it was awaited, is Python's business.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

STRUCK = (home, places, talk)
FIRST_USE = {"here", "_settle_in", "_run", "_get_ready", "take", "wait", "give", "ring"}
SETTINGS = Settings(timeout=30.0)  # waited for only by who waits in vain


@pytest.fixture
def here(postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, ("psycopg", "sync")) as made:
        yield made


def test_R29_a_place_is_not_lost_when_a_warm_link_is_taken_or_given_back(here: Lab) -> None:
    store = here.open(SETTINGS, options="?pool=1")

    def look() -> None:
        here.run(store.peek(scope_of("k")))

    look()
    assert strike_each_moment(STRUCK, look, then=look) > 5


def test_R29_a_place_is_not_lost_when_a_lost_link_is_replaced(here: Lab) -> None:
    store = here.open(SETTINGS, options="?pool=1")

    def look() -> None:
        here.run(store.peek(scope_of("k")))

    def look_at_a_lost_link() -> None:
        for link in pool._idle:
            by_psycopg._shut(link.connection)
        look()

    look()
    pool: Any = here.run(store._talk.homes.here()).pool
    assert strike_each_moment(STRUCK, look_at_a_lost_link, then=look) > 20


def test_R29_a_place_is_not_lost_on_one_who_waits_for_it(here: Lab) -> None:
    source = postgres_url.source(postgres_url.parse(here.url, here.colour), here.colour)
    pool = home.Pool(source, home.ThreadWorld(), 1)

    def take(patience: float = 30.0) -> Link:
        return run_sync(pool.take(time.monotonic() + patience))

    def wait_in_vain() -> None:
        with pytest.raises(StoreUnavailable, match="in use"):
            take(0.001)

    def give_and_take() -> None:
        pool.give_now(held.pop())
        held.append(take())

    held = [take()]
    assert strike_each_moment(STRUCK, wait_in_vain, then=give_and_take) > 5
    run_sync(pool.drop(held[0]))


def test_R29_a_first_use_that_was_struck_does_not_keep_others_from_theirs(here: Lab) -> None:
    stores = [here.open(SETTINGS)]

    def look() -> None:
        here.run(stores[-1].peek(scope_of("k")))

    def begin_anew() -> None:
        look()
        here.run(stores[-1].aclose())
        stores.append(here.open(SETTINGS, options="?pool=1"))

    begin_anew()  # the tables are there
    assert strike_each_moment(STRUCK, look, then=begin_anew, functions=FIRST_USE) > 20
