"""R16: a forget whose reply was lost is sent again, or reaches the store late: it is about the record it saw, and no other."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from semel import Semel
from semel.model import Record, State
from semel.testing.proxy import CHUNKS, RESP, Proxy

from .conftest import Lab, url_of
from .test_late_copies import _moved, _port
from .tools import until


class Wire:
    """A lab whose face goes through a proxy, and a stranger who goes straight to the server."""

    def __init__(self, lab: Lab, proxy: Proxy, direct: str) -> None:
        self.lab = lab
        self.proxy = proxy
        self.direct = direct
        self.key = f"late-{uuid.uuid4().hex}"
        self.reason = f"because-{uuid.uuid4().hex}"
        self.face = lab.face()

    def is_the_forget(self, request: bytes) -> bool:
        """Nothing else has its reason."""
        return self.reason.encode() in request

    async def forget(self) -> bool:
        gone: bool = await self.lab.do(self.face.forget(self.key, actor="ada", reason=self.reason))
        return gone

    def made_again(self) -> None:
        """In a thread of its own: a plain face for whoever asks, also the proxy's loop."""
        with ThreadPoolExecutor(1) as other:
            other.submit(self._make).result()

    def _make(self) -> None:
        with Semel(self.direct, tenant=self.lab.tenant, timeout=20) as once:
            once.execute(self.key, lambda: "new")

    async def record(self) -> Record:
        record: Record = await self.lab.do(self.face.peek(self.key))
        return record


@pytest.fixture(params=["redis", "postgres", "mysql"])
def lab(request: pytest.FixtureRequest, colour: str, tmp_path: Path) -> Lab:
    return Lab(colour, url_of(request, request.param, colour, tmp_path))


@pytest.fixture
def wire(lab: Lab, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wire]:
    store = lab.url.partition(":")[0].partition("+")[0].replace("postgresql", "postgres")
    direct = url_of(request, store, "sync", tmp_path)
    framing = RESP if store == "redis" else CHUNKS
    with Proxy("127.0.0.1", int(_port(lab.url)), framing=framing) as proxy:
        lab.url = _moved(lab.url, proxy.port)
        yield Wire(lab, proxy, direct)


class Afterwards:
    """A match that is never true: it sees the requests, and does something once, before the first one after an event."""

    def __init__(self, event: threading.Event, act: Callable[[], Any]) -> None:
        self._event = event
        self._act: Callable[[], Any] | None = act

    def __call__(self, _: bytes) -> bool:
        act = self._act
        if act is not None and self._event.is_set():
            self._act = None
            act()
        return False


async def test_R16_a_forget_that_is_sent_again_leaves_what_was_made_meanwhile(lab: Lab, wire: Wire) -> None:
    await lab.do(wire.face.execute(wire.key, lab.effect("old")))
    lost = wire.proxy.swallow_reply(match=wire.is_the_forget)
    wire.proxy.drip(match=Afterwards(lost.fired, wire.made_again))
    assert await wire.forget() is True
    assert lost.fired.is_set()
    assert (await wire.record()).state is State.DONE
    assert (await lab.do(wire.face.execute(wire.key, lab.effect("never")))).value == "new"
    (event,) = await lab.do(wire.face.history(wire.key))
    assert event.reason == wire.reason


async def test_R16_a_forget_that_arrives_late_leaves_what_was_made_since(lab: Lab, wire: Wire) -> None:
    await lab.do(wire.face.execute(wire.key, lab.effect("old")))
    late = wire.proxy.reset_late(match=wire.is_the_forget)
    assert await wire.forget() is True
    assert late.fired.is_set()
    wire.made_again()
    await _arrived(lab, wire)
    assert (await wire.record()).state is State.DONE
    assert (await lab.do(wire.face.execute(wire.key, lab.effect("never")))).value == "new"
    assert len(await lab.do(wire.face.history(wire.key))) == 1


async def _arrived(lab: Lab, wire: Wire) -> None:
    """The late copy is let go. Redis says when it has run; the others' late statement names the version of its row."""
    if not wire.direct.startswith("redis"):
        wire.proxy.release()
        return
    with redis.Redis.from_url(wire.direct) as stranger:

        def scripts() -> int:
            told: Any = stranger.info("commandstats")
            return sum(told.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))

        before = scripts()
        wire.proxy.release()
        await until(lab, lambda: scripts() > before)


async def test_R7_a_forget_follows_a_record_that_changes_hands_meanwhile(lab: Lab) -> None:
    """It is still the same one: what a person said of it goes with it."""
    once = lab.face()
    with pytest.raises(ZeroDivisionError):
        await lab.do(once.execute("held", lab.raising(ZeroDivisionError()), on_error="hold"))
    store = once._engine().store
    real = store.peek

    async def peek(scope: Any) -> Any:
        store.peek = real
        seen = await real(scope)
        await lab.do(once.resolve("held", value="said", actor="bob"))
        return seen

    store.peek = peek
    assert await lab.do(once.forget("held", actor="ada")) is True
    assert await lab.do(once.peek("held")) is None
