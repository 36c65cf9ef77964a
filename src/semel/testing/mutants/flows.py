"""Bugs in the life of a call: claiming, waiting, failing, recording, heartbeats, debts, steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from semel import ids, model, steps
from semel.calls import Call
from semel.debts import Debts
from semel.errors import KeyExpired, OutcomeUnknown
from semel.flow import Engine
from semel.heart import Heart
from semel.model import Answer, Ask, Busy, Kind, Policy, Record, Replay, Settle, State, Unknown, Won
from semel.options import Found
from semel.points import reach
from semel.recording import Recorder
from semel.run import Outcome, Run, _current
from semel.stepping import Stepper
from semel.testing.mutants.plant import Patch, mutant
from semel.waiting import Seat

__all__: list[str] = []

replace = msgspec.structs.replace

_EPOCH = 1_000_000.0  # the simulated server's clock when a worker's clock that is right shows 0


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
        token = _current.set(run.weak)
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
    real = Engine._perform

    async def perform(self: Engine, run: Run) -> Outcome[Any]:
        end = Settle(run.scope, run.ask.nonce, Kind.DONE, run.call.options.retention)
        await self.store.settle((end,))
        return await real(self, run)

    return [(Engine, "_perform", perform)]


@mutant("waiter-takes-lapse-for-success", check="I2")
def _waiter_takes_lapse_for_success() -> Sequence[Patch]:
    """A waiter that wakes at the end of the lease believes that the run is done."""
    real = Engine._contend
    real_park = Seat.park

    class Lapsed(Exception):
        pass

    async def park(self: Seat, busy: Busy) -> bool:
        woken = await real_park(self, busy)
        if not woken and busy.retry_after < 0.3:
            raise Lapsed
        return woken

    async def contend(self: Engine, call: Call, ask: Ask, verdict: Any, heard: Any = None) -> Any:
        try:
            return await real(self, call, ask, verdict, heard)
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
        except Exception as error:  # noqa: BLE001 - as the real one: no answer is no end
            answer = error
        if answer is Answer.OK:
            self._heart.remove(run)
        else:
            until = self._runtime.now() + self._settle_timeout
            await self._runtime.protect(self._persist(run, end, value, answer, until))
        reach("settle.stored")

    return [(Recorder, "record", record)]


@mutant("release-when-not-recorded", check="I1")
def _release_when_not_recorded() -> Sequence[Patch]:
    """A settle that the store did not take in time becomes a release."""

    def owe(self: Debts, debt: Any) -> bool:
        debt.end = Settle(debt.end.scope, debt.end.nonce, Kind.RELEASED, debt.end.retention)
        return real(self, debt)

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
    real = Heart._heard

    def heard(self: Heart, run: Run, answer: Any) -> None:
        real(self, run, Answer.LOST if isinstance(answer, Exception) else answer)

    return [(Heart, "_heard", heard)]


@mutant("heart-stops-after-an-error", check="R17")
def _heart_stops_after_an_error() -> Sequence[Patch]:
    """After one heartbeat without an answer no other one is sent."""
    real = Heart._heard

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
        self._runs[run.ask.nonce] = run.weak
        self._ticker.at(run.due)

    return [(Heart, "add", add)]


@mutant("lost-lease-unheard", check="R17")
def _lost_lease_unheard() -> Sequence[Patch]:
    """An owner that was told that its key is another's goes on as before."""
    return [(Heart, "_lose", Heart.remove)]


@mutant("on-error-unheard", check="R9")
def _on_error_unheard() -> Sequence[Patch]:
    """Every failure of the function frees the key, whatever its caller said."""
    real = Engine._decision
    return [(Engine, "_decision", staticmethod(lambda run, error: ("release", real(run, error)[1])))]


@mutant("release-at-once", check="R9")
def _release_at_once() -> Sequence[Patch]:
    """Release(after=…) is sent without its delay."""
    real = Engine._decision
    return [(Engine, "_decision", staticmethod(lambda run, error: (real(run, error)[0], 0.0)))]


@mutant("on-error-that-fails-frees", check="R9")
def _on_error_that_fails_frees() -> Sequence[Patch]:
    """An `on_error` that raises by itself counts as a release."""
    real = Engine._decision

    def decision(run: Run, error: Exception) -> Any:
        said = real(run, error)
        return ("release", 0.0) if getattr(error, "__notes__", ()) else said

    return [(Engine, "_decision", staticmethod(decision))]


