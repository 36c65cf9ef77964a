"""Callers of one key inside a process cost one claim: one leads, the others follow its claim and its outcome (R31).

A follower keeps its own fingerprint, wait and policy: it is answered `Busy` while the leader runs, `Replay` or
`Mismatch` from the leader's outcome, `Busy` with a leader who was told so for the same request and asked no earlier, and asks
the store itself in every other case: all at once, never one after the other. When a leader fails, is cancelled or loses its key, its followers
are woken and one of them leads.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from semel.keys import Scope
from semel.layers.layer import Layer
from semel.model import (
    Answer,
    Ask,
    Busy,
    Kind,
    Mismatch,
    Record,
    Renewal,
    Replay,
    Settle,
    State,
    Verdict,
    Won,
    conflicts,
)
from semel.posting import Brief, Poster, poster_of
from semel.runtime import Parker, Runtime
from semel.store import Store, Unwatch

__all__ = ["Coalesce"]


_FRESH = 1.0  # seconds for which an outcome is shared: the stale bound of the cache
_LEADERS = 2  # that may leave without an answer before those who followed them ask for themselves


class _Flight(msgspec.Struct):
    """One key's leader in this process. record: None while its claim is under way, then what is known of the key.

    Nearly every flight has nobody aboard but its leader, so both lists of others begin as the empty tuple.
    """

    leader: bytes
    as_of: float
    """When the store was asked for what is known: no answer is older, however long this process stood still since."""
    record: Record | None = None
    lease_until: float = 0.0
    landed: bool = False
    refused: bool = False
    """Its leader was told what holds for nobody else: a mismatch, unknown, trouble."""
    busy: tuple[Ask, Busy] | None = None
    """Somebody else runs the key: what the leader has asked, and was told."""
    asking: tuple[Parker, ...] = ()
    watchers: tuple[Callable[[], None], ...] = ()

    def wake(self) -> None:
        asking, self.asking = self.asking, ()
        for parker in asking:
            parker.wake()
        for wake in self.watchers:
            wake()


class Coalesce(Layer):
    def __init__(self, inner: Store, runtime: Runtime, *, timeout: float = 2.0) -> None:
        super().__init__(inner)
        self._runtime = runtime
        self._timeout = timeout
        self._lock = threading.Lock()
        self._flights: dict[bytes, _Flight] = {}

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        if len(asks) != 1:
            return await self.inner.claim(asks)
        ask, began, leaders = asks[0], 0.0, _LEADERS
        while leaders:
            # atomic: one of two threads leads
            flight = self._flights.setdefault(
                ask.scope.hash, mine := _Flight(ask.nonce, now := self._runtime.now())
            )
            if flight is mine:
                return await self._lead(flight, asks)
            began = began or now
            verdict = await self._told(flight, ask, began, max(0.0, began + self._timeout - now))
            if verdict is not None:
                return [verdict]
            if self._is_older(flight, ask, began):
                continue  # the next one is not: it begins now
            if flight.refused or flight.record is not None:
                break
            leaders -= 1
        return await self.inner.claim(asks)

    async def _lead(self, flight: _Flight, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        ask = asks[0]
        try:
            verdicts = await self.inner.claim(asks)
        except BaseException:
            self._land(ask.scope.hash, flight, None)
            raise
        self._led(ask.scope.hash, flight, ask, verdicts[0])
        return verdicts

    def _led(self, key: bytes, flight: _Flight, ask: Ask, verdict: Verdict | Exception) -> None:
        """The leader's claim was answered."""
        if type(verdict) is Won:
            flight.lease_until = self._runtime.now() + ask.lease
            flight.record = verdict.record
            if flight.asking:  # without the lock: whoever sits down now looks once more (_told)
                self._call_in(flight)
        else:
            # Those who asked meanwhile share a replay, or that somebody else runs it; later ones ask for themselves.
            flight.refused = type(verdict) is not Replay
            if type(verdict) is Busy:
                flight.lease_until = self._runtime.now() + verdict.retry_after
                flight.busy = ask, verdict
            self._land(key, flight, verdict.record if type(verdict) is Replay else None)

    async def _told(self, flight: _Flight, ask: Ask, began: float, patience: float) -> Verdict | None:
        """A follower's answer: what the leader knows, once it knows. None: it knows nothing for this one."""
        if flight.leader == ask.nonce:
            return None
        with self._lock:
            parker = None
            if flight.record is None and not flight.landed:
                parker = self._runtime.parker()
                flight.asking += (parker,)
        if parker is not None:
            if (
                flight.record is not None or flight.landed
            ):  # learned while we sat down: nobody else may wake us
                parker.wake()
            await parker.park(patience)
        # The same flight, though it may have landed meanwhile: its record, if any, is this follower's answer.
        if (record := flight.record) is not None:
            return self._follow(flight, record, ask)
        return self._busy_too(flight, ask, began)

    def _busy_too(self, flight: _Flight, ask: Ask, began: float) -> Busy | None:
        """What a leader was told of an owner elsewhere holds for those who ask the same."""
        if flight.busy is None or ask.takeover or self._is_older(flight, ask, began):
            return None
        left = flight.lease_until - self._runtime.now()
        return (
            msgspec.structs.replace(flight.busy[1], retry_after=left)
            if _same(flight, ask) and left > 0
            else None
        )

    def _is_older(self, flight: _Flight, ask: Ask, began: float) -> bool:
        """Whether it was asked before this one came, and brings nothing for it where a store wakes: one who waits asks again once
        he is subscribed, and an end between that question and his subscription would be told to nobody. They ask together, led
        by one of them."""
        return (
            flight.as_of < began
            and flight.busy is not None
            and not ask.takeover
            and self.capabilities.notifies
            and _same(flight, ask)
        )

    def _follow(self, flight: _Flight, record: Record, ask: Ask) -> Verdict | None:
        """Answer a follower from what the leader knows; None sends it to the store."""
        if ask.takeover:
            return None
        if record.state is not State.RUNNING and self._runtime.now() - flight.as_of > _FRESH:
            return None  # it may have been forgotten since
        if conflicts(record, ask):
            return Mismatch()
        if record.state is State.RUNNING:
            left = flight.lease_until - self._runtime.now()
            return Busy(left, record.attempts) if left > 0 else None
        return Replay(record)

    def _call_in(self, flight: _Flight) -> None:
        with self._lock:
            asking, flight.asking = flight.asking, ()
        for parker in asking:
            parker.wake()

    def _land(self, key: bytes, flight: _Flight, record: Record | None) -> None:
        with self._lock:
            flight.record = record
            flight.landed = True
            if self._flights.get(key) is flight:
                del self._flights[key]
        if flight.asking or flight.watchers:
            flight.wake()

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        asked_at = self._runtime.now()
        answers = await self.inner.settle(ends)
        for at, end in enumerate(ends):
            flight = self._flights.get(end.scope.hash)
            if flight is not None and type(answer := answers[at]) is Answer:
                self._ended(flight, end, answer, asked_at)
        return answers

    def _ended(self, flight: _Flight, end: Settle, answer: Answer, asked_at: float) -> None:
        if flight.watchers:
            flight.as_of = asked_at
            self._settled(flight, end, answer)
        else:
            self._land(end.scope.hash, flight, None)

    def _settled(self, flight: _Flight, end: Settle, answer: Answer) -> None:
        key = end.scope.hash
        outcome = end.kind in (Kind.DONE, Kind.FAILED) and answer is Answer.OK
        mine = flight.leader == end.nonce and not end.new_nonce
        if not (mine and outcome) or flight.record is None:
            self._land(key, flight, None)
            return
        # Followers sit here: leave the outcome for them, until the last of them has stood up.
        flight.record = msgspec.structs.replace(
            flight.record,
            state=State(end.kind.value),
            marker=end.marker,
            result=end.result,
            ref=end.ref if end.ref is not None else flight.record.ref,
            error=end.error,
        )
        with self._lock:
            # The last of them may have stood up in another thread before the outcome was there to see.
            if not flight.watchers and self._flights.get(key) is flight:
                del self._flights[key]
        flight.wake()

    def poster(self) -> Poster | None:
        """The quick way, where there is one below: for the callers of one event loop, so without the lock."""
        inner = poster_of(self.inner)
        if inner is None:
            return None
        return _Poster(inner, self._flights, self._runtime.now, self._led, self._land, self._ended)

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        answers = await self.inner.renew(renewals)
        for renewal, answer in zip(renewals, answers, strict=True):
            flight = self._flights.get(renewal.scope.hash)
            if flight is None or flight.leader != renewal.nonce:
                continue
            if answer is Answer.OK:
                flight.lease_until = self._runtime.now() + renewal.lease
            elif answer is Answer.LOST:
                self._land(renewal.scope.hash, flight, None)
        return answers

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        with self._lock:
            flight = self._flights.get(scope.hash)
            if flight is not None:
                flight.watchers += (wake,)
        if flight is None:
            return await self.inner.watch(scope, wake)
        return self._leaver(scope.hash, flight, wake)

    def _leaver(self, key: bytes, flight: _Flight, wake: Callable[[], None]) -> Unwatch:
        async def unwatch() -> None:
            with self._lock:
                left = list(flight.watchers)
                if wake in left:  # leaving twice is no mistake
                    left.remove(wake)
                    flight.watchers = tuple(left)
                settled = flight.record is not None and flight.record.state is not State.RUNNING
                if not flight.watchers and settled and self._flights.get(key) is flight:
                    del self._flights[key]

        return unwatch


