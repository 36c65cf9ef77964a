"""Room in a store that has no limit: what has ended is removed on the way, every so many claims."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from semel.layers.layer import Layer
from semel.model import Ask, Verdict
from semel.store import Store

__all__ = ["Sweep"]

_EVERY: Final = 10_000  # claims: a look at all records costs little for each of them


class Sweep(Layer):
    """For records that nobody asks for again. Not a purge at set times: that would take a thread for every face."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._claims = 0

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        self._claims += len(asks)
        if self._claims >= _EVERY:
            self._claims = 0
            await self.inner.purge(sys.maxsize)
        return await self.inner.claim(asks)
