"""Servers killed, stores paused, clients gone: what a caller is told, and what never happens twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from semel import AsyncSemel
from semel.grpc import AsyncIdempotencyInterceptor, Method
from semel.testing import services
from tests.grpc.conftest import url_of
from tests.grpc.lab import KEY, PUSHBACK, SERVICE, Lab, Loop, reply_of, shop, shop_grpc, who

Code = grpc.StatusCode
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def other() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a second server, in a process that can be killed and stopped."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.grpc.worker", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.kill()
        worker.communicate()


def said(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


@pytest.mark.parametrize("effects", ["db", "opaque"])
@pytest.mark.parametrize(("store", "colour"), [("sqlite", "sync"), ("redis", "async"), ("postgres", "sync")])
def test_g12_a_server_killed_in_the_middle_of_a_call(
    request: pytest.FixtureRequest,
    other: Callable[..., subprocess.Popen[str]],
    store: str,
    colour: str,
    effects: str,
    tmp_path: Path,
    aio_loop: Loop,
) -> None:
    lab = Lab(colour, url_of(request, store, colour, tmp_path), aio_loop)
    request.addfinalizer(lab.close)
    worker = other(colour, lab.url, lab.tenant, effects)
    lab.serve(effects=effects, lease=0.5)
    with grpc.insecure_channel(f"127.0.0.1:{said(worker)}") as channel:
        first = lab.later(key="k-1", channel=channel)
        assert said(worker) == "begun"
        worker.kill()
        assert first.result(20).code is Code.UNAVAILABLE
    again = lab.call(key="k-1")
    if effects == "db":
        assert again.message.id == "order of book"
        assert again.replayed == "false"
        assert lab.call(key="k-1").replayed == "true"
    else:
        assert (again.code, again.reason) == (Code.FAILED_PRECONDITION, "OUTCOME_UNKNOWN")
        assert lab.calls == []


@pytest.mark.parametrize(("store", "colour"), [("sqlite", "sync"), ("redis", "async")])
def test_g12_a_server_that_was_paused_beyond_its_lease_changes_nothing(
    request: pytest.FixtureRequest,
    other: Callable[..., subprocess.Popen[str]],
    store: str,
    colour: str,
    tmp_path: Path,
    aio_loop: Loop,
) -> None:
    lab = Lab(colour, url_of(request, store, colour, tmp_path), aio_loop)
    request.addfinalizer(lab.close)
    worker = other(colour, lab.url, lab.tenant, "db")
    lab.serve(lease=0.5)
    with grpc.insecure_channel(f"127.0.0.1:{said(worker)}") as channel:
        first = lab.later(key="k-1", channel=channel)
        assert said(worker) == "begun"
        worker.send_signal(signal.SIGSTOP)
        assert lab.call(key="k-1").message.id == "order of book", "taken over"
        worker.send_signal(signal.SIGCONT)
        assert worker.stdin is not None
        worker.stdin.write("go on\n")
        worker.stdin.flush()
        late = first.result(20)
        assert (late.code, late.reason) == (Code.ABORTED, "LEASE_LOST")
        assert late.trailing[PUSHBACK] == "1000"
    assert lab.call(key="k-1").message.id == "order of book"
    assert len(lab.calls) == 1


def test_g13_a_store_that_does_not_answer_is_unavailable_with_pushback(colour: str, aio_loop: Loop) -> None:
    with services.redis() as server:
        lab = Lab(colour, server.url, aio_loop)
        try:
            lab.serve(settings={"timeout": 1})
            assert lab.call(key="k-1").code is Code.OK
            with server.paused():
                start = time.monotonic()
                down = lab.call(key="k-2")
                assert time.monotonic() - start < 20
            assert (down.code, down.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
            assert down.trailing[PUSHBACK] == "1000"
            assert down.infos["RetryInfo"].retry_delay.seconds == 1
            assert len(lab.calls) == 1, "fails closed"
            assert lab.call(key="k-2").code is Code.OK
        finally:
            lab.close()


def test_g13_an_outcome_that_is_not_recorded_yet_is_unavailable_and_replayed_later(
    colour: str, aio_loop: Loop
) -> None:
    with services.redis() as server:
        lab = Lab(colour, server.url, aio_loop)

        def act(request: Any, say: Any) -> Any:
            server.pause()
            return shop.Made(id="happened")

        lab.act = act
        try:
            lab.serve(settings={"timeout": 1, "settle_timeout": 0.3})
            pending = lab.call(key="k-1")
            assert (pending.code, pending.reason) == (Code.UNAVAILABLE, "OUTCOME_PENDING")
            assert pending.trailing[PUSHBACK] == "1000"
            server.resume()
            lab.wait_for(lambda: lab.call(key="k-1").code is Code.OK)
            again = lab.call(key="k-1")
            assert again.message.id == "happened"
            assert again.replayed == "true"
            assert len(lab.calls) == 1
        finally:
            server.resume()
            lab.close()


@pytest.mark.parametrize("colour", ["async"])
def test_g11_a_client_that_only_waits_may_leave(light: Lab) -> None:
    """Who waits for another one's outcome owns nothing: its leaving starts nothing later."""
    go = threading.Event()

    def act(request: Any, say: Any) -> Any:
        assert go.wait(20)
        raise LookupError

    light.act = act
    light.serve(wait=60)
    first = light.later(key="k-1")
    light.wait_for(lambda: light.calls)
    stub = shop_grpc.ShopStub(light.channel)
    leaving = stub.Create.future(shop.Order(item="book"), metadata=((KEY, "k-1"),))
    light.wait_for(lambda: len(light.interceptor._running) == 2)
    leaving.cancel()
    light.wait_for(lambda: len(light.interceptor._running) == 1)
    go.set()
    assert first.result(20).code is Code.UNKNOWN
    assert len(light.calls) == 1


