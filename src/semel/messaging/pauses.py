"""Delays between attempts, and waiting that ends early."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["delay", "unless", "waited"]

T = TypeVar("T")


def delay(backoff: tuple[float, float], failures: int) -> float:
    """Before the next attempt: twice as long after each failure, with jitter, so that what failed together does not come
    back together."""
    first, most = backoff
    longest = min(most, first * 2 ** min(max(failures - 1, 0), 40))
    return float(longest * random.uniform(0.5, 1.0))  # noqa: S311 - a delay


async def waited(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event came within so many seconds."""
    if not event.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


async def unless(gone: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
    """`work`, given up with ConnectionResetError when its connection is `gone`: some clients let their requests wait for an
    answer all the same."""
    task = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {task, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionResetError("the connection was closed")
        return task.result()
    finally:
        task.cancel()
        # A client may swallow that: then the work ends with its connection, and nobody asks for its error.
        if not task.done():
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            gone.add_done_callback(lambda _: task.cancel())
