"""`current_async_run()`: the run of a coroutine, typed for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from semel.errors import ConfigurationError
from semel.run import current_run

if TYPE_CHECKING:
    from semel.run import AsyncRun

__all__ = ["current_async_run"]


def current_async_run() -> AsyncRun:
    """What `current_run()` gives, with the types of a coroutine: `step` and `new_id` are awaited.

    Outside of a run, and where they would not be awaited (a function of Semel, a plain function's thread), there is no
    such thing to return: ConfigurationError.
    """
    run = current_run()
    if asyncio._get_running_loop() is None or run.colour == "sync":  # noqa: SLF001 - the cheap look
        raise ConfigurationError(
            "current_async_run() is for coroutines that AsyncSemel runs; in a plain function use current_run()"
        )
    return cast("AsyncRun", run)
