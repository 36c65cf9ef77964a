"""A store that passes everything on. A layer changes the verbs it is about and leaves the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from semel.keys import Scope
from semel.losses import losses_of
from semel.model import Answer, Ask, Note, Record, Renewal, Settle, Verdict
from semel.store import Capabilities, Colour, Facts, Page, Query, Store, Unwatch

__all__ = ["Layer"]


class Layer:
    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.losses = losses_of(inner)

    @property
    def colour(self) -> Colour:
        return self.inner.colour

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return await self.inner.claim(asks)

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await self.inner.settle(ends)

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        return await self.inner.renew(renewals)

    async def note(self, note: Note) -> Answer:
        return await self.inner.note(note)

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        return await self.inner.peek(scope)

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        return await self.inner.watch(scope, wake)

    async def scan(self, query: Query) -> Page:
        return await self.inner.scan(query)

    async def purge(self, limit: int) -> int:
        return await self.inner.purge(limit)

    async def facts(self) -> Facts:
        return await self.inner.facts()

    async def aclose(self) -> None:
        await self.inner.aclose()
