"""Moments of the stores that a race meets once in a thousand runs, each brought about on purpose."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from semel.errors import ConfigurationError, StoreUnavailable
from semel.runtime import run_sync
from semel.stores.mysql.pools import _Stock
from semel.stores.places import Place, ThreadTurns
from semel.stores.postgres.home import Pool, ThreadWorld
from semel.stores.postgres.link import NotReached
from semel.stores.postgres.psycopg import _noticing
from semel.stores.redis.link import open_link


def test_a_thread_that_is_struck_while_it_waits_leaves_the_line() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 2:  # with its box in the line
            assert turns._line
            raise KeyboardInterrupt

    turns = ThreadTurns[str](look, lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        run_sync(turns.wait(10))
    assert turns._line == []


class Away:
    """A server to which every connection fails in its own way."""

    where = "nowhere"

    def __init__(self, *causes: Exception) -> None:
        self.causes = list(causes)

    async def open(self, timeout: float) -> Any:
        del timeout
        raise NotReached("no connection") from (
            self.causes.pop(0) if len(self.causes) > 1 else self.causes[0]
        )


def _pool(source: Any) -> Pool:
    pool = Pool(source, ThreadWorld(), 1)
    pool._proven = True  # it was reached before: worth waiting for
    return pool


def test_a_last_try_that_was_cut_short_does_not_hide_why_the_ones_before_it_failed() -> None:
    pool = _pool(Away(ConnectionRefusedError("refused by nobody"), TimeoutError()))
    with pytest.raises(StoreUnavailable, match="refused by nobody"):
        run_sync(pool.take(time.monotonic() + 0.2))


def _postgres_stock() -> tuple[Callable[[Place], None], Callable[[], Any]]:
    pool = _pool(Away(TimeoutError()))
    return pool._back, pool._places.take


def _mysql_stock() -> tuple[Callable[[Place], None], Callable[[], Any]]:
    stock = _Stock(1, ThreadTurns)
    return stock._back, stock._places.take


@pytest.mark.parametrize("stock", [_postgres_stock, _mysql_stock])
def test_a_place_that_was_handed_to_one_who_had_left_is_free_again(
    stock: Callable[[], tuple[Callable[[Place], None], Callable[[], Any]]],
) -> None:
    back, take = stock()
    place = take()
    assert place is not None
    assert take() is None
    back(place)
    assert take() is not None


def test_a_notice_for_a_connection_that_is_gone_is_nobodys() -> None:
    class Link:
        def _noticed(self, notice: Any) -> None:
            heard.append(notice)

    heard: list[Any] = []
    link: Any = Link()
    noticed = _noticing(weakref.ref(link))
    noticed("first")
    del link
    gc.collect()
    noticed("second")
    assert heard == ["first"]


def test_a_redis_url_that_redis_py_cannot_read_is_refused_with_its_words() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be read.*max_connections"):
        open_link("redis://127.0.0.1/0?max_connections=many", colour="sync")
