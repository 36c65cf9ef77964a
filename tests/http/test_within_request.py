"""Rows and record in the request's own transaction (mode tx): exactly once, wherever the worker is killed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, text

from tests.http.site import Site

APPS = {
    "fastapi": ("httptools", "tests.http.within_fastapi:fastapi"),
    "flask": ("gunicorn", "tests.http.within_apps:flask"),
    "django": ("gunicorn", "tests.http.within_apps:django"),
}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    return str(request.getfixturevalue("postgres_server").database())


@pytest.fixture(params=[*APPS])
def server(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Iterator[Site]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    number = "serial" if "postgres" in url else "integer"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE orders (id {number} PRIMARY KEY, item text)"))
    engine.dispose()
    kind, app = APPS[request.param]
    made = Site(kind, url, tmp_path, workers=1 if kind == "httptools" else 2, app=app)
    yield made
    made.stop()


def rows(url: str) -> dict[str, int]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        found = connection.execute(text("SELECT item, count(*) FROM orders GROUP BY item")).all()
    engine.dispose()
    return {str(item): int(count) for item, count in found}


def order(server: Site, item: str, **headers: str) -> httpx.Response:
    return server.post("/orders", f"key-{item}", headers={"Item": item, **headers})


def killed(server: Site, item: str, moment: str) -> None:
    with pytest.raises(httpx.TransportError):
        order(server, item, **{"X-Die": moment})
    if server.kind == "httptools":  # alone: nobody starts it again
        server.process.wait()
        server.start()


def patient(server: Site, item: str) -> httpx.Response:
    """The retry of a client whose connection may have gone to the worker that is dying."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        try:
            answers.append(order(server, item))
        except httpx.TransportError:
            return False
        return True

    server.until(answered, "an answer")
    return answers[-1]


def test_rows_and_record_commit_together(server: Site, url: str) -> None:
    assert order(server, "tea").status_code == 201
    again = order(server, "tea")
    assert (again.status_code, again.json(), again.headers["idempotency-replayed"]) == (
        201,
        {"item": "tea"},
        "true",
    )
    other = server.post("/orders", "key-tea", headers={"Item": "coffee"})
    assert (other.status_code, other.json()["type"]) == (422, "urn:semel:problem:key-reused")
    assert server.post("/orders", "two words", headers={"Item": "x"}).status_code == 400
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: order(server, "cake"), range(6)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    killed(server, "milk", "after commit")
    assert rows(url)["milk"] == 1
    assert patient(server, "milk").headers["idempotency-replayed"] == "true"
    killed(server, "salt", "before commit")
    assert patient(server, "salt").headers["idempotency-replayed"] == "false"
    assert rows(url) == {"tea": 1, "cake": 1, "milk": 1, "salt": 1}
