"""One body per ruling, both colours, several stores: a test is `async def test_…(lab)`; sync faces never suspend in it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, Semel
from semel.runtime import run_sync

STORES = ("memory", "sqlite", "redis", "postgres", "mysql")
SCHEMES = {
    ("postgres", "sync"): "postgresql+psycopg",
    ("postgres", "async"): "postgresql+asyncpg",
    ("mysql", "sync"): "mysql+pymysql",
    ("mysql", "async"): "mysql+asyncmy",
}


class Lab:
    """A face to try things on, and the few differences between the colours."""

    def __init__(self, colour: str, url: str) -> None:
        self.colour = colour
        self.url = url
        self.tenant = uuid.uuid4().hex
        self.effects: list[Any] = []
        self._faces: list[Any] = []

    def face(self, **settings: Any) -> Any:
        kind = Semel if self.colour == "sync" else AsyncSemel
        given: dict[str, Any] = {"tenant": self.tenant, "timeout": 20}  # a busy machine is no broken store
        face = kind(self.url, **(given | settings))
        self._faces.append(face)
        return face

    def fn(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The same function in this lab's colour."""
        if self.colour == "sync":
            return plain

        @functools.wraps(plain)
        async def coloured(*args: Any, **kwargs: Any) -> Any:
            value = plain(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value

        return coloured

    def effect(self, value: Any = "done") -> Callable[..., Any]:
        """A function that counts itself and returns `value`."""

        def work(*args: Any) -> Any:
            self.effects.append(args)
            return value

        return self.fn(work)

    def raising(self, error: BaseException) -> Callable[..., Any]:
        def work() -> Any:
            self.effects.append(error)
            raise error

        return self.fn(work)

    async def do(self, thing: Any) -> Any:
        return await thing if inspect.isawaitable(thing) else thing

    async def close(self) -> None:
        for face in self._faces:
            await self.do(face.close())


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=STORES)
def lab(request: pytest.FixtureRequest, colour: str, tmp_path: Path) -> Lab:
    return Lab(colour, url_of(request, request.param, colour, tmp_path))


@pytest.fixture
def light_lab(colour: str, tmp_path: Path) -> Lab:
    """For rulings that no store can change: memory is enough."""
    return Lab(colour, f"memory://{uuid.uuid4().hex}")


def url_of(request: pytest.FixtureRequest, store: str, colour: str, folder: Path) -> str:
    if store == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if store == "sqlite":
        return f"sqlite:///{folder / 'semel.db'}"
    if store == "redis":
        return str(request.getfixturevalue("redis_server").url)
    server = request.getfixturevalue("postgres_server" if store == "postgres" else "mariadb_server")
    return f"{SCHEMES[store, colour]}://{server.url.partition('://')[2]}"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    lab: Any = arguments.get("lab") or arguments.get("light_lab")
    sync = lab is not None and lab.colour == "sync"
    (run_sync if sync else asyncio.run)(_closing(pyfuncitem.obj(**arguments), lab))
    return True


async def _closing(body: Any, lab: Lab | None) -> None:
    try:
        await body
    finally:
        if lab is not None:
            await lab.close()