def test_g11_a_server_that_stops_waits_for_handlers_whose_clients_left(aio_loop: Loop) -> None:
    lab = Lab("async", f"memory://{uuid.uuid4().hex}", aio_loop)
    go = threading.Event()
    lab.act = lambda request, say: shop.Made(id=str(go.wait(20)))
    try:
        lab.serve()
        assert lab.leave("k-1") is Code.CANCELLED
        assert lab.loop.run(lab.interceptor.drain(0.01)) == 1
        go.set()
        assert lab.loop.run(lab.interceptor.drain(20)) == 0
        assert lab.finished
    finally:
        lab.close()


class OtherStyles:
    """Handlers as grpc.aio also takes them: plain functions, writers, readers."""

    def __init__(self) -> None:
        self.calls = 0

    def Create(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if request.item == "none":
            context.abort(Code.NOT_FOUND, "no such book")
        context.send_initial_metadata((("etag", "v1"),))
        return shop.Made(id=request.item)

    async def Watch(self, request: Any, context: Any) -> None:
        self.calls += 1
        for number in range(2):
            await context.write(shop.Made(id=str(number)))

    async def Upload(self, requests: Any, context: Any) -> Any:
        self.calls += 1
        items = []
        while (request := await context.read()) is not grpc.aio.EOF:
            items.append(request.item)
        return shop.Made(id=" ".join(items))

    Cancel = Get = Put = Chat = Create


class PlainStream(OtherStyles):
    def Watch(self, request: Any, context: Any) -> Any:
        self.calls += 1
        yield shop.Made(id="0")
        yield shop.Made(id="1")

    def Upload(self, requests: Any, context: Any) -> Any:
        self.calls += 1
        return shop.Made(id=" ".join(request.item for request in requests))


@pytest.mark.parametrize("style", [OtherStyles, PlainStream])
@pytest.mark.parametrize("keyed", [True, False])
def test_g11_every_style_of_aio_handler_is_served(
    aio_loop: Loop, style: type[OtherStyles], keyed: bool
) -> None:
    servicer = style()

    async def start() -> tuple[Any, Any, int]:
        once = AsyncSemel("memory://")
        methods = {f"{SERVICE}/{name}": Method(stream=True) for name in ("Watch", "Upload", "Create")}
        interceptor = AsyncIdempotencyInterceptor(once=once, principal=who, methods=methods)
        server = grpc.aio.server(ThreadPoolExecutor(2), interceptors=[interceptor])
        shop_grpc.add_ShopServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return once, server, port

    once, server, port = aio_loop.run(start())
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    stub = shop_grpc.ShopStub(channel)

    def call(method: str, request: Any, key: str) -> Any:
        metadata = ((KEY, key),) if keyed else ()
        return reply_of(getattr(stub, method), request, metadata, 20)

    try:
        for _ in range(2):
            made = call("Create", shop.Order(item="book"), "k-1")
            assert made.message.id == "book"
            assert made.initial["etag"] == "v1"
            assert (made.replayed is not None) is keyed
            assert call("Create", shop.Order(item="none"), "k-2").details == "no such book"
            assert [one.id for one in call("Watch", shop.Order(), "k-3").messages] == ["0", "1"]
            orders = [shop.Order(item="a"), shop.Order(item="b")]
            assert call("Upload", orders, "k-4").message.id == "a b"
        assert servicer.calls == (4 if keyed else 8)
    finally:
        channel.close()
        aio_loop.run(server.stop(0))
        aio_loop.run(once.aclose())


def test_a_handler_may_use_semel_itself(light: Lab) -> None:
    """An error of its own once is the handler's failure, and not this layer's word on the key."""
    from semel import KeyMismatch

    def act(request: Any, say: Any) -> Any:
        raise KeyMismatch("of another key")

    light.act = act
    light.serve()
    reply = light.call(key="k-1")
    assert reply.code is Code.UNKNOWN
    assert "of another key" in reply.details


def test_resolvers_of_an_aio_server_may_be_coroutines(aio_loop: Loop) -> None:
    lab = Lab("async", f"memory://{uuid.uuid4().hex}", aio_loop)

    async def principal(context: Any) -> str:
        await asyncio.sleep(0)
        return str(who(context))

    try:
        lab.serve(principal=principal)
        assert lab.call(key="k-1", user="ann").replayed == "false"
        assert lab.call(key="k-1", user="bob").replayed == "false"
        assert lab.call(key="k-1", user="ann").replayed == "true"
    finally:
        lab.close()
