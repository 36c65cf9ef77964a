"""Loses requests and replies on purpose, by a seed: for tests of one's own code against an unreliable store."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from semel.errors import StoreUnavailable
from semel.layers.layer import Layer
from semel.model import Answer, Ask, Note, Renewal, Settle, Verdict
from semel.store import Store

__all__ = ["Chaos"]

T = TypeVar("T")


class Chaos(Layer):
    """`lose_request` and `lose_reply` are probabilities; `struck` counts what was lost."""

    def __init__(
        self, inner: Store, *, seed: int, lose_request: float = 0.1, lose_reply: float = 0.1
    ) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self._lose_request = lose_request
        self._lose_reply = lose_reply
        self.struck = 0

    async def _maybe(self, call: Callable[[], Awaitable[T]]) -> T:
        if self._random.random() < self._lose_request:
            self.struck += 1
            raise StoreUnavailable("chaos: the request was lost")
        answer = await call()
        if self._random.random() < self._lose_reply:
            self.struck += 1
            raise StoreUnavailable("chaos: the reply was lost")
        return answer

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return await self._maybe(lambda: self.inner.claim(asks))

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await self._maybe(lambda: self.inner.settle(ends))

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        return await self._maybe(lambda: self.inner.renew(renewals))

    async def note(self, note: Note) -> Answer:
        return await self._maybe(lambda: self.inner.note(note))
