"""Bugs in the life of a call: claiming, waiting, recording, heartbeats, debts and the layers around a store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from semel.calls import Call
from semel.debts import Debts
from semel.errors import StoreUnavailable
from semel.flow import Engine
from semel.heart import Heart
from semel.layers import cache, coalesce
from semel.layers.cache import Cache
from semel.layers.retry import Retry
from semel.model import Answer, Ask, Busy, Kind, Record, Renewal, Replay, Settle, State, Won
from semel.points import reach
from semel.recording import Recorder
from semel.run import Outcome, Run, _current
from semel.testing.mutants.plant import Patch, mutant
from semel.waiting import Seat

__all__: list[str] = []

replace = msgspec.structs.replace


@mutant("effect-before-the-claim", check="I1")
def _effect_before_the_claim() -> Sequence[Patch]:
    """The function runs before the claim is answered."""

    async def execute(self: Engine, call: Call) -> Outcome[Any]:
        ask = self._ask(call)
        now = self.runtime.now()
        hope = Record(
            State.RUNNING, ask.nonce, 1, 0, now, now, now + ask.lease, now + ask.lease, scope=call.scope
        )
        run = Run(self, call, ask, hope, self.runtime.interrupt())
        token = _current.set(run)
        try:
            value = await self.runtime.call(call.fn, call.args, call.kwargs, True)
        finally:
            _current.reset(token)
        verdict = await self.claim(ask)
        if type(verdict) is not Won:
            if type(verdict) is not Replay:
                ask, verdict = await self._contend(call, ask, verdict)
            if type(verdict) is Replay:
                return self.replay(call, verdict.record)
        return await self.complete(self.begin(call, ask, verdict.record), value)

    return [(Engine, "execute", execute)]


@mutant("done-before-the-effect", check="I2")
def _done_before_the_effect() -> Sequence[Patch]:
    """The key is marked as done first, the effect is made afterwards."""
    real = Engine._perform  # noqa: SLF001

    async def perform(self: Engine, run: Run) -> Outcome[Any]:
        end = Settle(run.scope, run.ask.nonce, Kind.DONE, run.call.options.retention)
        await self.store.settle((end,))
        return await real(self, run)

    return [(Engine, "_perform", perform)]


@mutant("waiter-takes-lapse-for-success", check="I2")
def _waiter_takes_lapse_for_success() -> Sequence[Patch]:
    """A waiter that wakes at the end of the lease believes that the run is done."""
    real = Engine._contend  # noqa: SLF001
    real_park = Seat.park

    class Lapsed(Exception):
        pass

    async def park(self: Seat, busy: Busy) -> bool:
        woken = await real_park(self, busy)
        if not woken and busy.retry_after < 0.3:
            raise Lapsed
        return woken

    async def contend(self: Engine, call: Call, ask: Ask, verdict: Any) -> Any:
        try:
            return await real(self, call, ask, verdict)
        except Lapsed:
            done = Record(State.DONE, ask.nonce, 1, 0, 0.0, 0.0, 0.0, 0.0, scope=call.scope)
            return ask, Replay(done)

    return [(Engine, "_contend", contend), (Seat, "park", park)]


@mutant("cancel-swallowed", check="I9")
def _cancel_swallowed() -> Sequence[Patch]:
    """A cancelled run is neither ended nor given up: its heart beats on."""

    async def lose(self: Engine, run: Run, error: BaseException) -> None:
        del self, run, error

    return [(Engine, "lose", lose)]


@mutant("cancel-frees-a-held-key", check="I1")
def _cancel_frees_a_held_key() -> Sequence[Patch]:
    """A cancelled run is released whatever its policy."""
    real = Engine.lose

    async def lose(self: Engine, run: Run, error: BaseException) -> None:
        if run.interrupt.fired:
            await real(self, run, error)
            return
        await self._end_badly(run, Kind.RELEASED, error, after=0.0, policy=None, word="lost")

    return [(Engine, "lose", lose)]


@mutant("cancelled-settle-is-dropped", check="I9")
def _cancelled_settle_is_dropped() -> Sequence[Patch]:
    """A caller cancelled in the middle of the settle leaves it undone."""

    async def record(self: Recorder, run: Run, end: Settle, value: Any) -> None:
        run.settling = True
        reach("settle.sent")
        answer: Any
        try:
            answer = (await self._store.settle((end,)))[0]
        except Exception as error:  # noqa: BLE001
            answer = error
        if answer is Answer.OK:
            self._heart.remove(run)
        else:
            await self._runtime.protect(self._persist(run, end, value, answer))
        reach("settle.stored")

    return [(Recorder, "record", record)]


@mutant("release-when-not-recorded", check="I1")
def _release_when_not_recorded() -> Sequence[Patch]:
    """A settle that the store did not take in time becomes a release."""

    def owe(self: Debts, run: Run, end: Settle) -> None:
        freed = Settle(end.scope, end.nonce, Kind.RELEASED, end.retention)
        real(self, run, freed)

    real = Debts.owe
    return [(Debts, "owe", owe)]


@mutant("debts-forgotten", check="I9")
def _debts_forgotten() -> Sequence[Patch]:
    """An outcome that the store did not take in time is not offered again, while its lease is renewed for ever."""
    return [(Debts, "owe", lambda *_: None)]


@mutant("lost-claim-not-released", check="R16")
def _lost_claim_not_released() -> Sequence[Patch]:
    """A claim whose answer was lost is left to itself: under hold its key is unknown, though nobody ran it."""
    return [(Debts, "abandon", lambda *_: None)]


@mutant("fenced-owner-told-ok", check="I3")
def _fenced_owner_told_ok() -> Sequence[Patch]:
    """A zombie whose settle was refused tells its caller its own result."""

    async def accepted(self: Debts, run: Run, answer: Answer) -> bool:
        del answer
        self._heart.remove(run)
        return True

    return [(Debts, "accepted", accepted)]


@mutant("silence-taken-for-loss", check="R17")
def _silence_taken_for_loss() -> Sequence[Patch]:
    """A heartbeat without an answer counts as a lost lease."""
    real = Heart._heard  # noqa: SLF001

    def heard(self: Heart, run: Run, answer: Any) -> None:
        real(self, run, Answer.LOST if isinstance(answer, Exception) else answer)

    return [(Heart, "_heard", heard)]


@mutant("heart-stops-after-an-error", check="R17")
def _heart_stops_after_an_error() -> Sequence[Patch]:
    """After one heartbeat without an answer no other one is sent."""
    real = Heart._heard  # noqa: SLF001

    def heard(self: Heart, run: Run, answer: Any) -> None:
        if isinstance(answer, Exception):
            self.remove(run)
            return
        real(self, run, answer)

    return [(Heart, "_heard", heard)]


@mutant("heartbeat-too-slow", check="I1")
def _heartbeat_too_slow() -> Sequence[Patch]:
    """The first heartbeat comes when the lease is over."""

    def add(self: Heart, run: Run) -> None:
        run.due = run.won_at + run.ask.lease * 1.2
        self._runs[run.ask.nonce] = run
        self._ticker.at(run.due)

    return [(Heart, "add", add)]


@mutant("lease-sent-short", check="I1")
def _lease_sent_short() -> Sequence[Patch]:
    """Heartbeats extend the lease by a tenth of what was asked for."""

    async def renew(self: Retry, renewals: Sequence[Renewal]) -> Any:
        short = [replace(renewal, lease=renewal.lease / 10) for renewal in renewals]
        return await self._batch(self.inner.renew, short)

    return [(Retry, "renew", renew)]


@mutant("resent-with-another-nonce", check="R16")
def _resent_with_another_nonce() -> Sequence[Patch]:
    """A claim is sent again under a new nonce: the first one, if granted, blocks it."""

    async def claim(self: Retry, asks: Sequence[Ask]) -> Any:
        start = self._now()
        try:
            return await self.inner.claim(asks)
        except StoreUnavailable:
            if self._now() - start > self._patience:
                raise
            fresh = [replace(ask, nonce=hashlib.sha256(ask.nonce).digest()[:16]) for ask in asks]
            return await self.inner.claim(fresh)

    return [(Retry, "claim", claim)]


@mutant("follower-of-another-request", check="I6")
def _follower_of_another_request() -> Sequence[Patch]:
    """A follower in the same process gets the leader's result without a look at its request."""
    return [(coalesce, "conflicts", lambda *_: False)]


@mutant("cache-kept", check="R31")
def _cache_kept() -> Sequence[Patch]:
    """A cached outcome is neither dropped nor does it age."""
    real = Cache.__init__

    def init(self: Cache, inner: Any, runtime: Any, **options: Any) -> None:
        real(self, inner, runtime, **options)
        self._ttl = 1_000.0

    return [
        (Cache, "__init__", init),
        (Cache, "_drop", lambda *_: None),
        (Cache, "_dropper", lambda *_: lambda: None),
    ]


@mutant("cache-blind-to-requests", check="I6")
def _cache_blind_to_requests() -> Sequence[Patch]:
    """A cached outcome is replayed to every request."""
    return [(cache, "conflicts", lambda *_: False)]


@mutant("wrong-answers-in-a-batch", check="I7")
def _wrong_answers_in_a_batch() -> Sequence[Patch]:
    """The verdicts of a batch are handed out in another order."""
    from semel.layers.batch import Batch

    real = Batch.__init__

    def init(self: Batch, inner: Any) -> None:
        async def backwards(asks: Sequence[Ask]) -> Any:
            return list(reversed(await inner.claim(asks)))

        real(self, inner)
        self._claims._verb = backwards  # noqa: SLF001

    return [(Batch, "__init__", init)]
