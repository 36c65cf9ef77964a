"""H34: a store that hangs is given up after the route's own time, and what it grants afterwards is not left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from semel import ConfigurationError
from semel.testing import services
from tests.http.conftest import Edge
from tests.http.test_rows_keys import problem


@pytest.fixture
def server() -> Iterator[Any]:
    with services.redis() as made:
        yield made


def test_h34_a_store_that_hangs_is_answered_within_the_routes_own_time(colour: str, server: Any) -> None:
    edge = Edge(colour, server.url).open(semel={"timeout": 60}, store_timeout=0.5, lease=120)
    assert edge.send("/orders", "before").status_code == 201
    with server.paused():
        for number in range(3):
            begun = time.monotonic()
            answer = edge.send("/orders", f"hung-{number}")
            assert (answer.status_code, problem(answer)) == (503, "store-unavailable")
            assert time.monotonic() - begun < 20, "not the store's own minute"
        took = []
        for number in range(3):
            begun = time.monotonic()
            assert edge.send("/orders", f"refused-{number}").status_code == 503
            took.append(time.monotonic() - begun)
        assert min(took) < 0.45, "the breaker is open: nothing is waited for"
    assert edge.count("orders") == 1
    answer = until_answered(edge, "hung-0")
    assert (answer.status_code, answer.headers["idempotency-replayed"]) == (201, "false"), (
        "what the store granted after all is released, not left to its lease"
    )
    assert until_answered(edge, "before").headers["idempotency-replayed"] == "true"
    edge.close()


def until_answered(edge: Edge, key: str) -> Any:
    """The breaker pauses for a second, and a claim that was granted late is released in the background."""
    end = time.monotonic() + 40
    while (answer := edge.send("/orders", key)).status_code in (409, 503) and time.monotonic() < end:
        time.sleep(0.05)
    return answer


def test_h34_fail_open_does_not_hang_either(colour: str, server: Any) -> None:
    edge = Edge(colour, server.url).open(semel={"timeout": 60}, store_timeout=0.2, fail_open=True)
    edge.send("/orders", "before")
    with server.paused():
        begun = time.monotonic()
        answer = edge.send("/orders", "hung")
        assert time.monotonic() - begun < 20
    assert answer.status_code == 201
    assert "idempotency-replayed" not in answer.headers
    edge.close()


def test_h34_a_waiter_may_wait_longer_than_the_store_may_think(shop: Edge) -> None:
    shop.open(store_timeout=0.05)
    shop.ledger.slow = 0.3
    answers = shop.together({"path": "/slow"}, {"path": "/slow"})
    assert [answer.status_code for answer in answers] == [200, 200]
    assert shop.count("slow") == 1


def test_h34_the_time_is_above_nothing(shop: Edge) -> None:
    with pytest.raises(ConfigurationError, match="store_timeout"):
        shop.open(store_timeout=0)
