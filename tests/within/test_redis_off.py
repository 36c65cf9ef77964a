"""R8, R28: a pipeline under a face that is switched off."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ResponseError

from semel import KeyMismatch, Semel
from semel.messaging import Message, Outbox
from tests.within.lab import wait
from tests.within.test_redis import RedisLab, run


@pytest.fixture(params=["sync", "async"])
def lab(request: pytest.FixtureRequest, redis_server: Any) -> RedisLab:
    return RedisLab(request.param, redis_server.url)


def test_R8_what_is_queued_on_a_pipeline_is_sent_though_nothing_is_protected(lab: RedisLab) -> None:
    async def body() -> None:
        with pytest.warns(UserWarning, match="switched off"):
            once = lab.face(enabled=False)
        pipe, name = lab.pipe(), lab.name("n")

        async def work() -> int:
            pipe.incr(name)
            return 7

        for count in (1, 2):
            outcome = await wait(once.within(pipe).execute("k1", lab.fn(work)))
            assert (outcome.value, outcome.replayed, lab.plain.get(name)) == (7, False, str(count))
        assert await wait(once.within(pipe).consume("k1", lab.fn(work)))
        claim = once.within(pipe).claim("k1")
        await wait(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
        pipe.incr(name)
        await wait(claim.complete(1))
        assert lab.plain.get(name) == "4"

    run(lab, body())


def test_R8_what_failed_leaves_nothing_queued(lab: RedisLab) -> None:
    async def body() -> None:
        with pytest.warns(UserWarning, match="switched off"):
            once = lab.face(enabled=False)
        pipe = lab.pipe()
        lab.plain.lpush(lab.name("list"), "x")

        async def fails() -> None:
            pipe.set(lab.name("a"), 1)
            raise ValueError("no stock")

        async def refused() -> None:
            pipe.incr(lab.name("list"))

        with pytest.raises(ValueError, match="no stock"):
            await wait(once.within(pipe).execute("k1", lab.fn(fails)))
        assert (len(pipe), lab.plain.exists(lab.name("a"))) == (0, 0)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await wait(once.within(pipe).execute("k1", lab.fn(refused)))
        assert len(pipe) == 0

    run(lab, body())


def test_R8_messages_of_an_outbox_are_looked_after_as_on_any_pipeline(redis_server: Any) -> None:
    lab = RedisLab("sync", redis_server.url)
    with pytest.warns(UserWarning, match="switched off"):
        once: Semel = lab.face(enabled=False)
    pipe = lab.pipe()
    with Outbox(lab.url, table=f"o{lab.tenant[:8]}") as outbox:
        for _ in range(2):
            once.within(pipe).execute("k1", lambda: outbox.add(pipe, Message("t", {"a": 1}, id="m1")))
        with pytest.raises(KeyMismatch):
            once.within(pipe).execute("k1", lambda: outbox.add(pipe, Message("t", {"a": 2}, id="m1")))
