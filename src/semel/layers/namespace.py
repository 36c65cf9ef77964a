"""Keeps the scopes of several programs apart in one store, whatever keys they use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from semel.keys import Scope
from semel.layers.layer import Layer
from semel.model import Answer, Ask, Note, Record, Renewal, Settle, Verdict
from semel.store import Page, Query, Store, Unwatch

__all__ = ["Namespace"]

_replace = msgspec.structs.replace


class Namespace(Layer):
    """Hashes the name into every scope. `scan` sees what the store holds: its readable parts are the same."""

    def __init__(self, inner: Store, name: str) -> None:
        super().__init__(inner)
        raw = name.encode()
        self._head = b"semel/namespace/1\0" + len(raw).to_bytes(4, "big") + raw

    def _in(self, scope: Scope) -> Scope:
        return _replace(scope, hash=hashlib.sha256(self._head + scope.hash).digest())

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return await self.inner.claim([_replace(ask, scope=self._in(ask.scope)) for ask in asks])

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await self.inner.settle([_replace(end, scope=self._in(end.scope)) for end in ends])

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        return await self.inner.renew([_replace(each, scope=self._in(each.scope)) for each in renewals])

    async def note(self, note: Note) -> Answer:
        return await self.inner.note(_replace(note, scope=self._in(note.scope)))

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        return await self.inner.peek(self._in(scope))

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        return await self.inner.watch(self._in(scope), wake)

    async def scan(self, query: Query) -> Page:
        if query.history is not None:
            query = _replace(query, history=self._in(query.history))
        return await self.inner.scan(query)
