"""R23: a result that the store cannot take, for its size or for the time it takes to send, ends as a done marker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from semel import CodecError, InProgress, NotRecorded, Outcome, StoreUnavailable, current_run
from semel.model import Record, State
from semel.testing import services
from semel.testing.proxy import RESP, Proxy

from .conftest import SCHEMES, Lab
from .tools import pause, until

LARGE = 2_000_000
LEASE = 120.0  # far longer than a test: nothing here is mended by its end


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as running:
        yield running


def _narrow_redis(servers: ExitStack, colour: str) -> str:
    """A server that cuts whoever sends more than 1 MiB."""
    return str(servers.enter_context(services.redis(config={"proto-max-bulk-len": "1mb"})).url)


def _slow_redis(servers: ExitStack, colour: str) -> str:
    """A network on which nothing large arrives in time."""
    server = servers.enter_context(services.redis())
    proxy = servers.enter_context(Proxy(server.host, server.port, framing=RESP))
    for _ in range(100):
        proxy.blackhole(match=lambda request: len(request) > LARGE)
    return f"redis://{proxy.host}:{proxy.port}"


def _narrow_mariadb(servers: ExitStack, colour: str) -> str:
    server = servers.enter_context(services.mariadb(config={"max-allowed-packet": "1M"}))
    return f"{SCHEMES['mysql', colour]}://{server.database().partition('://')[2]}"


@pytest.fixture(params=[_narrow_redis, _slow_redis, _narrow_mariadb])
def lab(request: pytest.FixtureRequest, servers: ExitStack, colour: str) -> Lab:
    return Lab(colour, request.param(servers, colour))


def _large(lab: Lab) -> Callable[[], Any]:
    def work() -> bytes:
        lab.effects.append("large")
        current_run().set_ref("ord_1")
        return os.urandom(LARGE)

    return lab.fn(work)


async def _told(lab: Lab, once: Any, key: str) -> None:
    """The caller gets its value, in an outcome or in an error that carries it.

    A store that is slow by itself, on a machine that stands still, may not answer the claim in time: then nothing has run.
    """
    value = b""
    while not lab.effects:
        try:
            value = (await lab.do(once.execute(key, _large(lab)))).value
        except NotRecorded as error:
            value = error.value
        except (StoreUnavailable, InProgress):  # and the lost claim is given back in the background
            await pause(lab, 0.02)
    assert len(value) == LARGE


async def _done(lab: Lab, once: Any, key: str) -> Record:
    async def ended() -> Record | None:
        record: Record | None = await lab.do(once.peek(key))
        return record if record is not None and record.state is State.DONE else None

    return await until(lab, ended)  # type: ignore[no-any-return]  # a condition may answer anything


async def test_R23_a_result_that_the_store_cannot_take_ends_as_a_done_marker_with_its_ref(
    lab: Lab,
) -> None:
    once = lab.face(max_result=1 << 30, lease=LEASE, timeout=2, settle_timeout=0.5)
    await _told(lab, once, "k")
    record = await _done(lab, once, "k")
    assert (record.marker, record.ref, record.result) == ("too large for the store", "ord_1", b"")
    later = await lab.do(lab.face(timeout=5).execute("k", _large(lab)))
    assert (later.replayed, later.ref, lab.effects) == (True, "ord_1", ["large"])
    says = r"too large for the store.*raise what the server takes \(max_allowed_packet .*or return less$"
    with pytest.raises(CodecError, match=says) as caught:
        _ = later.value
    assert "max_result" not in str(caught.value), "that one would have let it pass"


def test_R23_a_marker_of_before_is_still_read() -> None:
    """Until the store's own limit had a marker, all that was too large had the one of `max_result`."""
    for marker in ("too large", "a word of another version"):
        outcome = Outcome(None, True, "ord_1", 1, marker)
        with pytest.raises(CodecError, match=rf"not kept \({marker}\); ref='ord_1'. Raise `max_result`$"):
            _ = outcome.value


async def test_R23_a_face_that_is_closed_keeps_at_least_that_it_happened(lab: Lab) -> None:
    once = lab.face(max_result=1 << 30, lease=LEASE, timeout=1, settle_timeout=0.2)
    await _told(lab, once, "k")
    once._engine().settle_timeout = 20.0  # its caller was in a hurry, whoever closes it is not
    await lab.do(once.close())
    assert (await lab.do(lab.face(timeout=5).peek("k"))).state is State.DONE


async def test_R26_a_step_whose_result_the_store_refuses_is_not_made_again(
    servers: ExitStack, light_lab: Lab
) -> None:
    lab = light_lab
    lab.url = _narrow_mariadb(servers, lab.colour)
    once = lab.face()

    def work() -> Any:
        return current_run().step("charge", lab.effect(os.urandom(700_000)))

    for why in ("max_allowed_packet", "is done and is not made again.*more than the store takes"):
        with pytest.raises(CodecError, match=why):
            await lab.do(once.execute("k", lab.fn(work)))
    assert len(lab.effects) == 1
