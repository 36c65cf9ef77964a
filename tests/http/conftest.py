"""A shop behind the middleware, in both colours and on several stores, and a client that speaks to it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel import AsyncSemel, Semel
from semel.calls import nothing_to_run
from semel.http import asgi, wsgi
from semel.http.body import Body
from semel.http.fingerprints import fingerprint
from semel.http.rules import core_key
from semel.runtime import run_sync
from tests.http.shop import Ledger, flask_shop, starlette_shop

STORES = ("memory", "sqlite", "redis", "postgres")
SCHEMES = {"async": "postgresql+asyncpg", "sync": "postgresql+psycopg"}


class Edge:
    """The shop behind one middleware. `post` and `together` hide whether it is ASGI or WSGI."""

    def __init__(self, colour: str, url: str) -> None:
        self.colour = colour
        self.url = url
        self.ledger = Ledger()
        self.tenant = uuid.uuid4().hex
        self.runner = asyncio.Runner()
        self.once: Any = None
        self._client: Any = None
        self.plan: Any = None
        self._made: list[Any] = []

    def open(self, *, semel: dict[str, Any] | None = None, app: Any = None, **options: Any) -> Edge:
        """Put the middleware around the shop, with these options."""
        kind = Semel if self.colour == "sync" else AsyncSemel
        given: dict[str, Any] = {"tenant": self.tenant, "timeout": 20}
        self.once = kind(self.url, **(given | (semel or {})))
        options.setdefault("store_timeout", 20.0)  # a busy machine is no broken store
        if not options.get("anonymous"):
            options.setdefault("principal", lambda request: request.headers.get("x-user"))
        if "authorize" not in options:
            options["authenticated_outside"] = True
        if self.colour == "sync":
            around = wsgi.IdempotencyMiddleware(app or flask_shop(self.ledger), once=self.once, **options)
            self.plan = around._plan
            transport: Any = httpx.WSGITransport(around, raise_app_exceptions=False)
            self._client = httpx.Client(transport=transport, base_url="http://shop")
        else:
            inside = asgi.IdempotencyMiddleware(app or starlette_shop(self.ledger), once=self.once, **options)
            self.plan = inside._plan
            transport = httpx.ASGITransport(inside, raise_app_exceptions=False)
            self._client = httpx.AsyncClient(transport=transport, base_url="http://shop")
        self._made.append((self._client, self.once))
        return self

    def do(self, thing: Any) -> Any:
        return self.runner.run(thing) if self.colour == "async" else thing

    def send(
        self,
        path: str,
        key: str | None = "key-1",
        *,
        method: str = "POST",
        user: str | None = "ada",
        **request: Any,
    ) -> httpx.Response:
        return self.do(self._sent(path, key, method, user, request))  # type: ignore[no-any-return]  # of either colour

    def _sent(
        self, path: str, key: str | None, method: str, user: str | None, request: dict[str, Any]
    ) -> Any:
        headers = dict(request.pop("headers", {}))
        if key is not None:
            headers["Idempotency-Key"] = key
        if user is not None:
            headers["X-User"] = user
        return self._client.request(method, path, headers=headers, **request)

    def together(self, *requests: dict[str, Any]) -> list[httpx.Response]:
        """All of them at once."""

        def one(given: dict[str, Any]) -> Any:
            given = {"key": "key-1", "method": "POST", "user": "ada", **given}
            path, key, method, user = (given.pop(name) for name in ("path", "key", "method", "user"))
            return self._sent(path, key, method, user, given)

        if self.colour == "sync":
            with ThreadPoolExecutor(len(requests)) as pool:
                answers: list[httpx.Response] = list(pool.map(one, requests))
                return answers

        async def gathered() -> list[httpx.Response]:
            return list(await asyncio.gather(*(one(given) for given in requests)))

        return self.runner.run(gathered())

    def orphan(self, key: str = "key-1", user: str = "ada", **options: Any) -> None:
        """A claim whose process was killed right after it: no heartbeat follows, and no outcome."""

        async def claim() -> None:
            given = {"operation": "http", "result_type": bytes, **options}
            call = self.once._call(core_key(key, user), nothing_to_run, (), given)
            await self.once._engine().ask_once(call)

        self.drive(claim())

    def drive(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine) if self.colour == "async" else run_sync(coroutine)

    def print_of(self, path: str) -> str:
        """The fingerprint of a POST without a body."""
        return fingerprint("POST", path, b"", "", Body(0))

    def count(self, what: str) -> int:
        return self.ledger.count(what)

    def close(self) -> None:
        for client, once in self._made:
            if self.colour == "sync":
                client.close()
                once.close()
            else:
                self.runner.run(client.aclose())
                self.runner.run(once.aclose())
        self.runner.close()


@pytest.fixture(params=["async", "sync"])
def colour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest, colour: str, tmp_path: Path) -> str:
    name = request.param
    if name == "memory":
        return "memory://"
    if name == "sqlite":
        return f"sqlite:///{tmp_path}/semel.db"
    if name == "redis":
        return str(request.getfixturevalue("redis_server").url)
    url = str(request.getfixturevalue("postgres_server").url)
    return f"{SCHEMES[colour]}://{url.partition('://')[2]}"


@pytest.fixture
def edge(colour: str, store_url: str) -> Iterator[Edge]:
    """On every store: for the rows that the store decides."""
    made = Edge(colour, store_url)
    yield made
    made.close()


@pytest.fixture
def shop(colour: str) -> Iterator[Edge]:
    """On the memory store: for the rows that the policy decides."""
    made = Edge(colour, "memory://")
    yield made
    made.close()
