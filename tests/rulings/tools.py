"""What the ruling tests share: claims of either colour, work done meanwhile, waiting for a condition."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from semel import current_run
from semel.runtime import run_sync

from .conftest import Lab


class owned:
    """`async with` for a claim of either colour."""

    def __init__(self, lab: Lab, once: Any, key: str, **options: Any) -> None:
        self._lab = lab
        self._claim = once.claim(key, **options)

    async def __aenter__(self) -> Any:
        return await enter(self._lab, self._claim)

    async def __aexit__(self, *error: object) -> None:
        if self._lab.colour == "sync":
            self._claim.__exit__(*error)
        else:
            await self._claim.__aexit__(*error)


async def enter(lab: Lab, claim: Any) -> Any:
    return claim.__enter__() if lab.colour == "sync" else await claim.__aenter__()


def meanwhile(lab: Lab, seconds: float, action: Callable[[], Any]) -> Callable[[], Any]:
    """Do something after a moment, in a task or a thread; returns what waits for it (and raises what it raised)."""
    if lab.colour == "async":

        async def soon() -> Any:
            await asyncio.sleep(seconds)
            return await lab.do(action())

        task = asyncio.ensure_future(soon())

        async def awaited() -> Any:
            return await task

        return awaited
    outcome: list[Any] = []
    problem: list[BaseException] = []

    def work() -> None:
        time.sleep(seconds)
        try:
            outcome.append(run_sync(lab.do(action())))
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    async def joined() -> Any:
        thread.join()
        if problem:
            raise problem[0]
        return outcome[0]

    return joined


async def pause(lab: Lab, seconds: float) -> None:
    if lab.colour == "sync":
        time.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


async def until(lab: Lab, condition: Callable[[], Any], *, within: float = 30.0) -> Any:
    """Wait until the condition answers something true."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        if answer := await lab.do(condition()):
            return answer
        await pause(lab, 0.005)
    raise AssertionError(f"it did not become true within {within} s")


async def renewed(lab: Lab, once: Any, key: str, times: int = 2) -> None:
    """Wait until the owner has renewed its lease so often, as the store says it.

    Better than a pause of some leases: those who did not get the processor for that long would find the lease over.
    """
    for _ in range(times):
        seen = (await lab.do(once.peek(key))).lease_until

        async def moved(seen: float = seen) -> bool:
            return bool((await lab.do(once.peek(key))).lease_until > seen)

        await until(lab, moved)


async def lapsed(lab: Lab, once: Any, key: str, **where: Any) -> None:
    """Wait until the lease of an owner whose heart has stopped is over, as the store says it.

    Better than a pause of some leases: a renewal that was on its way when the heart stopped may be stored long after it.
    """

    async def over() -> bool:
        return bool((await lab.do(once.peek(key, **where))).lease_until < time.time() - 0.1)

    await until(lab, over)


def let_pass(once: Any, seconds: float) -> None:
    """The clock of the face's store goes forward."""
    store = once._engine().store
    while hasattr(store, "inner"):
        store = store.inner
    if hasattr(store, "_skew"):
        store._skew += seconds
    else:
        clock = store._clock
        store._clock = lambda: clock() + seconds


def stepping(lab: Lab, name: str, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function that makes one step, in the lab's colour."""

    def plain() -> Any:
        return current_run().step(name, fn, **options)

    async def coroutine() -> Any:
        run: Any = current_run()
        return await run.step(name, fn, **options)

    return plain if lab.colour == "sync" else coroutine
