"""Real processes on real stores: a worker is a process that runs `worker.py` with a plan."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.races.worker import work  # by the name that a process that knows nothing of pytest finds it under

STORES = ("sqlite", "redis", "postgres", "mysql")
SCHEMES = {
    ("postgres", "sync"): "postgresql+psycopg",
    ("postgres", "async"): "postgresql+asyncpg",
    ("mysql", "sync"): "mysql+pymysql",
    ("mysql", "async"): "mysql+asyncmy",
}
# Forked from a process that has imported everything, and has no threads and no connections: a new interpreter for each of a
# hundred workers takes most of the time of these tests.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.races.worker",
        "sqlite3",
        "redis",
        "redis.asyncio",
        "hiredis",
        "psycopg",
        "asyncpg",
        "pymysql",
        "asyncmy",
    ]
    + [
        f"semel.stores.{name}"
        for name in ("sqlite", "redis", "postgres.asyncpg", "postgres.psycopg", "mysql.pools")
    ]
)


class Ledger:
    """Effects and answers, in append-only files outside of the system under test."""

    def __init__(self, folder: Path) -> None:
        self.effects_file = folder / "effects"
        self.answers_file = folder / "answers"

    def effects(self) -> list[str]:
        return self._lines(self.effects_file)

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines(self.answers_file)]

    @staticmethod
    def _lines(path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []


class Worker:
    """A process."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._process = FORKS.Process(target=work, args=(plan,))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int:
        """Its exit code, or the signal that has ended it, negated."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"a worker did not end within {seconds} s"
        return self._process.exitcode

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()


class Crew:
    """Starts workers and sees to it that none is left."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self.url = url
        self.ledger = ledger
        self._all: list[Worker] = []

    def start(self, **plan: Any) -> Worker:
        plan = {
            "url": self.url,
            "effects": str(self.ledger.effects_file),
            "answers": str(self.ledger.answers_file),
            **plan,
        }
        worker = Worker(plan)
        self._all.append(worker)
        return worker

    def finish(self, timeout: float = 60) -> None:
        for worker in self._all:
            assert worker.wait(timeout) in (0, -signal.SIGKILL), "a worker failed: see its traceback above"

    def close(self) -> None:
        for worker in self._all:
            worker.close()


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, colour: str, tmp_path: Path) -> str:
    return url_of(request, request.param, colour, tmp_path)


def url_of(request: pytest.FixtureRequest, store: str, colour: str, folder: Path) -> str:
    if store == "sqlite":
        return f"sqlite:///{folder / 'semel.db'}"
    if store == "redis":
        return str(request.getfixturevalue("redis_server").url)
    server = request.getfixturevalue("postgres_server" if store == "postgres" else "mariadb_server")
    return f"{SCHEMES[store, colour]}://{server.database().partition('://')[2]}"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


@pytest.fixture
def crew(url: str, ledger: Ledger) -> Iterator[Crew]:
    crew = Crew(url, ledger)
    yield crew
    crew.close()


def wait_for(condition: Any, *, within: float = 60.0) -> Any:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(0.005)
    raise AssertionError(f"it did not become true within {within} s")
