"""The contract on every store in both colours. A server that is not installed skips its class, visibly."""

from __future__ import annotations

import time
from typing import Literal

import pytest

from semel.store import Settings, Store, open_store
from semel.stores.memory import MemoryStore
from semel.testing import services
from semel.testing.contract import StoreContract

SETTINGS = Settings(index=frozenset({"ref"}))


class Opened(StoreContract):
    """Opened by URL; `colour` and `url` are set per test."""

    url: str = ""

    def open(self) -> Store:
        assert self.colour is not None
        return open_store(self.url, SETTINGS, self.colour)


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> Literal["sync", "async"]:
    return "sync" if request.param == "sync" else "async"


class TestMemory(StoreContract):
    ahead = 0.0

    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"]) -> None:
        self.colour = colour

    def open(self) -> Store:
        return MemoryStore(clock=lambda: time.time() + self.ahead)

    def shift(self, store: Store, seconds: float) -> bool:
        self.ahead += seconds
        return True


class TestSqlite(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"], sqlite_url: str) -> None:
        self.colour, self.url = colour, sqlite_url


class TestPostgresAsyncpg(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, asyncpg_url: str) -> None:
        self.colour, self.url = "async", asyncpg_url


class TestPostgresPsycopg(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, psycopg_url: str) -> None:
        self.colour, self.url = "sync", psycopg_url


class TestMariadbAsyncmy(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, asyncmy_url: str) -> None:
        self.colour, self.url = "async", asyncmy_url


class TestMariadbPymysql(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, pymysql_url: str) -> None:
        self.colour, self.url = "sync", pymysql_url


class TestRedis(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"], redis_server: services.RedisServer) -> None:
        self.colour, self.url = colour, redis_server.url


class TestValkey(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"], valkey_server: services.RedisServer) -> None:
        self.colour, self.url = colour, valkey_server.url


class TestSentinel(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"], redis_sentinel: services.RedisSentinel) -> None:
        self.colour, self.url = colour, redis_sentinel.url


class TestCluster(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"], redis_cluster: services.RedisCluster) -> None:
        self.colour, self.url = colour, redis_cluster.url
