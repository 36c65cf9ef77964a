"""A database per test: its own tables in a shared server, or a file of its own."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import pytest
from sqlalchemy import Engine, MetaData, create_engine, text

from semel.messaging import Outbox
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


@dataclass
class Home:
    """Where a test's messages live: the URL for semel, and an engine for the caller's rows."""

    url: str
    table: str
    engine: Engine

    def outbox(self, **options: object) -> Outbox:
        outbox = Outbox(self.url, table=self.table, **options)  # type: ignore[arg-type]
        outbox.create()
        return outbox

    def scalar(self, sql: str) -> object:
        with self.engine.connect() as connection:
            return connection.execute(text(sql.format(t=self.table))).scalar()

    def count(self, suffix: str = "_outbox") -> int:
        found = self.scalar("SELECT count(*) FROM {t}" + suffix)
        assert isinstance(found, int)
        return found


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
            for name in messaging_tables(MetaData(), table)[:-1]:
                connection.execute(name.delete())
    _made.add((kind, table))
    return home


def _run(kind: str, request: pytest.FixtureRequest, folder: Path, *, fresh: bool = False) -> Iterator[Home]:
    made = _home(kind, request, folder, fresh=fresh)
    yield made
    made.engine.dispose()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """Tables that are made once per server and emptied for each test: MariaDB needs a second to make them."""
    yield from _run(request.param, request, tmp_path)


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
