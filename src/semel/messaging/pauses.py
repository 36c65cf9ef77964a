"""Delays between attempts, and waiting that ends early."""

from __future__ import annotations

import asyncio
import contextlib
import random

__all__ = ["delay", "waited"]


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
