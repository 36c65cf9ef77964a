"""A signal's handler raises at any moment of a call in a caller's transaction: that is as before the claim, or has the outcome."""

from __future__ import annotations

import gc
import sqlite3
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from semel import Semel
from semel.testing import services
from tests.ops.strike_lab import strike_each_moment

# A coroutine that was made, and struck before it was awaited, is Python's business.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "semel.db", isolation_level=None)) as made:
        made.execute("CREATE TABLE orders (key TEXT)")
        gc.collect()
        gc.disable()  # what is collected in the middle may be struck as well, and nobody would know
        yield made
        gc.enable()


def test_R27_an_interrupt_at_any_moment_leaves_the_transaction_of_use_to_its_caller(
    connection: sqlite3.Connection, tmp_path: Path
) -> None:
    keys = [0]

    def order() -> None:
        connection.execute("INSERT INTO orders VALUES (?)", (str(keys[0]),))

    def within() -> None:
        if not connection.in_transaction:
            connection.execute("BEGIN IMMEDIATE")
        once.within(connection).execute(str(keys[0]), order)

    def again_and_commit() -> None:
        within()
        connection.execute("COMMIT")
        found = connection.execute("SELECT count(*) FROM orders WHERE key = ?", (str(keys[0]),)).fetchone()
        assert found == (1,)
        record = once.peek(str(keys[0]))
        assert record is not None
        assert record.state.value == "done"
        keys[0] += 1

    with Semel(f"sqlite:///{tmp_path / 'semel.db'}") as once:
        once.peek("any")  # which makes the tables
        within()
        again_and_commit()
        modules = [
            module for name, module in sys.modules.items() if name.startswith(("semel.within", "semel.flow"))
        ]
        assert strike_each_moment(modules, within, then=again_and_commit) > 40
        connection.rollback()


def test_R28_an_interrupt_at_any_moment_leaves_the_pipeline_to_its_caller(
    redis_server: services.RedisServer,
) -> None:
    tenant = uuid.uuid4().hex
    with (
        redis.Redis.from_url(
            redis_server.url, health_check_interval=30, retry=Retry(NoBackoff(), 3)
        ) as client,
        Semel(redis_server.url, tenant=tenant, lease=0.05) as once,
    ):
        pipe, keys = client.pipeline(), [0]
        own = set(vars(pipe))

        def within() -> None:
            once.within(pipe).execute(
                str(keys[0]), lambda: pipe.incr(f"{tenant}:{keys[0]}") and None, wait=30
            )

        def again() -> None:
            assert (set(vars(pipe)), len(pipe), pipe.watching, pipe.connection) == (own, 0, False, None)
            within()
            assert client.get(f"{tenant}:{keys[0]}") == b"1"
            keys[0] += 1
            for line in client.connection_pool._available_connections:
                assert (line.health_check_interval, line.retry.get_retries()) == (30, 3)
                assert "connect_check_health" not in vars(line)

        within()
        again()
        modules = [sys.modules[f"semel.within.{name}"] for name in ("redis", "pipelines")]
        # Between two calls of theirs there is nothing that could be struck but for a moment.
        spared = ("execute", "_perform", "complete")
        assert strike_each_moment(modules, within, then=again, spared=spared) > 100
