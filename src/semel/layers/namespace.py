"""Keeps the scopes of several programs apart in one store, whatever keys they use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from semel.keys import Scope
from semel.layers.layer import Layer
from semel.model import Answer, Ask, Note, Record, Renewal, Replay, Settle, Unknown, Verdict, Won
from semel.store import Page, Query, Store, Unwatch

__all__ = ["Namespace"]

_replace = msgspec.structs.replace
_Item = TypeVar("_Item", Ask, Settle, Renewal, Note)


class Namespace(Layer):
    """Every scope hash is combined with the name's hash, which can be undone: what comes back has its own scope again.

    `scan` sees the whole store: records of other namespaces come with a hash that matches none of their keys.
    """

    def __init__(self, inner: Store, name: str) -> None:
        super().__init__(inner)
        raw = name.encode()
        digest = hashlib.sha256(b"semel/namespace/1\0" + len(raw).to_bytes(4, "big") + raw).digest()
        self._mask = int.from_bytes(digest)

    def moved(self, scope: Scope) -> Scope:
        """There and back: moving twice is not moving."""
        return _replace(scope, hash=self._other(scope.hash), stored=b"")

    def shown(self, scope: Scope) -> Scope:
        """The same scope; messages tell the hash that the store has."""
        return _replace(scope, stored=self._other(scope.hash))

    def _other(self, digest: bytes) -> bytes:
        return (int.from_bytes(digest) ^ self._mask).to_bytes(32)

    def _in(self, items: Sequence[_Item]) -> list[_Item]:
        return [_replace(item, scope=self.moved(item.scope)) for item in items]

    def _out(self, record: Record) -> Record:
        return (
            record if record.scope is None else _replace(record, scope=self.shown(self.moved(record.scope)))
        )

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return [self._verdict(verdict) for verdict in await self.inner.claim(self._in(asks))]

    def _verdict(self, verdict: Verdict | Exception) -> Verdict | Exception:
        if isinstance(verdict, Won | Replay | Unknown) and verdict.record is not None:
            return _replace(verdict, record=self._out(verdict.record))
        return verdict

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await self.inner.settle(self._in(ends))

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        return await self.inner.renew(self._in(renewals))

    async def note(self, note: Note) -> Answer:
        return await self.inner.note(self._in((note,))[0])

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        record, now = await self.inner.peek(self.moved(scope))
        return (None if record is None else self._out(record)), now

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        return await self.inner.watch(self.moved(scope), wake)

    async def scan(self, query: Query) -> Page:
        if query.history is not None:
            query = _replace(query, history=self.moved(query.history))
        page = await self.inner.scan(query)
        return _replace(page, records=tuple(self._out(record) for record in page.records))
