"""R28 in moments that seldom come: interrupted, cut off from the server, heard by hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import NoPermissionError

from semel import CodecError, ConfigurationError, LeaseLost, PreviousFailure, current_run, points
from semel.hooks import Executed, Failed
from semel.testing.proxy import Proxy
from tests.within.lab import wait
from tests.within.test_redis import RedisLab, run


@pytest.fixture(params=["sync", "async"])
def lab(request: pytest.FixtureRequest, redis_server: Any) -> RedisLab:
    return RedisLab(request.param, redis_server.url)


def through(lab: RedisLab, proxy: Proxy, redis_server: Any) -> str:
    """The way to the server that may be cut."""
    return lab.url.replace(f":{redis_server.port}", f":{proxy.port}")


def at(point: str, act: Any) -> None:
    """Once, when the flow comes to this point."""

    def reached(name: str) -> None:
        if name == point:
            points.listen(None)
            act()

    points.listen(reached)


@pytest.fixture(autouse=True)
def _deaf_afterwards() -> Iterator[None]:
    yield
    points.listen(None)


def test_R28_a_function_that_is_interrupted_applies_nothing(lab: RedisLab) -> None:
    async def body() -> None:
        heard: list[Any] = []
        once, pipe = lab.face(hooks=[heard.append]), lab.pipe()
        gone = KeyboardInterrupt if lab.colour == "sync" else asyncio.CancelledError

        async def work() -> None:
            pipe.set(lab.name("a"), 1)
            raise gone

        with pytest.raises(gone):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert len(pipe) == 0
        assert not lab.plain.exists(lab.name("a"))
        assert [event.decision for event in heard if isinstance(event, Failed)] == ["lost"]
        assert (await wait(once.within(pipe).execute("k1", lab.fn(_second)))).value == "second"

    run(lab, body())


async def _second() -> str:
    return "second"


@pytest.mark.parametrize("overtaken", [False, True], ids=["recorded", "overtaken"])
def test_R16_a_claim_that_was_sent_again_leaves_nothing_behind(lab: RedisLab, overtaken: bool) -> None:
    async def body() -> None:
        once, pipe = lab.face(lease=0.1), lab.pipe()
        debts = once._engine().debts

        async def work() -> None:
            current = current_run()
            debts.suspect(current.ask)
            if overtaken:
                once._engine().heart.remove(current)
                await wait(lab.face().execute("k1", lab.fn(_second), wait=30))

        if overtaken:
            with pytest.raises(LeaseLost):
                await wait(once.within(pipe).execute("k1", lab.fn(work)))
        else:
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert not debts.strays

    run(lab, body())


def test_R28_a_claim_by_hand_that_fails_applies_nothing(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        claim = once.within(pipe).claim("k1")
        await (wait(claim.__enter__()) if lab.colour == "sync" else claim.__aenter__())
        pipe.set(lab.name("a"), 1)
        await wait(claim.fail("no stock"))
        leave = claim.__exit__ if lab.colour == "sync" else claim.__aexit__
        await wait(leave(None, None, None))
        assert len(pipe) == 0
        assert not lab.plain.exists(lab.name("a"))
        with pytest.raises(PreviousFailure, match="no stock"):
            await wait(once.within(pipe).execute("k1", lab.fn(_second)))

    run(lab, body())


def test_R28_hooks_hear_of_it_and_a_value_that_cannot_be_stored_is_told(lab: RedisLab) -> None:
    async def body() -> None:
        heard: list[Any] = []
        once, pipe = lab.face(hooks=[heard.append]), lab.pipe()

        async def work() -> Any:
            pipe.incr(lab.name("n"))
            return object()

        for _ in range(2):
            with pytest.raises(CodecError):
                await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert lab.plain.get(lab.name("n")) == "1", "applied, and not made again"
        assert [event.attempt for event in heard if isinstance(event, Executed)] == [1]

    run(lab, body())


def test_R28_an_answer_that_the_network_loses_is_looked_up(
    lab: RedisLab, proxy: Proxy, redis_server: Any
) -> None:
    async def body() -> None:
        once = lab.face()
        direct, lab.url = lab.url, through(lab, proxy, redis_server)
        pipe = lab.pipe(retry=None)
        lab.url = direct
        lost = proxy.swallow_reply(match=lambda request: request.endswith(b"\r\nEXEC\r\n"))

        async def work() -> str:
            pipe.incr(lab.name("n"))
            return "made"

        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "made"
        assert lost.fired.is_set()
        assert lab.plain.get(lab.name("n")) == "1"

    run(lab, body())


@pytest.mark.parametrize("retries", [True, False])
def test_R28_a_guard_whose_connection_breaks_is_set_up_again(
    lab: RedisLab, proxy: Proxy, redis_server: Any, *, retries: bool
) -> None:
    """redis-py tells it as a WatchError, which was taken for a refusal: the outcome of the key for good, under `replay`."""

    async def body() -> None:
        once = lab.face()
        direct, lab.url = lab.url, through(lab, proxy, redis_server)
        pipe = lab.pipe(**({} if retries else {"retry": None}))
        lab.url = direct
        lost = proxy.swallow_reply(match=lambda request: b"EVAL" in request)

        async def work() -> str:
            pipe.incr(lab.name("n"))
            return "made"

        outcome = await wait(once.within(pipe).execute("k1", lab.fn(work), on_error="replay"))
        assert lost.fired.is_set()
        assert (outcome.value, lab.plain.get(lab.name("n"))) == ("made", "1")

    run(lab, body())


def test_R28_what_is_recorded_stays_so_when_the_store_is_gone_right_after_it(
    lab: RedisLab, proxy: Proxy, redis_server: Any
) -> None:
    async def body() -> None:
        pipe, checks = lab.pipe(), lab.face()
        lab.url = through(lab, proxy, redis_server)
        once = lab.face(timeout=5)

        async def work() -> str:
            pipe.incr(lab.name("n"))
            return "made"

        def gone() -> None:
            proxy.refuse()
            proxy.cut()

        at("settle.stored", gone)
        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "made"
        assert (await wait(checks.peek("k1"))).state == "done"
        assert lab.plain.get(lab.name("n")) == "1"

    run(lab, body())


def test_R28_a_function_that_gives_a_generator_is_refused_and_applies_nothing(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()

        def lazy() -> Iterator[int]:
            pipe.set(lab.name("a"), 1)
            yield 1

        async def work() -> Any:
            return lazy()

        with pytest.raises(ConfigurationError, match="returned a generator, and nothing of that has run"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert (await wait(once.peek("k1"))).state == "released"
        assert not lab.plain.exists(lab.name("a"))

    run(lab, body())


@pytest.mark.parametrize(("policy", "state"), [("retry", "released"), ("hold", "unknown")])
def test_R28_a_server_that_refuses_the_guard_is_a_known_failure(
    lab: RedisLab, policy: str, state: str
) -> None:
    async def body() -> None:
        once = lab.face(on_unknown=policy, lease=60)
        server: Any = lab.plain
        server.execute_command("ACL", "SETUSER", "narrow", "on", ">pw", f"~{lab.tenant}:*", "+@all")
        pipe = lab.pipe(username="narrow", password="pw")

        async def work() -> None:
            pipe.set(lab.name("a"), 1)

        with pytest.raises(NoPermissionError):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert (await wait(once.peek("k1"))).state == state, "it does not wait for its lease"
        assert not lab.plain.exists(lab.name("a"))
        server.execute_command("ACL", "DELUSER", "narrow")

    run(lab, body())


def test_R28_a_refusal_is_recorded_although_its_caller_was_cancelled(redis_server: Any) -> None:
    lab = RedisLab("async", redis_server.url)

    async def body() -> None:
        once, pipe = lab.face(lease=60), lab.pipe()

        async def work() -> None:
            pipe.execute_command("SET", lab.name("a"))  # too few arguments: EXEC is discarded

        task = asyncio.ensure_future(once.within(pipe).execute("k1", work))
        at("settle.sent", task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await once.peek("k1")).state == "released", "it does not wait for its lease"

    run(lab, body())
