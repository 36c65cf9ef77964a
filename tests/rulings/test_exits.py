"""R2, R4: a plain function in a thread that exits ends its call and no loop; one that has not begun does not outlive its caller."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from typing import Any, Literal

import pytest

from semel import NOT_FOUND, AsyncSemel, current_run
from semel.hooks import Failed

EXITS = [SystemExit, KeyboardInterrupt]


def _of(record: Any) -> tuple[str, int]:
    return record.state.value, record.attempts


@pytest.mark.parametrize("exits", EXITS)
@pytest.mark.parametrize(("policy", "state"), [("retry", "released"), ("hold", "unknown")])
async def test_R2_an_exit_in_a_thread_reaches_its_caller(
    exits: type[BaseException], policy: Literal["retry", "hold"], state: str
) -> None:
    def work() -> None:
        raise exits(3)

    async with AsyncSemel("memory://", on_unknown=policy) as once:
        with pytest.raises(exits) as caught:
            await once.execute("k", work)
        assert caught.value.args == (3,)
        assert _of(await once.peek("k"))[0] == state


async def test_R4_an_exit_in_a_thread_whose_caller_has_gone_is_told_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    began, gate = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        gate.wait(20)
        sys.exit(3)

    async with AsyncSemel("memory://") as once:
        call = asyncio.create_task(once.execute("k", work))
        await asyncio.to_thread(began.wait, 20)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with caplog.at_level(logging.ERROR, "semel"):
            gate.set()
            while (record := await once.peek("k")) is None or record.state == "running":
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)
        assert record.state == "released"
    assert "ended with SystemExit(3) when its caller had gone" in caplog.text


@pytest.mark.parametrize("fails", [ValueError, None])
async def test_R4_any_other_end_of_a_thread_whose_caller_has_gone_is_not_told_so(
    fails: type[Exception] | None, caplog: pytest.LogCaptureFixture
) -> None:
    began, gate = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        gate.wait(20)
        if fails is not None:
            raise fails

    async with AsyncSemel("memory://") as once:
        call = asyncio.create_task(once.execute("k", work))
        await asyncio.to_thread(began.wait, 20)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.set()
    assert "caller had gone" not in caplog.text


def test_R4_what_exits_in_the_loop_without_its_caller_ends_the_loop() -> None:
    """As a signal's handler does that strikes there: the program is to end."""
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.sleep(0.01)
        sys.exit(3)

    async def main() -> None:
        once = AsyncSemel("memory://")
        call = asyncio.create_task(once.execute("k", lambda: work()))
        await began.wait()
        call.cancel()
        await asyncio.sleep(20)

    with pytest.raises(SystemExit):
        asyncio.run(main())


@pytest.mark.parametrize("exits", EXITS)
async def test_R25_an_exit_of_a_step_reaches_the_thread_that_asked_for_it(exits: type[BaseException]) -> None:
    def charge() -> None:
        raise exits(3)

    def work() -> str:
        with pytest.raises(exits):
            current_run().step("charge", charge)
        return "caught"

    async with AsyncSemel("memory://") as once:
        assert (await once.execute("k", work)).value == "caught"


class Crowded:
    """A face whose only thread is taken."""

    def __init__(self, **settings: Any) -> None:
        self.once = AsyncSemel("memory://", threads=1, **settings)
        self.began, self.gate = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.began.set()
        self.gate.wait(20)

    async def take(self) -> asyncio.Task[Any]:
        taken = asyncio.create_task(self.once.execute("other", self._wait))
        await asyncio.to_thread(self.began.wait, 20)
        return taken


@pytest.mark.parametrize("policy", ["retry", "hold"])
async def test_R4_a_function_that_waits_for_a_thread_does_not_run_without_its_caller(policy: str) -> None:
    heard: list[Any] = []
    ran: list[int] = []
    crowd = Crowded(on_unknown=policy, hooks=[heard.append])
    async with crowd.once as once:
        taken = await crowd.take()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(once.execute("k", ran.append, 1), 0.05)
        assert _of(await once.peek("k"))[0] == "released"  # under hold too: nothing of it has run
        crowd.gate.set()
        await taken
        await once.execute("k", ran.append, 2)
    assert ran == [2]
    (lost,) = [event for event in heard if isinstance(event, Failed)]
    assert (lost.decision, type(lost.error).__name__) == ("lost", "NotBegun")


async def test_R4_nor_when_its_caller_is_cancelled_twice() -> None:
    ran: list[int] = []
    crowd = Crowded(on_unknown="hold")
    async with crowd.once as once:
        taken = await crowd.take()
        waits = asyncio.create_task(once.execute("k", ran.append, 1))
        await asyncio.sleep(0.02)
        waits.cancel()
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        crowd.gate.set()
        await taken
        assert (await once.execute("k", len, "four", wait=20)).value == 4  # it is not unknown
    assert ran == []


def test_R4_nor_when_its_loop_ends() -> None:
    ran: list[int] = []

    async def main() -> Crowded:
        crowd = Crowded()
        _ = await crowd.take()
        waits = asyncio.create_task(crowd.once.execute("k", ran.append, 1))
        await asyncio.sleep(0.02)
        assert not waits.done()
        return crowd

    crowd = asyncio.run(main())
    crowd.gate.set()
    assert crowd.once._pool is not None
    crowd.once._pool.shutdown()
    assert ran == []


async def test_R4_a_function_that_has_begun_goes_on_though_its_probe_waits_for_a_thread() -> None:
    go = asyncio.Event()
    made: list[str] = []

    def charge() -> None:
        made.append("charged")

    def look(*_: object) -> object:
        made.append("looked up")
        return NOT_FOUND

    async def lost() -> None:
        run: Any = current_run()

        async def cancelled() -> None:
            raise asyncio.CancelledError

        await run.step("charge", cancelled, on_unknown=look)

    async def work() -> str:
        await go.wait()
        run: Any = current_run()
        await run.step("charge", charge, on_unknown=look)
        return "done"

    crowd = Crowded()
    async with crowd.once as once:
        with pytest.raises(asyncio.CancelledError):
            await once.execute("k", lost)
        call = asyncio.create_task(once.execute("k", lambda: work()))
        await asyncio.sleep(0.05)  # it has given its coroutine
        taken = await crowd.take()
        go.set()
        await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        crowd.gate.set()
        await taken
        outcome: Any = await once.execute("k", work, wait=20)
    assert (outcome.value, outcome.replayed, made) == ("done", True, ["looked up", "charged"])
