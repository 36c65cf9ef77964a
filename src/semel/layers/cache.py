"""Replays from this process's memory: encoded bytes of `done` records, few of them, and not for long (off by default).

Stale bound: after another process forgets or resolves a key, a cached outcome is still replayed here until its wake-up
arrives (stores that notify), and never longer than `ttl` (at most 1 s) or what is left of its retention. Its bytes and its
subscription go with a sweep, at most `ttl` and a quarter after that, also when nobody calls any more.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import inf

from semel.errors import StoreUnavailable
from semel.layers.layer import Layer
from semel.model import Answer, Ask, Mismatch, Record, Replay, Settle, State, Verdict, conflicts
from semel.runtime import Runtime
from semel.store import Store, Unwatch

__all__ = ["Cache"]

MOST_SECONDS = 1.0
_log = logging.getLogger("semel")


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
        """In the order of their last use."""
        # Not a plain lock: a signal's handler may call too, in the middle of what is done under it. Nothing that it can change
        # there is relied on: an entry that it took out is a miss, and one that it has put in stays.
        self._lock = threading.RLock()
        self._ticker = runtime.ticker(self._sweep)
        self._stopped = False

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
        self.stop()
        await self.inner.aclose()

    def stop(self) -> None:
        """Nothing is kept any more, also of claims that are under way; subscriptions end in the background."""
        with self._lock:
            self._stopped = True
            entries, self._entries = self._entries, OrderedDict()
        self._ticker.stop()
        self._forget(entries.values())

    def _find(self, key: bytes) -> Record | None:
        try:
            with self._lock:
                self._entries.move_to_end(key)
                entry = self._entries[key]
        except KeyError:
            return None
        if self._runtime.now() < entry.until:
            return entry.record
        self._drop(key)
        return None

    async def _keep(self, ask: Ask, record: Record) -> None:
        """Remember an outcome for what is left of its retention by the store's clock, and at most `ttl`.

        Time counts from a look at the store that shows it still there, taken while a wake-up would be heard: between the
        claim and here this process may have stood still, and the key may have been forgotten.
        """
        entry = _Entry(record, inf)
        try:
            if self.inner.capabilities.notifies:
                entry.unwatch = await self.inner.watch(ask.scope, self._dropper(entry))
            looked_at = self._runtime.now()
            seen, now = await self.inner.peek(ask.scope)
        except StoreUnavailable:
            self._forget((entry,))
            return  # the replay is in hand; there is just nothing to remember
        except BaseException:
            self._forget((entry,))
            raise
        if seen is None or (seen.nonce, seen.state) != (record.nonce, record.state):
            self._forget((entry,))
            return
        entry.until = min(entry.until, looked_at + min(self._ttl, record.expires - now))
        self._forget(self._put(ask.scope.hash, entry))
        self._ticker.at(entry.until)

    def _put(self, key: bytes, entry: _Entry) -> list[_Entry]:
        """Put it in; what has to go for it, or itself."""
        with self._lock:
            if self._stopped:
                return [entry]
            replaced = self._entries.pop(key, None)
            gone = [] if replaced is None else [replaced]
            if self._entries.setdefault(key, entry) is not entry:
                gone.append(entry)
            elif len(self._entries) > self._size:
                gone.append(self._entries.popitem(last=False)[1])
        return gone

    @staticmethod
    def _dropper(entry: _Entry) -> Callable[[], None]:
        def drop() -> None:
            entry.until = -inf  # also before it is in: what was watched has changed already

        return drop

    def _drop(self, key: bytes) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
        if entry is not None:
            self._forget((entry,))

    async def _sweep(self) -> float | None:
        """Give up what is past its time; when to look again. Between two looks passes a moment, or a busy cache would be
        swept for every single entry."""
        now = self._runtime.now()
        gone, left = self._expired(now)
        await _unwatch(gone)
        return None if left is None else max(left, now + self._ttl / 4)

    def _expired(self, now: float) -> tuple[list[_Entry], float | None]:
        """What is past its time, taken out, and when the first of the others is.

        A look at the front is enough: who stands before another was used before that one's time was over, so its own ends at
        most `ttl` later.
        """
        gone: list[_Entry] = []
        with self._lock:
            while (first := next(iter(self._entries.values()), None)) is not None:
                if now < first.until:
                    return gone, first.until
                gone.append(self._entries.popitem(last=False)[1])
        return gone, None

    def _forget(self, entries: Iterable[_Entry]) -> None:
        if watched := [entry for entry in entries if entry.unwatch is not None]:
            self._runtime.background(_unwatch(watched))


async def _unwatch(entries: Iterable[_Entry]) -> None:
    """End their subscriptions. One that fails keeps nobody from the next one."""
    failed: Exception | None = None
    for entry in entries:
        # Taken from it: it holds the wake-up, which holds the entry, whose bytes would stay until the collector comes by.
        unwatch, entry.unwatch = entry.unwatch, None
        try:
            if unwatch is not None:
                await unwatch()
        except Exception as error:  # noqa: BLE001 - told below, once for all
            failed = error
    if failed is not None:
        _log.warning("subscriptions of cached outcomes could not be ended", exc_info=failed)
