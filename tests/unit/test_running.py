"""What hot paths ask about their loop: the cheap answers are the true ones."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from semel.loop import LoopRuntime
from semel.running import clock_of, runs_here

LOOPS = pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])


@LOOPS
def test_R29_a_loop_runs_here_only_while_it_runs_and_only_in_its_thread(make: object) -> None:
    loop, other = make(), asyncio.new_event_loop()  # type: ignore[operator]  # a parameter that is a function
    elsewhere: list[bool] = []

    async def look() -> tuple[bool, bool]:
        thread = threading.Thread(target=lambda: elsewhere.append(runs_here(loop)))
        thread.start()
        await asyncio.to_thread(thread.join)
        return runs_here(loop), runs_here(other)

    try:
        assert not runs_here(loop)
        assert loop.run_until_complete(look()) == (True, False)
        assert elsewhere == [False]
        assert not runs_here(loop)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        other.close()


@LOOPS
def test_the_clock_of_a_loop_tells_its_time(make: object) -> None:
    loop = make()  # type: ignore[operator]  # a parameter that is a function
    try:
        assert clock_of(loop)() == pytest.approx(loop.time(), abs=5.0)
    finally:
        loop.close()


def test_a_loop_with_a_clock_of_its_own_is_asked_for_it() -> None:
    class Slow(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return 42.0

    loop, plain = Slow(), asyncio.new_event_loop()
    try:
        assert clock_of(loop)() == 42.0
        assert clock_of(plain) is time.monotonic
    finally:
        loop.close()
        plain.close()


def test_a_timer_that_rings_in_a_loops_last_turn_leaves_no_task_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`asyncio.run` ends in a turn of its loop: what is begun there never runs, and asyncio complains of it."""
    ticks: list[None] = []

    def two_last_turns() -> None:
        async def tick() -> None:
            ticks.append(None)

        async def last_turn() -> None:
            ticker.at(runtime.now())

        loop = asyncio.new_event_loop()
        runtime = LoopRuntime(loop, ThreadPoolExecutor)
        ticker = runtime.ticker(tick)
        loop.run_until_complete(last_turn())
        loop.run_until_complete(asyncio.sleep(0.01))
        assert len(ticks) == 1  # a loop that goes on has it in its next run
        loop.run_until_complete(last_turn())
        loop.close()

    two_last_turns()
    gc.collect()  # a coroutine that was never awaited would be a warning here, and so an error
    assert not caplog.records
    assert len(ticks) == 1
