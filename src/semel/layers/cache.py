"""Replays from this process's memory: encoded bytes of `done` records, few of them, and not for long (off by default).

Stale bound: after another process forgets or resolves a key, a cached outcome is still replayed here until its wake-up
arrives (stores that notify), and never longer than `ttl` (at most 1 s) or what is left of its retention.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf

from semel.errors import StoreUnavailable
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
        """Remember an outcome for what is left of its retention by the store's clock, and at most `ttl`.

        Time counts from a look at the store that shows it still there, taken while a wake-up would be heard: between the
        claim and here this process may have stood still, and the key may have been forgotten.
        """
        key = ask.scope.hash
        entry = _Entry(record, inf)
        try:
            if self.inner.capabilities.notifies:
                entry.unwatch = await self.inner.watch(ask.scope, self._dropper(entry))
            looked_at = self._runtime.now()
            seen, now = await self.inner.peek(ask.scope)
        except StoreUnavailable:
            self._forget(entry)
            return  # the replay is in hand; there is just nothing to remember
        except BaseException:
            self._forget(entry)
            raise
        if seen is None or (seen.nonce, seen.state) != (record.nonce, record.state):
            self._forget(entry)
            return
        entry.until = min(entry.until, looked_at + min(self._ttl, record.expires - now))
        with self._lock:
            replaced = self._entries.pop(key, None)
            self._entries[key] = entry
            oldest = next(iter(self._entries)) if len(self._entries) > self._size else None
        self._forget(replaced)
        if oldest is not None:
            self._drop(oldest)

    @staticmethod
    def _dropper(entry: _Entry) -> Callable[[], None]:
        def drop() -> None:
            entry.until = -inf  # also before it is in: what was watched has changed already

        return drop

    def _drop(self, key: bytes) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
        self._forget(entry)

    def _forget(self, entry: _Entry | None) -> None:
        if entry is not None and entry.unwatch is not None:
            self._runtime.background(_await(entry.unwatch))


async def _await(unwatch: Unwatch) -> None:
    await unwatch()
