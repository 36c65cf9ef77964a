"""A first call at the very moment of `close()`, in another thread: it works, or is told that the face is closed.

Whichever it is, nothing stays behind: no connection, no thread, no renewal, no key that nobody runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, ConfigurationError, Semel
from semel.layers import Layer
from semel.model import Ask, State, Verdict
from semel.runtime import run_sync
from semel.testing.proxy import Proxy

from .conftest import STORES, url_of
from .test_late_copies import _moved, _port

CLOSED = "this Semel is closed: make a new one"


class Site:
    """A store, straight and through a proxy that counts connections."""

    def __init__(self, direct: str, proxied: str, proxy: Proxy | None) -> None:
        self.direct = direct
        self.proxied = proxied
        self.tenant = uuid.uuid4().hex
        self._proxy = proxy
        self._threads = set(threading.enumerate())

    def is_left(self) -> None:
        """Nothing of ours is there any more."""
        until = time.monotonic() + 20
        while (set(threading.enumerate()) - self._threads) or (self._proxy and self._proxy.open_connections):
            assert time.monotonic() < until, (threading.enumerate(), self._proxy)
            time.sleep(0.005)


@pytest.fixture(params=STORES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    direct = url_of(request, request.param, "sync", tmp_path)
    if request.param in ("memory", "sqlite"):
        yield Site(direct, direct, None)
        return
    with Proxy("127.0.0.1", int(_port(direct))) as proxy:
        yield Site(direct, _moved(direct, proxy.port), proxy)


class Held(Layer):
    """A claim that is on its way until it is let go."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.asked, self.goes = threading.Event(), threading.Event()

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        self.asked.set()
        assert self.goes.wait(20)
        return await self.inner.claim(asks)


def _in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    ended: list[Any] = []

    def body() -> None:
        try:
            ended.append(work())
        except Exception as error:  # looked at by the test
            ended.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, ended


@pytest.mark.timeout(60)
def test_whoever_closes_waits_for_a_claim_that_is_on_its_way(site: Site) -> None:
    once = Semel(site.proxied, timeout=20, settle_timeout=20, on_unknown="hold", tenant=site.tenant)
    once._store = held = Held(once._store)
    caller, ended = _in_thread(lambda: once.execute("k", lambda: "done"))
    assert held.asked.wait(20)
    closer, _ = _in_thread(once.close)
    while not once._door.closed:
        time.sleep(0.001)
    closer.join(0.1)
    assert closer.is_alive()
    held.goes.set()
    for thread in (caller, closer):
        thread.join(20)
        assert not thread.is_alive()
    assert ended[0].value == "done", ended
    site.is_left()
    with Semel(site.direct, timeout=20, tenant=site.tenant) as other:
        record = other.peek("k")
        assert record is not None
        assert record.state is State.DONE


@pytest.mark.timeout(60)
def test_a_call_that_comes_when_the_face_has_just_been_closed_opens_nothing(site: Site) -> None:
    for warm in (True, False):
        once = Semel(site.proxied, timeout=20, tenant=site.tenant)
        if warm:
            once.execute("warm", lambda: 1)
        engine, call = once._engine(), once._call("late", lambda: 1, (), {})
        once.close()
        with pytest.raises(ConfigurationError, match=CLOSED):
            run_sync(engine.execute(call))
        if site.direct.startswith(
            ("sqlite", "redis", "mysql")
        ):  # the others open again on use, by themselves
            for verb in (engine.store.peek(call.scope), engine.store.purge(1)):
                with pytest.raises(Exception, match="closed"):
                    run_sync(verb)
        site.is_left()


@pytest.mark.timeout(60)
def test_a_face_that_is_closed_while_its_first_caller_makes_it_ready_stays_closed(site: Site) -> None:
    once = Semel(site.proxied, timeout=20, purge_every=0.02, tenant=site.tenant)
    made = once._engine_for

    def closed_meanwhile(runtime: Any) -> Any:
        engine = made(runtime)
        closer, _ = _in_thread(once.close)
        closer.join(20)
        assert not closer.is_alive()
        time.sleep(0.1)  # its purge comes: nobody has told it yet
        return engine

    once._engine_for = closed_meanwhile  # type: ignore[method-assign]  # the moment between
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=CLOSED):
            once.execute("k", lambda: 1)
    site.is_left()


@pytest.mark.timeout(60)
def test_a_face_that_is_closed_in_another_loop_while_it_is_made_ready_stays_closed() -> None:
    once = AsyncSemel("memory://", purge_every=0.02)
    made, engines = once._engine_for, list[Any]()

    def closed_meanwhile(runtime: Any) -> Any:
        engines.append(made(runtime))
        closer, _ = _in_thread(lambda: asyncio.run(once.aclose()))
        closer.join(20)
        assert not closer.is_alive()
        return engines[0]

    once._engine_for = closed_meanwhile  # type: ignore[method-assign]  # the moment between

    async def main() -> None:
        with pytest.raises(ConfigurationError, match="this AsyncSemel is closed: make a new one"):
            await once.execute("k", lambda: 1)
        assert engines[0].purger._timer is None

    asyncio.run(main())
