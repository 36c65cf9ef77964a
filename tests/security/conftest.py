"""Every store by URL, in both colours."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import Semel

STORES = ("memory", "sqlite", "redis", "cluster", "postgres", "mysql")
ASYNC = {
    "sqlite": "sqlite",
    "redis": "redis",
    "cluster": "redis+cluster",
    "asyncpg": "postgresql+asyncpg",
    "psycopg": "postgresql+psycopg",
    "asyncmy": "mysql+asyncmy",
}
SYNC = {"postgres": "postgresql+psycopg", "mysql": "mysql+pymysql"}


def url_of(request: pytest.FixtureRequest, store: str, folder: Path, scheme: str = "") -> str:
    """The address of a store; servers are started when the first test asks."""
    match store:
        case "memory":
            return f"memory://{uuid.uuid4().hex}"
        case "sqlite":
            return f"sqlite:///{folder / 'semel.db'}"
        case "redis":
            return str(request.getfixturevalue("redis_server").url)
        case "cluster":
            return str(request.getfixturevalue("redis_cluster").url)
        case "mysql" | "asyncmy":
            server = request.getfixturevalue("mariadb_server")
        case _:
            server = request.getfixturevalue("postgres_server")
    return f"{scheme or SYNC[store]}://{server.url.partition('://')[2]}"


@pytest.fixture(scope="module", params=STORES)
def store_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return url_of(request, request.param, tmp_path_factory.mktemp("security"))


@pytest.fixture(scope="module")
def once(store_url: str) -> Iterator[Semel]:
    """A face with a prefix of its own: nothing of another test is in sight."""
    room: dict[str, Any] = {"capacity": 1_000_000} if store_url.startswith("memory:") else {}
    with Semel(store_url, prefix=uuid.uuid4().hex, timeout=15, **room) as face:
        yield face


@pytest.fixture(params=ASYNC)
def async_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request, request.param, tmp_path, ASYNC[request.param])


def told(value: Any) -> Any:
    """A function that returns just this."""
    return lambda: value
