"""Times every call to the store and gives it to the hooks as `StoreCalled`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from semel.hooks import Emit, StoreCalled
from semel.layers.layer import Layer
from semel.model import Answer, Ask, Note, Renewal, Settle, Verdict
from semel.store import Store

__all__ = ["Observe"]

T = TypeVar("T")


class Observe(Layer):
    def __init__(self, inner: Store, emit: Emit) -> None:
        super().__init__(inner)
        self._emit = emit

    async def _timed(self, verb: str, items: int, call: Awaitable[T]) -> T:
        start = time.perf_counter()
        try:
            answer = await call
        except BaseException as error:
            self._emit(StoreCalled(verb, items, time.perf_counter() - start, error))
            raise
        self._emit(StoreCalled(verb, items, time.perf_counter() - start))
        return answer

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return await self._timed("claim", len(asks), self.inner.claim(asks))

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await self._timed("settle", len(ends), self.inner.settle(ends))

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        return await self._timed("renew", len(renewals), self.inner.renew(renewals))

    async def note(self, note: Note) -> Answer:
        return await self._timed("note", 1, self.inner.note(note))

    async def purge(self, limit: int) -> int:
        return await self._timed("purge", limit, self.inner.purge(limit))
