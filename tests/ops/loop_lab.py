"""A test that is a coroutine, in a loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def call(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return call
