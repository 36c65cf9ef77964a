"""A relay that is woken by what other processes add to an outbox in Redis. A hint: what it does not tell is found by looking."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from semel.errors import StoreUnavailable
from semel.messaging.events import Alarm, Emit
from semel.messaging.outbox import Outbox

__all__ = ["hear"]


async def hear(outbox: Outbox, wake: Callable[[], None], emit: Emit, stopping: asyncio.Event) -> None:
    """Call `wake` in this loop after commits, until `stopping`. The subscription is kept up by itself."""
    loop = asyncio.get_running_loop()

    def told() -> None:  # from another thread
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(wake)

    try:
        end = await outbox.listen(told)
        if end is not None:
            await stopping.wait()
            await end()
    except StoreUnavailable as error:
        emit(Alarm("listener", f"not listening for commits, looking instead: {error}"))
