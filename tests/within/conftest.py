"""A lab per driver; an `async def` test runs without a loop for sync drivers, whose calls never suspend."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.runtime import run_sync
from semel.testing.proxy import RESP, Proxy
from tests.within.lab import ASYNC, SYNC, Lab

SERVERS = {"postgresql": "postgres_server", "mysql": "mariadb_server"}


FEW = (
    "sqlite3",
    "session-pysqlite",
    "psycopg",
    "session-psycopg",
    "pymysql",
    "django-postgresql",
    "session-aiosqlite",
    "asyncpg",
    "session-asyncpg",
    "asyncmy",
)
SHARED: dict[
    str, str
] = {}  # a database per server and process: making one for each test costs more than the test


def make_lab(request: pytest.FixtureRequest, driver: str, folder: Path, *, fresh: bool = False) -> Lab:
    lab = Lab(driver, str(folder / "shop.db"))
    if lab.dialect == "sqlite":
        lab.create()
        return lab
    server = request.getfixturevalue(SERVERS[lab.dialect])
    if fresh or lab.dialect not in SHARED:
        lab.place = server.database()
        lab.create()
        if not fresh:
            SHARED[lab.dialect] = lab.place
    else:
        lab.place = SHARED[lab.dialect]
        lab.clean()
    return lab


@pytest.fixture(params=SYNC + ASYNC)
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    return make_lab(request, request.param, tmp_path)


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    """For what depends on the database or the colour, not on each driver."""
    return make_lab(request, request.param, tmp_path)


@pytest.fixture(params=FEW)
def fresh_lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    """A database of its own, without semel's tables."""
    return make_lab(request, request.param, tmp_path, fresh=True)


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A lab for a driver that the test names."""
    return lambda driver: make_lab(request, driver, tmp_path)


@pytest.fixture
def proxy(redis_server: Any) -> Iterator[Proxy]:
    """A way to the Redis server that may be cut."""
    with Proxy("127.0.0.1", redis_server.port, framing=RESP) as made:
        yield made


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    lab: Lab | None = next((each for each in arguments.values() if isinstance(each, Lab)), None)
    (run_sync if lab is not None and lab.colour == "sync" else asyncio.run)(
        _closing(pyfuncitem.obj(**arguments), lab)
    )
    return True


async def _closing(body: Any, lab: Lab | None) -> None:
    try:
        await body
    finally:
        if lab is not None:
            await lab.close()


@pytest.fixture
def make_coloured(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Run a body in a lab of a driver that the test names, in the colour of that driver."""

    async def run(driver: str, body: Any) -> None:
        lab = make_lab(request, driver, tmp_path)
        if lab.colour == "sync":
            # The test itself runs in a loop; a sync caller has none.
            await asyncio.to_thread(run_sync, _closing(body(lab), lab))
        else:
            await _closing(body(lab), lab)

    return run