class _Poster:
    """See `semel.posting`: who leads, and what the others learn, is decided where `Coalesce` decides it."""

    __slots__ = ("_ended", "_flights", "_inner", "_land", "_led", "_now")

    def __init__(
        self,
        inner: Poster,
        flights: dict[bytes, _Flight],
        now: Callable[[], float],
        led: Callable[[bytes, _Flight, Ask, Verdict], None],
        land: Callable[[bytes, _Flight, Record | None], None],
        ended: Callable[[_Flight, Settle, Answer, float], None],
    ) -> None:
        self._inner = inner
        self._flights = flights
        self._now = now
        self._led, self._land, self._ended = led, land, ended

    def claim(self, ask: Ask, now: float) -> Awaitable[Any] | None:
        key = ask.scope.hash
        if key in self._flights:
            return None  # somebody leads, or this very claim did: Coalesce.claim knows
        posted = self._inner.claim(ask, now)
        if posted is not None:
            self._flights[key] = _Flight(ask.nonce, now)
        return posted

    def claimed(self, ask: Ask, reply: Any, *, whole: bool = True) -> Verdict | Brief | None:
        key = ask.scope.hash
        flight = self._flights.get(key)
        if flight is None or flight.leader is not ask.nonce:
            # A settle of this key came in between, and woke all who followed.
            return self._inner.claimed(ask, reply, whole=whole)
        followed = flight.asking or flight.watchers
        verdict = self._inner.claimed(ask, reply, whole=True if followed else whole)
        # Of a claim that nobody follows there is not much to tell: `_led` and `_land`, without the calls and the lock.
        if isinstance(verdict, Brief) or (type(verdict) is Replay and not followed):
            del self._flights[key]
        elif type(verdict) is Won and not followed:
            flight.lease_until = self._now() + ask.lease
            flight.record = verdict.record
        elif verdict is not None:
            self._led(key, flight, ask, verdict)
        return verdict

    def _mine(self, ask: Ask) -> _Flight | None:
        """As in `claimed`."""
        flight = self._flights.get(ask.scope.hash)
        return flight if flight is not None and flight.leader is ask.nonce else None

    async def reclaim(self, ask: Ask, reply: Any, asked: float) -> Verdict:
        verdict = await self._inner.reclaim(ask, reply, asked)
        flight = self._mine(ask)
        if flight is not None:
            self._led(ask.scope.hash, flight, ask, verdict)
        return verdict

    def unclaimed(self, ask: Ask) -> None:
        flight = self._mine(ask)
        if flight is not None:
            self._land(ask.scope.hash, flight, None)

    def settle(self, end: Settle, now: float) -> Awaitable[Any] | None:
        return self._inner.settle(end, now)

    def settled(self, end: Settle, reply: Any, asked: float) -> Answer | None:
        answer = self._inner.settled(end, reply, asked)
        if answer is not None and (flight := self._flights.get(end.scope.hash)) is not None:
            if flight.watchers or flight.asking:
                self._ended(flight, end, answer, asked)
            else:  # as `_land`, without the lock
                flight.landed = True
                del self._flights[end.scope.hash]
        return answer

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        answer = await self._inner.resettle(end, reply, asked)
        flight = self._flights.get(end.scope.hash)
        if flight is not None:
            self._ended(flight, end, answer, asked)
        return answer


def _same(flight: _Flight, ask: Ask) -> bool:
    """Whether the leader, who was told Busy, has asked for the same request."""
    asked = ask if flight.busy is None else flight.busy[0]
    return (asked.fingerprint, asked.fingerprint_version) == (ask.fingerprint, ask.fingerprint_version)
