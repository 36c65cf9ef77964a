"""What a hot path asks about its event loop, as cheaply as it can be asked: several times per call."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio import BaseEventLoop, _get_running_loop
from collections.abc import Callable
from threading import get_ident

__all__ = ["clock_of", "is_stopping", "runs_here"]


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """What `loop.time()` tells. asyncio's own loops ask `time.monotonic` in a method that costs as much again."""
    plain = getattr(loop.time, "__func__", None) is BaseEventLoop.time
    return time.monotonic if plain else loop.time


def is_stopping(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this is the last turn of the loop's run. Other loops than asyncio's own do not tell: then it is not."""
    return getattr(loop, "_stopping", False)


if sys.version_info >= (3, 12):

    def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this code runs in the loop. A forked child inherits the answer: see `survive_fork`."""
        return _get_running_loop() is loop

else:

    def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this code runs in the loop. A forked child inherits the answer: see `survive_fork`.

        3.11 asks the kernel for the process id whenever it is asked for its loop: 0.3 µs. The loop knows its thread.
        """
        if isinstance(loop, BaseEventLoop):
            return loop._thread_id == get_ident()  # type: ignore[attr-defined,no-any-return]  # noqa: SLF001 - asyncio tells it nowhere else
        return _get_running_loop() is loop
