"""The clients against the real middleware, over a network that loses requests and replies: each effect once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from semel import AsyncSemel
from semel.http.asgi import IdempotencyMiddleware
from semel.testing.proxy import Proxy
from tests.http.libraries import LIBRARIES, Caller, Library
from tests.http.shop import Ledger, starlette_shop


class Site:
    """The shop behind the middleware in uvicorn, and a proxy in front of it."""

    def __init__(self, proxy: Proxy, ledger: Ledger) -> None:
        self.proxy = proxy
        self.ledger = ledger
        self.url = f"http://{proxy.host}:{proxy.port}"


def _is_post(request: bytes) -> bool:
    return request.startswith(b"POST ")


def _serve(app: Any, listener: socket.socket) -> tuple[uvicorn.Server, threading.Thread]:
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", lifespan="on", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    return server, thread


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    ledger = Ledger()
    once = AsyncSemel(f"sqlite:///{tmp_path / 'server.db'}", timeout=20)
    app = IdempotencyMiddleware(
        starlette_shop(ledger),
        once=once,
        principal=lambda _: "ada",
        authenticated_outside=True,
        wait=0,
        store_timeout=20,  # a busy machine is no broken store
    )

    async def closing(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await once.aclose()  # in the loop that used it
        await send({"type": "lifespan.shutdown.complete"})

    listener = socket.create_server(("127.0.0.1", 0))
    server, thread = _serve(closing, listener)
    with Proxy(*listener.getsockname()) as proxy:
        yield Site(proxy, ledger)
    server.should_exit = True
    thread.join()


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    chosen: Library = request.param
    return chosen


def test_lost_requests_and_replies_leave_one_order(library: Library, site: Site, tmp_path: Path) -> None:
    caller = Caller(library, keys=f"sqlite:///{tmp_path / 'keys.db'}")
    lost = [site.proxy.swallow_reply(match=_is_post), site.proxy.reset_before(match=_is_post)]
    reply = caller.post(f"{site.url}/orders", wishes={"action": "order 7"})
    assert all(rule.fired.is_set() for rule in lost)
    assert (reply.status, reply.headers["location"], site.ledger.count("orders")) == (201, "/orders/1", 1)
    assert reply.report.replayed
    assert 86_300 < int(reply.headers["idempotency-retention"]) <= 86_400
    again = caller.post(f"{site.url}/orders", wishes={"action": "order 7"})
    assert (again.body, site.ledger.count("orders")) == (reply.body, 1)


def test_the_second_of_two_at_once_gets_the_result_of_the_first(library: Library, site: Site) -> None:
    caller = Caller(library, attempts=300, backoff=(0.01, 0.1), max_wait=0.1)
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda _: caller.post(f"{site.url}/slow", wishes={"key": "both"}), range(2)))
    assert [reply.body for reply in replies] == [b"slow", b"slow"]
    assert sorted(reply.report.replayed for reply in replies) == [False, True]
    assert site.ledger.count("slow") == 1


def test_a_failed_handler_is_run_again_and_a_refusal_is_not(library: Library, site: Site) -> None:
    site.ledger.failing = 2
    reply = Caller(library).post(f"{site.url}/fail")
    assert (reply.status, reply.body, site.ledger.count("fail")) == (200, b"recovered", 3)
    reused = Caller(library, key=lambda _: "one-key")
    assert reused.post(f"{site.url}/orders").status == 201
    refused = reused.post(f"{site.url}/empty")
    assert (refused.status, refused.report.attempts) == (422, 1)
