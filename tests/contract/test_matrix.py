"""The contract on every store in both colours. A server that is not installed skips its class, visibly."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Literal
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
import redis
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from semel.keys import Scope
from semel.store import Settings, Store, adopt, open_store
from semel.stores.memory import MemoryStore
from semel.stores.redis import RedisStore
from semel.testing import services
from semel.testing.contract import StoreContract

SETTINGS = Settings(index=frozenset({"ref"}), timeout=15.0)  # a busy machine is no reason to fail
SPOIL = "UPDATE semel SET state = 'what' WHERE scope = %s"


def _plain(url: str) -> str:
    """The URL as the driver itself spells it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme.partition('+')[0]}://{rest}"


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

    def spoil(self, store: Store, scope: Scope) -> bool:
        with (
            closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=5)) as connection,
            connection,
        ):
            spoilt = connection.execute("UPDATE semel SET state = 'what' WHERE scope = ?", (scope.hash,))
            return spoilt.rowcount == 1


class Postgres(Opened):
    def spoil(self, store: Store, scope: Scope) -> bool:
        with psycopg.connect(_plain(self.url)) as connection:
            return connection.execute(SPOIL, (scope.hash,)).rowcount == 1


class TestPostgresAsyncpg(Postgres):
    @pytest.fixture(autouse=True)
    def bind(self, asyncpg_url: str) -> None:
        self.colour, self.url = "async", asyncpg_url


class TestPostgresPsycopg(Postgres):
    @pytest.fixture(autouse=True)
    def bind(self, psycopg_url: str) -> None:
        self.colour, self.url = "sync", psycopg_url


class Mariadb(Opened):
    def spoil(self, store: Store, scope: Scope) -> bool:
        at = urlsplit(self.url)
        with closing(
            pymysql.connect(host=at.hostname, port=at.port or 0, user=at.username, database=at.path[1:])
        ) as link:
            with link.cursor() as cursor:
                spoilt = cursor.execute(SPOIL, (scope.hash,))
            link.commit()
        return spoilt == 1


class TestMariadbAsyncmy(Mariadb):
    @pytest.fixture(autouse=True)
    def bind(self, asyncmy_url: str) -> None:
        self.colour, self.url = "async", asyncmy_url


class TestMariadbPymysql(Mariadb):
    @pytest.fixture(autouse=True)
    def bind(self, pymysql_url: str) -> None:
        self.colour, self.url = "sync", pymysql_url


class TestMariadbEngine(Mariadb):
    """Connections that an engine of SQLAlchemy makes count rows that were found, where ours count those that were changed."""

    engine: Engine

    @pytest.fixture(autouse=True)
    def bind(self, pymysql_url: str) -> Iterator[None]:
        self.colour, self.url = "sync", pymysql_url
        self.engine = create_engine(pymysql_url)
        yield
        self.engine.dispose()

    def open(self) -> Store:
        return adopt(self.engine, SETTINGS, "sync")


class TestMariadbAsyncEngine(Mariadb):
    @pytest.fixture(autouse=True)
    def bind(self, asyncmy_url: str) -> None:
        self.colour, self.url = "async", asyncmy_url

    def open(self) -> Store:
        return adopt(create_async_engine(self.url), SETTINGS, "async")  # nothing is ever in its pool


class Redis(Opened):
    server: services.RedisServer

    def spoil(self, store: Store, scope: Scope) -> bool:
        assert isinstance(store, RedisStore)
        with redis.Redis.from_url(self.server.url) as client:
            return bool(client.set(store.tag(scope).encode() + b":r:" + scope.hash, b"what", xx=True))


class TestRedis(Redis):
    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"], redis_server: services.RedisServer) -> None:
        self.colour, self.url, self.server = colour, redis_server.url, redis_server


class TestValkey(Redis):
    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"], valkey_server: services.RedisServer) -> None:
        self.colour, self.url, self.server = colour, valkey_server.url, valkey_server


class TestSentinel(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"], redis_sentinel: services.RedisSentinel) -> None:
        self.colour, self.url = colour, redis_sentinel.url


class TestCluster(Opened):
    @pytest.fixture(autouse=True)
    def bind(self, colour: Literal["sync", "async"], redis_cluster: services.RedisCluster) -> None:
        self.colour, self.url = colour, redis_cluster.url
