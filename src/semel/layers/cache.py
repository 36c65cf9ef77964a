"""Replays from this process's memory: encoded bytes of `done` records, few of them, and not for long (off by default).

Stale bound: after another process forgets or resolves a key, a cached outcome is still replayed here until its wake-up
arrives (stores that notify), and never longer than `ttl` (at most 1 s) or what is left of its retention.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from semel.layers.layer import Layer
from semel.model import Answer, Ask, Mismatch, Record, Replay, Settle, State, Verdict, conflicts
from semel.runtime import Runtime
from semel.store import Store, Unwatch

__all__ = ["Cache"]

MOST_SECONDS = 1.0


class _Entry:
    __slots__ = ("record", "until", "unwatch")

    def __init__(self, record: Record, until: float) -> None:
        self.record = record
        self.until = until
        self.unwatch: Unwatch | None = None


class Cache(Layer):
    def __init__(
        self, inner: Store, runtime: Runtime, *, size: int = 10_000, ttl: float = MOST_SECONDS
    ) -> None:
        super().__init__(inner)
        self._runtime = runtime
        self._size = size
        self._ttl = min(ttl, MOST_SECONDS)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        if len(asks) != 1:
            return await self.inner.claim(asks)
        ask = asks[0]
        if (record := self._find(ask.scope.hash)) is not None:
            return [Mismatch() if conflicts(record, ask) else Replay(record)]
        verdicts = await self.inner.claim(asks)
        verdict = verdicts[0]
        if type(verdict) is Replay and verdict.record.state is State.DONE:
            await self._keep(ask, verdict.record)
        return verdicts

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        for end in ends:
            self._drop(end.scope.hash)
        answers = await self.inner.settle(ends)
        for end in ends:  # a claim that was under way may have put the old record back
            self._drop(end.scope.hash)
        return answers

    async def aclose(self) -> None:
        for key in tuple(self._entries):
            self._drop(key)
        await self.inner.aclose()

    def _find(self, key: bytes) -> Record | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if self._runtime.now() < entry.until:
                self._entries.move_to_end(key)
                return entry.record
        self._drop(key)
        return None

    async def _keep(self, ask: Ask, record: Record) -> None:
        # Retention left is judged from the record's own times: it was settled by the store's clock, not ours.
        settled = record.settled if record.settled is not None else record.updated
        retention = record.expires - settled
        key = ask.scope.hash
        entry = _Entry(record, self._runtime.now() + min(self._ttl, retention / 10))
        with self._lock:
            self._entries[key] = entry
            oldest = next(iter(self._entries)) if len(self._entries) > self._size else None
        if oldest is not None:
            self._drop(oldest)
        if self.inner.capabilities.notifies:
            entry.unwatch = await self.inner.watch(ask.scope, self._dropper(key, entry))

    def _dropper(self, key: bytes, entry: _Entry) -> Callable[[], None]:
        def drop() -> None:
            with self._lock:
                if self._entries.get(key) is entry:
                    entry.until = 0.0

        return drop

    def _drop(self, key: bytes) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
        if entry is not None and entry.unwatch is not None:
            self._runtime.background(_await(entry.unwatch))


async def _await(unwatch: Unwatch) -> None:
    await unwatch()
