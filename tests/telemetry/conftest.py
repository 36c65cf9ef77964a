"""A registry of a test's own, and what can be read from it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import pytest
from prometheus_client import CollectorRegistry

from semel.telemetry.prometheus import PrometheusHook

P = ParamSpec("P")


class Figures:
    """What a scrape of this registry would say."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.hook = PrometheusHook(self.registry)

    def __call__(self, name: str, **labels: str) -> float:
        found = self.registry.get_sample_value(name, labels)
        return -1.0 if found is None else found  # not there is not the same as zero


@pytest.fixture
def figures() -> Figures:
    return Figures()


def awaited(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, in a loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
