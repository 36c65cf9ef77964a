"""Every store equals `model.py`: random sequences of all verbs and clock jumps, played on a store and on the model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from semel.runtime import run_sync
from semel.store import Settings, open_store
from semel.testing import services
from tests.conftest import MODE
from tests.contract.pair import play
from tests.contract.sequences import Step, sequences

LONG = 2000  # sequences per store under --long, different ones each time; otherwise a few, always the same
Colour = Literal["sync", "async"]


@contextmanager
def driven(colour: Colour) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """A way to run coroutines: without a loop, or in one loop for the whole test."""
    if colour == "sync":
        yield run_sync
    else:
        with asyncio.Runner() as runner:
            yield runner.run


def prove(url: str, colour: Colour, few: int) -> None:
    """Play the sequences. Outside --long each store has its own fixed ones: together they are more than any alone."""
    name = f"{url.partition(':')[0]} ({colour})"
    wanted = LONG if MODE == "long" else few
    played = itertools.count()
    with driven(colour) as run:
        store = open_store(url, Settings(index=frozenset({"ref"}), timeout=15.0), colour)

        @settings(
            max_examples=wanted,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            print_blob=True,
        )
        @given(sequences)
        def sequence_by_sequence(sequence: tuple[Step, ...]) -> None:
            next(played)
            play(store, run, sequence)

        try:
            (sequence_by_sequence if MODE == "long" else seed(crc32(name.encode()))(sequence_by_sequence))()
        finally:
            run(store.aclose())
    count = next(played)
    print(f"{count} sequences equal the model on {name}")
    assert count >= wanted


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> Colour:
    return "sync" if request.param == "sync" else "async"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if MODE == "long" else 300)]


def test_sqlite_equals_the_model(sqlite_url: str, colour: Colour) -> None:
    prove(sqlite_url, colour, few=40)


def test_postgres_by_asyncpg_equals_the_model(asyncpg_url: str) -> None:
    prove(asyncpg_url, "async", few=40)


def test_postgres_by_psycopg_equals_the_model(psycopg_url: str) -> None:
    prove(psycopg_url, "sync", few=40)


def test_mariadb_by_asyncmy_equals_the_model(asyncmy_url: str) -> None:
    prove(asyncmy_url, "async", few=30)


def test_mariadb_by_pymysql_equals_the_model(pymysql_url: str) -> None:
    prove(pymysql_url, "sync", few=30)


def test_redis_equals_the_model(redis_server: services.RedisServer, colour: Colour) -> None:
    prove(redis_server.url, colour, few=40)


def test_valkey_equals_the_model(valkey_server: services.RedisServer) -> None:
    prove(valkey_server.url, "async", few=30)


def test_redis_sentinel_equals_the_model(redis_sentinel: services.RedisSentinel) -> None:
    prove(redis_sentinel.url, "sync", few=30)


def test_redis_cluster_equals_the_model(redis_cluster: services.RedisCluster) -> None:
    prove(redis_cluster.url, "async", few=30)
