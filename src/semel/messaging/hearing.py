"""A relay that is woken by what other processes add to an outbox in Redis. A hint: what it does not tell is found by looking."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from semel.errors import StoreUnavailable
from semel.messaging.events import Alarm, Emit
from semel.messaging.outbox import Outbox
from semel.messaging.pauses import delay, waited

__all__ = ["hear"]

_BACKOFF: Final = (0.5, 30.0)


async def hear(outbox: Outbox, wake: Callable[[], None], emit: Emit, stopping: asyncio.Event) -> None:
    """Call `wake` in this loop after commits, until `stopping`. A subscription that stands is kept up by itself; one that cannot be had
    yet is asked for again."""
    loop = asyncio.get_running_loop()

    def told() -> None:  # from another thread
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(wake)

    misses = 0
    while not stopping.is_set():
        try:
            end = await outbox.listen(told)
            if end is None:
                return
            wake()  # for what came while nobody listened
            await stopping.wait()
            await end()
        except StoreUnavailable as error:
            misses += 1
            if misses == 1:
                emit(Alarm("listener", f"not listening for commits, looking instead: {error}"))
            await waited(stopping, delay(_BACKOFF, misses))
