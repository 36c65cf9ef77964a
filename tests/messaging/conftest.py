"""A database per test: its own tables in a shared server, or a file of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import secrets
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import psycopg
import pymysql
import pytest
import redis
from sqlalchemy import Engine, MetaData, create_engine, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from semel.messaging import Outbox
from semel.messaging.database import Database
from semel.messaging.redis.home import RedisHome
from semel.messaging.tables import messaging_tables

P = ParamSpec("P")
_numbers = itertools.count()
_made: set[tuple[str, str]] = set()


def awaited(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, in a loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.fixture(autouse=True)
def _closed_with_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test opened and did not close ends with it: the collector would find it in the middle of another one."""
    databases, homes = set[Database](), set[RedisHome]()
    monkeypatch.setattr("semel.messaging.database._forked", databases)
    monkeypatch.setattr("semel.messaging.redis.home._forked", homes)
    yield
    for database in databases:
        database.close()
    for home in homes:
        home.close()


@dataclass
class Home:
    """Where a test's messages live: the URL for semel, and an engine for the caller's rows."""

    url: str
    table: str
    engine: Engine

    def outbox(self, **options: Any) -> Outbox:
        outbox = Outbox(self.url, table=self.table, **options)
        outbox.create()
        return outbox

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """What a message is added to; committed at the end."""
        with Session(self.engine) as session, session.begin():
            yield session

    def owned(self) -> object:
        """How many parts have an owner."""
        return self.scalar("SELECT count(*) FROM {t}_outbox_parts WHERE owner IS NOT NULL")

    def close(self) -> None:
        self.engine.dispose()

    def scalar(self, sql: str) -> object:
        with self.engine.connect() as connection:
            return connection.execute(text(sql.format(t=self.table))).scalar()

    def count(self, suffix: str = "_outbox") -> int:
        found = self.scalar("SELECT count(*) FROM {t}" + suffix)
        assert isinstance(found, int)
        return found


@dataclass
class RedisPlace:
    """The same in Redis: keys of its own in a shared server."""

    url: str
    table: str
    client: redis.Redis

    def outbox(self, **options: Any) -> Outbox:
        outbox = Outbox(self.url, table=self.table, **options)
        outbox.create()
        return outbox

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        with self.client.pipeline() as pipe:
            yield pipe
            pipe.execute()

    def names(self, what: str) -> list[bytes]:
        found: list[bytes] = list(self.client.scan_iter(f"{{{self.table}:*}}:{what}", count=1000))
        return found

    def owned(self) -> object:
        return sum(bool(self.client.hget(name, "owner")) for name in self.names("part:*"))

    def count(self, suffix: str = "_outbox") -> int:
        client: Any = self.client
        if suffix == "_outbox_ids":
            return len(self.names("id:*"))
        sizes = {
            "_outbox": [("messages:*", client.xlen), ("due:*", client.zcard)],
            "_outbox_lines": [("lines:*", client.hlen)],
            "_outbox_relays": [("relays:*", client.hlen)],
        }
        return sum(int(size(name)) for what, size in sizes[suffix] for name in self.names(what))

    def close(self) -> None:
        self.client.close()


def redis_place(server: Any) -> RedisPlace:
    return RedisPlace(server.url, f"r{secrets.token_hex(4)}", redis.Redis.from_url(server.url))


def _home(kind: str, request: pytest.FixtureRequest, folder: Path, *, fresh: bool = False) -> Home:
    if kind == "sqlite":
        url = f"sqlite:///{folder}/messages.db"
    elif kind == "postgres":
        url = request.getfixturevalue("postgres_server").url.replace("postgresql://", "postgresql+psycopg://")
    else:
        url = request.getfixturevalue("mariadb_server").url.replace("mysql://", "mysql+pymysql://")
    table = f"m{os.getpid()}_{next(_numbers)}" if fresh else f"m{os.getpid()}"
    home = Home(url, table, create_engine(url))
    if kind != "sqlite" and (kind, table) in _made:
        with home.engine.begin() as connection:
            *tables, meta = messaging_tables(MetaData(), table)
            if not inspect(connection).has_table(meta.name):  # whoever had this place first did not make them
                return home
            for name in tables:
                connection.execute(name.delete())
            connection.execute(
                meta.delete().where(meta.c.name.not_in(["version", "identity"]))
            )  # what a test said
    _made.add((kind, table))
    return home


def _run(kind: str, request: pytest.FixtureRequest, folder: Path, *, fresh: bool = False) -> Iterator[Home]:
    made = _home(kind, request, folder, fresh=fresh)
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """Tables that are made once per server and emptied for each test: MariaDB needs a second to make them."""
    yield from _run(request.param, request, tmp_path)


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home | RedisPlace]:
    """Where an outbox may live, Redis included."""
    if request.param != "redis":
        yield from _run(request.param, request, tmp_path)
        return
    made = redis_place(request.getfixturevalue("redis_server"))
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def fresh_home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """No tables yet."""
    yield from _run(request.param, request, tmp_path, fresh=True)


@pytest.fixture
def sqlite_home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    yield from _run("sqlite", request, tmp_path, fresh=True)


@pytest.fixture
def postgres_home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    yield from _run("postgres", request, tmp_path)


def bare(home: Home) -> Any:
    """A plain connection of the driver itself to the home's database."""
    url = make_url(home.url)
    if url.get_backend_name() == "sqlite":
        return sqlite3.connect(str(url.database))
    if url.get_backend_name() == "postgresql":
        return psycopg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False))
    return pymysql.connect(host=url.host, port=url.port or 3306, user=url.username, database=url.database)
