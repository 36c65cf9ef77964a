"""R16: a claim whose connection was reset is sent again, and the first copy reaches the store long after the second one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from semel import InProgress, LeaseLost
from semel.model import Busy, Record, State
from semel.testing.proxy import CHUNKS, RESP, Proxy, Rule

from .conftest import Lab, url_of
from .tools import meanwhile, owned, until

LEASE = 120.0  # far longer than a test: nothing here is mended by its end


class Wire:
    """A lab whose first face goes straight to the server, and its second one through a proxy."""

    def __init__(self, lab: Lab, proxy: Proxy, policy: str) -> None:
        self.lab = lab
        self.key = f"late-{uuid.uuid4().hex}"
        self._proxy = proxy
        given = {"lease": LEASE, "on_unknown": policy, "on_error": "release"}
        self.direct = lab.face(**given)
        lab.url = _moved(lab.url, proxy.port)
        self.reset = lab.face(**given)

    async def warm_up(self) -> Rule:
        """The next request of the second face that is about the key is left in the server's hands by a reset connection."""
        await self.lab.do(self.reset.execute(f"warm-{self.key}", self.lab.effect()))
        name = self.key.encode()
        looks = b"SELECT" if self.lab.url.startswith("mysql") else name  # by its hash, and first of all
        return self._proxy.reset_late(match=lambda request: name in request or looks in request)

    async def arrive(self) -> None:
        self._proxy.release()

    async def has_and_frees(self) -> None:
        with pytest.raises(ZeroDivisionError):
            await self.lab.do(self.direct.execute(self.key, self.lab.raising(ZeroDivisionError())))

    async def record(self) -> Record:
        record: Record = await self.lab.do(self.direct.peek(self.key))
        return record


def _moved(url: str, port: int) -> str:
    start, _, rest = url.rpartition(":")
    number = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return f"{start}:{port}{rest[len(number) :]}"


@pytest.fixture(params=["retry", "hold"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["redis", "postgres", "mysql"])
def lab(request: pytest.FixtureRequest, colour: str, tmp_path: Path) -> Lab:
    return Lab(colour, url_of(request, request.param, colour, tmp_path))


@pytest.fixture
def wire(lab: Lab, policy: str) -> Iterator[Wire]:
    port = int(_port(lab.url))
    with Proxy("127.0.0.1", port, framing=RESP if lab.url.startswith("redis") else CHUNKS) as proxy:
        yield Wire(lab, proxy, policy)


def _port(url: str) -> str:
    rest = url.rpartition(":")[2]
    return rest[: len(rest) - len(rest.lstrip("0123456789"))]


async def _blocks_nobody(lab: Lab, wire: Wire, freed: Record) -> None:
    """The late copy has been granted and given back, where the store grants it at all, and the key is anybody's."""
    await wire.arrive()
    if lab.url.startswith("redis"):  # the others' first statement only inserts what is not there, or reads

        async def given_back() -> bool:
            record = await wire.record()
            return record.nonce != freed.nonce and record.state is State.RELEASED

        await until(lab, given_back)
    assert (await lab.do(wire.direct.execute(wire.key, lab.effect("last"), wait=30))).value == "last"


async def test_R16_a_late_copy_of_a_claim_that_was_refused_is_given_back(lab: Lab, wire: Wire) -> None:
    rule = await wire.warm_up()
    with pytest.raises(ZeroDivisionError):
        async with owned(lab, wire.direct, wire.key):
            with pytest.raises(InProgress):
                await lab.do(wire.reset.execute(wire.key, lab.effect("never")))
            assert rule.fired.is_set()
            raise ZeroDivisionError
    await _blocks_nobody(lab, wire, await wire.record())


async def test_R16_a_late_copy_of_a_claim_by_hand_is_given_back(lab: Lab, wire: Wire) -> None:
    await wire.warm_up()
    with pytest.raises(ZeroDivisionError):
        async with owned(lab, wire.direct, wire.key):
            async with owned(lab, wire.reset, wire.key, verdicts=True) as claim:
                assert isinstance(claim.verdict, Busy)
            raise ZeroDivisionError
    await _blocks_nobody(lab, wire, await wire.record())


async def test_R16_a_late_copy_of_a_claim_that_was_won_and_freed_is_given_back(lab: Lab, wire: Wire) -> None:
    rule = await wire.warm_up()
    with pytest.raises(ZeroDivisionError):
        await lab.do(wire.reset.execute(wire.key, lab.raising(ZeroDivisionError())))
    assert rule.fired.is_set()
    mine = await wire.record()
    await wire.has_and_frees()
    freed = await wire.record()
    assert mine.nonce != freed.nonce
    await _blocks_nobody(lab, wire, freed)


@pytest.mark.parametrize("lab", ["redis"], indirect=True)  # the others insert what is not there, or read
async def test_R16_a_late_copy_of_a_claim_that_took_a_vanished_record_back_is_given_back(
    lab: Lab, wire: Wire
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with owned(lab, wire.reset, wire.key):
            rule = await wire.warm_up()
            with redis.Redis.from_url(lab.url) as stranger:
                stranger.flushdb()
            raise ZeroDivisionError  # its release finds no record, and claims it again
    assert rule.fired.is_set()
    mine = await wire.record()
    await wire.has_and_frees()
    freed = await wire.record()
    assert mine.nonce != freed.nonce
    await _blocks_nobody(lab, wire, freed)


@pytest.mark.parametrize("lab", ["redis"], indirect=True)
async def test_R16_a_late_copy_of_a_claim_of_a_run_that_was_overtaken_is_given_back(
    lab: Lab, wire: Wire
) -> None:
    rule = await wire.warm_up()
    with pytest.raises(LeaseLost):
        async with owned(lab, wire.reset, wire.key) as claim:
            assert rule.fired.is_set()
            with redis.Redis.from_url(lab.url) as stranger:
                stranger.flushdb()
            await wire.has_and_frees()
            await lab.do(claim.complete("late"))
    await _blocks_nobody(lab, wire, await wire.record())


async def test_R16_a_late_copy_is_its_own_caller_s_while_he_waits(lab: Lab, wire: Wire) -> None:
    """It is found by the next claim, which has the same nonce: nobody waits for himself, and nobody runs twice."""
    await wire.warm_up()
    waiting: Any = None
    with pytest.raises(ZeroDivisionError):
        async with owned(lab, wire.direct, wire.key):
            waiting = meanwhile(
                lab, 0.0, lambda: wire.reset.execute(wire.key, lab.effect("mine"), wait=60, poll=(0.01, 0.05))
            )
            await until(lab, lambda: wire.reset._engine().bench._waiting)
            await wire.arrive()
            raise ZeroDivisionError
    assert (await waiting()).value == "mine"
    assert len(lab.effects) == 2  # with the one that warmed up
