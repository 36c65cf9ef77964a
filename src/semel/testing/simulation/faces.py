"""The real faces, in a simulated world: seeded nonces, virtual time, no threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from semel.errors import ConfigurationError
from semel.flow import Engine
from semel.loop import LoopRuntime
from semel.once import AsyncSemel
from semel.store import Store

__all__ = ["face_of", "in_greenlet", "plainly"]

Entropy = Callable[[int], bytes]


class _Runtime(LoopRuntime):
    def __init__(self, loop: Any, entropy: Entropy) -> None:
        super().__init__(loop, _no_pool)
        self._entropy = entropy

    def entropy(self, size: int) -> bytes:
        return self._entropy(size)


def _no_pool() -> Any:
    raise AssertionError("a simulated world has no threads")


class _Face(AsyncSemel):
    def __init__(self, link: Store, entropy: Entropy, **settings: Any) -> None:
        super().__init__(link, **settings)
        self._entropy = entropy

    def _make_engine(self, loop: asyncio.AbstractEventLoop) -> Engine:
        engine = self._engines[loop] = self._engine_for(_Runtime(loop, self._entropy))
        return engine


def face_of(colour: str, link: Store, entropy: Entropy, **settings: Any) -> Any:
    """`AsyncSemel` over this link, or `Semel` with greenlets for threads."""
    return (_Face if colour == "async" else _green().GreenFace)(link, entropy, **settings)


def plainly() -> Any:
    return _green().plainly


def in_greenlet() -> Any:
    return _green().in_greenlet


def _green() -> Any:
    try:
        from semel.testing.simulation import green
    except ImportError as error:
        raise ConfigurationError(
            f"the sync colour is simulated with greenlets ({error}): pip install greenlet"
        ) from error
    return green
