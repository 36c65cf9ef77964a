"""A lab for each colour and store; a light one in memory for what no store can change."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when grpc is imported, hence here. Its handlers wake a poller in the child of a fork, which aborts when the child
# closes what it polls before it becomes a server: one in thirty servers of these tests "ended at once".
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

from tests.grpc.lab import Lab, Loop

STORES = ("memory", "sqlite", "redis", "postgres")
SCHEMES = {"sync": "postgresql+psycopg", "async": "postgresql+asyncpg"}


@pytest.fixture(scope="session")
def aio_loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=STORES)
def lab(request: pytest.FixtureRequest, colour: str, tmp_path: Path, aio_loop: Loop) -> Iterator[Lab]:
    made = Lab(colour, url_of(request, request.param, colour, tmp_path), aio_loop)
    yield made
    made.close()


@pytest.fixture
def light(colour: str, aio_loop: Loop) -> Iterator[Lab]:
    made = Lab(colour, f"memory://{uuid.uuid4().hex}", aio_loop)
    yield made
    made.close()


def url_of(request: pytest.FixtureRequest, store: str, colour: str, folder: Path) -> str:
    if store == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if store == "sqlite":
        return f"sqlite:///{folder / 'semel.db'}"
    if store == "redis":
        return str(request.getfixturevalue("redis_server").url)
    return f"{SCHEMES[colour]}://{request.getfixturevalue('postgres_server').url.partition('://')[2]}"
