"""The clients as users meet them: names, options and their documentation, missing libraries, threads, cancellation."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import httpx
import pytest
import requests

from semel.http import client as clients
from semel.http.client import (
    AsyncIdempotentTransport,
    ClientOptions,
    IdempotentTransport,
    RequestOptions,
    delivered,
)
from semel.http.clients.options import Settings
from tests.docs.markdown import ROOT, section
from tests.http.rogue import Rogue, rogue

PAGE = (ROOT / "docs" / "reference" / "http.md").read_text("utf-8")


@pytest.fixture
def server() -> Iterator[Rogue]:
    with rogue() as one:
        yield one


def test_every_public_name_can_be_reached() -> None:
    assert all(getattr(clients, name) is not None for name in clients.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Transport'"):
        clients.Transport  # noqa: B018 - to ask for it is the test


@pytest.mark.parametrize(
    "missing, name, extra",
    [("httpx", "IdempotentTransport", "semel[httpx]"), ("requests", "IdempotentAdapter", "semel[requests]")],
)
def test_a_missing_library_is_named_with_its_extra_and_the_rest_works(
    missing: str, name: str, extra: str
) -> None:
    program = f"""
import sys
sys.modules[{missing!r}] = None
from semel import ConfigurationError
from semel.http.client import DurableKeys
try:
    from semel.http.client import {name}
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert extra in done.stdout


def test_the_core_needs_neither_library() -> None:
    program = "import semel, sys; import semel.http.client; print({'httpx', 'requests', 'anyio'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_every_option_is_declared_and_documented_with_its_default() -> None:
    assert set(ClientOptions.__annotations__) == set(Settings.__struct_fields__)
    table = section(PAGE, "Options of a client")
    for name, default in zip(Settings.__struct_fields__, Settings.__struct_defaults__, strict=True):
        plain = f"`{None if default == inf else default!r}`"
        written = "`PATCH`, `POST`" if name == "methods" else plain
        assert f"| `{name}` | {written} |" in table, (name, written)
    words = section(PAGE, "Options of one request")
    assert [name for name in RequestOptions.__annotations__ if f"`{name}`" not in words] == []


def test_threads_share_a_transport_and_one_action(server: Rogue, tmp_path: Path) -> None:
    transport = IdempotentTransport(
        httpx.HTTPTransport(verify=False), keys=f"sqlite:///{tmp_path / 'keys.db'}"
    )
    server.script = ["lose"] * 4
    with httpx.Client(transport=transport) as client, ThreadPoolExecutor(8) as pool:

        def post(action: str) -> int:
            return client.post(server.url, extensions={"semel": {"action": action}}, timeout=30).status_code

        assert set(pool.map(post, [f"order {number % 4}" for number in range(24)])) == {201}
    assert len(server.effects) == len(set(server.keys)) == 4


def test_a_copied_session_of_requests_sends_under_the_same_keys(server: Rogue, tmp_path: Path) -> None:
    """In the way in which a pool of processes gets one, too."""
    session = requests.Session()
    session.mount("http://", clients.IdempotentAdapter(keys=f"sqlite:///{tmp_path / 'keys.db'}", attempts=3))
    server.script = ["lose", "lose"]
    for one in (session, copy.deepcopy(session)):
        with one, clients.sending(action="order 7"):
            assert one.post(server.url, timeout=30).status_code == 201
    assert len(server.effects) == len(set(server.keys)) == 1


def test_a_cancelled_request_stops_trying_and_its_action_goes_on_later(server: Rogue, tmp_path: Path) -> None:
    async def run() -> None:
        transport = AsyncIdempotentTransport(
            httpx.AsyncHTTPTransport(verify=False), keys=f"sqlite:///{tmp_path / 'keys.db'}"
        )
        async with httpx.AsyncClient(transport=transport) as client:
            server.script = ["hang"]
            action = {"semel": {"action": "charge"}}
            task = asyncio.create_task(client.post(server.url, extensions=action))
            assert await asyncio.to_thread(server.arrived.acquire, timeout=30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(server.seen) == 1
            report = delivered(await client.post(server.url, extensions=action))
            assert report is not None
            assert report.replayed

    asyncio.run(run())
    assert len(set(server.keys)) == len(server.effects) == 1


def test_many_tasks_share_a_transport(server: Rogue) -> None:
    async def run() -> set[int]:
        transport = AsyncIdempotentTransport(httpx.AsyncHTTPTransport(verify=False), backoff=(0, 0.01))
        async with httpx.AsyncClient(transport=transport, timeout=30) as client:
            server.script = ["lose", "drop"] * 5
            answers = await asyncio.gather(*(client.post(server.url, json={"n": n}) for n in range(20)))
            return {answer.status_code for answer in answers}

    assert asyncio.run(run()) == {201}
    assert len(server.effects) == len(set(server.keys)) == 20