@mutant("undecided-runs-again", check="I1")
def _undecided_runs_again() -> Sequence[Patch]:
    """A probe that could not tell is taken for one that found nothing."""
    real = Engine._probe

    async def probe(
        self: Engine, call: Call, ask: Ask, unknown: Unknown, heard: list[Any]
    ) -> tuple[Ask, Found | None]:
        try:
            return await real(self, call, ask, unknown, heard)
        except OutcomeUnknown:
            if unknown.record is None or unknown.policy is not Policy.PROBE:
                raise
            return replace(ask, takeover=unknown.record.nonce), None

    return [(Engine, "_probe", probe)]


@mutant("step-mark-left-out", check="I1")
def _step_mark_left_out() -> Sequence[Patch]:
    """A step under hold leaves no mark before it begins, but one that says that it is done, when it is."""
    real = Stepper._note

    async def note(self: Stepper, run: Run, step: steps.Step) -> None:
        if step.phase != "started":
            await real(self, run, step)

    return [(Stepper, "_note", note)]


@mutant("held-step-runs-again", check="R26")
def _held_step_runs_again() -> Sequence[Patch]:
    """A step that a lost attempt had begun is run again, whatever its policy."""

    async def nothing(*_: Any) -> None:
        return None

    return [(Stepper, "_probe_step", nothing)]


@mutant("laxer-step-policy-wins", check="R26")
def _laxer_step_policy_wins() -> Sequence[Patch]:
    """A step that was begun under hold is made again by an attempt whose step says retry."""
    real = Stepper._probe_step

    async def probed(self: Stepper, asked: Any, known: steps.Step) -> Any:
        return None if asked.policy == "retry" else await real(self, asked, known)

    return [(Stepper, "_probe_step", probed)]


@mutant("id-minted-anew", check="R25")
def _id_minted_anew() -> Sequence[Patch]:
    """Every attempt mints an id of its own."""

    async def new_id(self: Stepper, run: Run, kind: str, name: str) -> str:
        text = ids.mint(kind, int(run.clock() * 1000), self._runtime.entropy(10)).text
        await self._note(run, steps.Step(f"id:{name}", "id", run.clock(), text.encode()))
        return text

    return [(Stepper, "new_id", new_id)]


@mutant("straggler-given-up", check="R16", workload="stragglers")
def _straggler_given_up() -> Sequence[Patch]:
    """A lost claim is not released any more once somebody else holds the key: when it arrives, nobody runs it."""
    real = Debts._is_paid

    async def is_paid(self: Debts, debt: Any, answer: Answer) -> bool:
        return answer is not Answer.GONE if debt.run is None else await real(self, debt, answer)

    return [(Debts, "_is_paid", is_paid)]


@mutant("copy-of-a-refused-claim-forgotten", check="R16", workload="resets")
def _copy_of_a_refused_claim_forgotten() -> Sequence[Patch]:
    """A claim was sent again and refused, and the copy that its reset connection left behind is granted to nobody."""
    return [(Debts, "leave", lambda *_: None)]


@mutant("copy-of-a-freed-claim-forgotten", check="R16", workload="resets")
def _copy_of_a_freed_claim_forgotten() -> Sequence[Patch]:
    """A claim was sent again, won and freed; the first copy arrives when others have had the key, and nobody runs it."""
    return [(Debts, "ended", lambda *_: None)]


@mutant("lease-by-the-worker-s-clock", check="I4")
def _lease_by_the_worker_s_clock() -> Sequence[Patch]:
    """Whether a lease is over is decided by the clock of whoever asks, not by the store's (R20)."""
    real_claim, real = Engine.claim, model.claim
    sent: dict[bytes, float] = {}

    async def claim(self: Engine, ask: Ask) -> Any:
        sent[ask.nonce] = _EPOCH + self.runtime.now()
        return await real_claim(self, ask)

    def decide(record: Record | None, ask: Ask, now: float) -> Any:
        return real(record, ask, sent.get(ask.nonce, now))

    return [(Engine, "claim", claim), (model, "claim", decide)]


@mutant("expiry-told-before-it-is-written", check="I11")
def _expiry_told_before_it_is_written() -> Sequence[Patch]:
    """A worker tells by its own clock that a result is no longer kept; the store has not said so, and replays it to others."""
    real = Engine.replay

    def replay(self: Engine, call: Call, record: Record) -> Outcome[Any]:
        if record.expires <= _EPOCH + self.runtime.now():
            raise KeyExpired("its time is over, by this worker's clock")
        return real(self, call, record)

    return [(Engine, "replay", replay)]


@mutant("store-trouble-replayed", check="I10")
def _store_trouble_replayed() -> Sequence[Patch]:
    """A store that did not answer a step counts as a failure of the function, which "replay" makes the outcome."""
    real = Stepper._note

    async def note(self: Stepper, run: Run, step: steps.Step) -> None:
        try:
            await real(self, run, step)
        finally:
            run.unheard = None

    return [(Stepper, "_note", note)]
