"""Waiting for a key that somebody else runs: parked and woken where the store can wake, polling where it cannot."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from math import inf

import msgspec

from semel.calls import Call, in_progress, name_of
from semel.errors import ConfigurationError, StoreUnavailable
from semel.hooks import Contended, Emit
from semel.model import Ask, Busy, Verdict
from semel.points import reach
from semel.run import run_or_none
from semel.runtime import Parker, Runtime
from semel.store import Store, Unwatch

__all__ = ["Bench", "Seat"]

_SAFETY_POLL = 1.0  # a lost wake-up costs at most this, or the lease if that is shorter


class Bench:
    """The waiters of one engine, counted per key so that their number stays bounded."""

    asks_twice = True
    """Whether a claim without an answer can be made once more, on another connection."""

    def __init__(self, store: Store, runtime: Runtime, emit: Emit | None) -> None:
        self.store = store
        self.runtime = runtime
        self._emit = emit
        self._waiting = _Seats()

    async def sit(self, call: Call, busy: Busy) -> Seat:
        """A seat for a caller that waits; InProgress for one that does not, or that finds the bench full."""
        options = call.options
        seat = Seat(self, call) if options.wait > 0 else None
        try:
            waits = seat is not None and self._waiting.take(seat, options.max_waiters)
            if waits and not busy.delayed and options.wait == inf:
                self._refuse_own(call)
            if self._emit is not None:
                self._emit(Contended(call.scope, waits, busy.retry_after))
            if seat is None or not waits:
                raise in_progress(call, busy, crowded=options.wait > 0)
            await seat.watch()
        except BaseException:
            if seat is not None:
                await seat.leave()
            raise
        return seat

    def _refuse_own(self, call: Call) -> None:
        """A run that waits for its own key without a bound, inside of its function or of what that calls, would never end."""
        run = run_or_none()
        while run is not None:
            if run.is_kept_by(call.scope, self.store):
                raise ConfigurationError(
                    f"{name_of(call)} is asked for inside of its own run, which cannot end before this call does: it would wait for "
                    "itself for ever. Use another key or operation= inside, or a shorter wait= to be told InProgress"
                )
            run = None if run.parent is None else run.parent()

    def stand(self, seat: Seat | None) -> None:
        if seat is not None:
            self._waiting.give(seat)


class _Seats(dict[bytes, int]):
    """How many wait, by key; nothing of a key for which nobody does.

    Counted under a lock: of two threads of which one takes a seat while the other leaves one, both might stay counted for good.
    """

    def __init__(self) -> None:
        super().__init__()
        # Not a plain lock: a signal's handler may wait for a key too.
        self._lock = threading.RLock()

    def take(self, seat: Seat, most: int) -> bool:
        key = seat.call.scope.hash
        with self._lock:
            sitting = self.get(key, 0)
            if sitting < most:
                self[key] = sitting + 1
                seat.counted = True
        return seat.counted

    def give(self, seat: Seat) -> None:
        """Once more, or of one that was not taken, is no harm."""
        key = seat.call.scope.hash
        with self._lock:
            if seat.counted:
                seat.counted = False
                if self[key] == 1:
                    del self[key]
                else:
                    self[key] -= 1


class Seat:
    """A waiter of a busy key: woken by the settle where the store can, polling where it cannot."""

    __slots__ = (
        "_bench",
        "_doubtful_until",
        "_pause",
        "_scope",
        "_unanswered",
        "_until",
        "call",
        "counted",
        "parker",
        "unwatch",
    )

    def __init__(self, bench: Bench, call: Call) -> None:
        self._bench = bench
        self._scope = call.scope
        self.call = call
        self.counted = False
        self.parker: Parker = bench.runtime.parker()
        self.unwatch: Unwatch | None = None
        self._until = bench.runtime.now() + call.options.wait
        self._pause = call.options.poll[0]
        self._unanswered: StoreUnavailable | None = None
        self._doubtful_until = 0.0

    async def watch(self) -> None:
        """Subscribe, or subscribe anew: after a wake-up somebody else, in another process, may run the key."""
        if self.unwatch is not None:
            unwatch, self.unwatch = self.unwatch, None
            await unwatch()
        self.unwatch = await self._bench.store.watch(self._scope, self.parker.wake)

    async def watch_again(self) -> None:
        """As `watch`; once more if nobody answered."""
        try:
            await self.watch()
        except StoreUnavailable:
            if not self._has_time:
                raise
            await self.watch()

    async def ask(self, claim: Callable[[Ask], Awaitable[Verdict]], ask: Ask) -> tuple[Ask, Verdict]:
        """The next claim of one who waits, and with which ask it was made.

        A connection that has gone silent does not end a wait that has time left: by then it is given up, and the claim is made
        once more, on another one.
        """
        try:
            return ask, await claim(ask)
        except StoreUnavailable as error:
            if not self._has_time or not self._bench.asks_twice:
                raise
            self._unanswered, self._doubtful_until = error, self._bench.runtime.now() + ask.lease
            # With another nonce: the claim that had no answer is released behind our back.
            again = msgspec.structs.replace(ask, nonce=self._bench.runtime.entropy(16))
            return again, await claim(again)

    @property
    def _has_time(self) -> bool:
        return self._until > self._bench.runtime.now()

    async def park(self, busy: Busy) -> bool:
        """Wait for a wake-up, but not past what the caller, the lease or the polling allows; True when woken."""
        left = self._until - self._bench.runtime.now()
        if left <= 0:
            # It may be our own claim, one that had no answer, that is not released yet: nobody waits for that (R16).
            doubtful = self._unanswered if self._bench.runtime.now() < self._doubtful_until else None
            raise doubtful or in_progress(self.call, busy)
        if self._bench.store.capabilities.notifies:
            pause = _SAFETY_POLL
        else:
            pause, self._pause = self._pause, min(self._pause * 1.5, self.call.options.poll[1])
        reach("wait.parked")
        # Not past the end of the lease: from then on the key is anybody's. 1 ms keeps a lapsing one from spinning.
        return await self.parker.park(min(left, pause, max(busy.retry_after, 0.001)))

    async def leave(self) -> None:
        self._bench.stand(self)
        if self.unwatch is not None:
            await self.unwatch()
