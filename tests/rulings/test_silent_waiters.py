"""R3, R16: one who waits for a key, and whose connection to the store goes silent meanwhile, waits on; one whose store is away is told."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import StoreUnavailable, points
from semel.testing.proxy import CHUNKS, RESP, Proxy, Rule

from .conftest import Lab, url_of
from .test_late_copies import _moved, _port
from .tools import meanwhile, owned, until

TIMEOUT = 2.0
WAIT = 120.0


class Silence:
    """The first face goes straight to the server, the second one through a proxy, which breaks what comes when it waits."""

    def __init__(self, lab: Lab, proxy: Proxy) -> None:
        self.lab = lab
        self.proxy = proxy
        self.key = f"silent-{uuid.uuid4().hex}"
        self.rules: list[Rule] = []
        self.direct = lab.face(lease=60)
        lab.url = _moved(lab.url, proxy.port)
        self.waiting = lab.face(lease=60, timeout=TIMEOUT)

    async def warm_up(self) -> None:
        await self.lab.do(self.waiting.execute(f"warm-{self.key}", self.lab.effect()))
        self.lab.effects.clear()

    def at_wait(self, name: str) -> None:
        if name == "wait.parked" and not self.rules:
            self.rules.append(self.proxy.stall())

    def call(self) -> Any:
        return self.waiting.execute(self.key, self.lab.effect("again"), wait=WAIT)

    def has_struck(self) -> bool:
        return bool(self.rules) and self.rules[0].fired.is_set()


@pytest.fixture(params=["redis", "postgres", "mysql"])
def lab(request: pytest.FixtureRequest, colour: str, tmp_path: Path) -> Lab:
    return Lab(colour, url_of(request, request.param, colour, tmp_path))


@pytest.fixture
def silence(lab: Lab) -> Iterator[Silence]:
    framing = RESP if lab.url.startswith("redis") else CHUNKS
    with Proxy("127.0.0.1", int(_port(lab.url)), framing=framing) as proxy:
        yield Silence(lab, proxy)
        points.listen(None)


async def test_R16_a_waiter_whose_connection_goes_silent_gets_the_outcome(lab: Lab, silence: Silence) -> None:
    await silence.warm_up()
    async with owned(lab, silence.direct, silence.key) as claim:
        points.listen(silence.at_wait)
        waiting = meanwhile(lab, 0, silence.call)
        await until(lab, silence.has_struck)
        await lab.do(claim.complete("done"))
    outcome = await waiting()
    assert (outcome.value, outcome.replayed, lab.effects) == ("done", True, [])


async def test_R16_a_waiter_whose_store_is_away_is_told_long_before_its_wait_is_over(
    lab: Lab, silence: Silence
) -> None:
    await silence.warm_up()
    async with owned(lab, silence.direct, silence.key) as claim:
        parked: list[float] = []
        points.listen(lambda name: parked.append(time.monotonic()) if name == "wait.parked" else None)
        waiting = meanwhile(lab, 0, silence.call)
        await until(lab, lambda: parked)
        silence.proxy.refuse()
        silence.proxy.cut()
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await waiting()
        assert time.monotonic() - began < WAIT / 2
        silence.proxy.refuse(refusing=False)
        await lab.do(claim.complete("done"))
    assert lab.effects == []
