"""Real processes on real stores: a worker is a subprocess that runs `worker.py` with a plan in JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STORES = ("sqlite", "redis", "postgres", "mysql")
SCHEMES = {
    ("postgres", "sync"): "postgresql+psycopg",
    ("postgres", "async"): "postgresql+asyncpg",
    ("mysql", "sync"): "mysql+pymysql",
    ("mysql", "async"): "mysql+asyncmy",
}
WORKER = Path(__file__).with_name("worker.py")


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


class Crew:
    """Starts workers and sees to it that none is left."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self.url = url
        self.ledger = ledger
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, **plan: Any) -> subprocess.Popen[bytes]:
        plan = {
            "url": self.url,
            "effects": str(self.ledger.effects_file),
            "answers": str(self.ledger.answers_file),
            **plan,
        }
        worker = subprocess.Popen([sys.executable, str(WORKER), json.dumps(plan)])
        self._all.append(worker)
        return worker

    def finish(self, timeout: float = 60) -> None:
        for worker in self._all:
            assert worker.wait(timeout) in (0, -signal.SIGKILL), "a worker failed: see its traceback above"

    def close(self) -> None:
        for worker in self._all:
            if worker.poll() is None:
                os.kill(worker.pid, signal.SIGCONT)
                worker.kill()
            worker.wait()


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


def wait_for(condition: Any, *, within: float = 20.0) -> Any:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(0.005)
    raise AssertionError(f"it did not become true within {within} s")
