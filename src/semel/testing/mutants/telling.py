"""Bugs in what callers are told, how soon, and in what a worker keeps of calls that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from semel import flow, model
from semel.asking import Asker
from semel.calls import Call, in_progress
from semel.debts import Debts
from semel.flow import Engine
from semel.heart import Heart
from semel.layers import coalesce
from semel.model import Ask, Busy, Kind, Policy, Record, Settle, Unknown
from semel.points import reach
from semel.run import Outcome, Run
from semel.stepping import Stepper
from semel.steps import Step
from semel.stores.memory import MemoryStore
from semel.testing.mutants.plant import Patch, mutant
from semel.waiting import Bench, Seat

__all__: list[str] = []

replace = msgspec.structs.replace


@mutant("probe-not-asked", check="I9")
def _probe_not_asked() -> Sequence[Patch]:
    """A lost outcome stays unknown though the caller has a probe that would settle it."""

    async def probe(self: Engine, call: Call, ask: Ask, unknown: Unknown, heard: list[Any]) -> NoReturn:
        del ask, heard
        raise self._unknown(call, unknown)

    return [(Engine, "_probe", probe)]


@mutant("done-is-held", check="I3")
def _done_is_held() -> Sequence[Patch]:
    """Under hold a function that has returned is recorded as unknown: its own caller gets the value, the next one doubts."""
    real = flow.done_of

    def done_of(run: Run, *args: Any) -> Settle:
        end = real(run, *args)
        return replace(end, kind=Kind.UNKNOWN) if run.policy is Policy.HOLD else end

    return [(flow, "done_of", done_of)]


@mutant("replay-told-as-a-run", check="R2")
def _replay_told_as_a_run() -> Sequence[Patch]:
    """A replayed outcome does not say that it is one."""
    real = Engine._repeat

    def repeat(*args: Any) -> Outcome[Any]:
        told = real(*args)
        return Outcome(told._value, False, told.ref, told.attempt, told.marker)

    return [(Engine, "_repeat", staticmethod(repeat))]


@mutant("ref-left-out", check="R25")
def _ref_left_out() -> Sequence[Patch]:
    """The settle forgets the id that the run minted: whoever is told a replay cannot find what was made."""
    real = flow.done_of
    return [(flow, "done_of", lambda run, *args: replace(real(run, *args), ref=None))]


@mutant("cancelled-run-left-to-its-lease", check="R10", workload="cancels")
def _cancelled_run_left_to_its_lease() -> Sequence[Patch]:
    """A cancelled run is given up without a word to the store: its key is blocked until the lease is over."""
    real = Engine.lose

    async def lose(self: Engine, run: Run, error: BaseException) -> None:
        if run.interrupt.fired:
            await real(self, run, error)
        self.heart.remove(run)

    return [(Engine, "lose", lose)]


@mutant("cancelled-claim-not-released", check="R16", workload="cancels")
def _cancelled_claim_not_released() -> Sequence[Patch]:
    """Who is cancelled while his claim is under way leaves it there: under hold its key is unknown, though nobody ran it."""
    real = Asker.brief

    async def brief(self: Asker, ask: Ask, *, whole: bool = False) -> Any:
        try:
            return await real(self, ask, whole=whole)
        except asyncio.CancelledError:
            self._debts._owed.pop(ask.nonce, None)
            raise

    return [(Asker, "brief", brief)]


@mutant("step-note-sent-once", check="R26")
def _step_note_sent_once() -> Sequence[Patch]:
    """The note of a step that was made is not offered again when it gets lost: the step is made again."""

    async def keep(self: Stepper, run: Run, done: Step) -> None:
        await self._note(run, done)

    return [(Stepper, "_keep", keep)]


@mutant("cancelled-step-not-noted", check="R26", workload="cancels")
def _cancelled_step_not_noted() -> Sequence[Patch]:
    """Who is cancelled while the note of a step is under way leaves it there."""
    real = Stepper._keep
    offered: set[tuple[bytes, str]] = set()

    async def keep(self: Stepper, run: Run, done: Step) -> None:
        offer = (run.ask.nonce, done.name)
        if offer not in offered:  # else it is the second try of who was cancelled in the first
            offered.add(offer)
            await real(self, run, done)

    return [(Stepper, "_keep", keep)]


@mutant("settle-wakes-nobody", check="R30")
def _settle_wakes_nobody() -> Sequence[Patch]:
    """Waiters learn of an outcome when they look by themselves, a second later."""
    return [(MemoryStore, "_wake", lambda *_: None)]


@mutant("followers-not-woken", check="R30")
def _followers_not_woken() -> Sequence[Patch]:
    """Waiters of the leader's own process are not woken by its settle."""
    return [(coalesce._Flight, "wake", lambda _: None)]


@mutant("parked-before-a-second-look", check="R30")
def _parked_before_a_second_look() -> Sequence[Patch]:
    """A waiter subscribes and parks: a settle between its claim and its subscription is missed."""
    real = Bench.sit

    async def sit(self: Bench, call: Call, busy: Busy) -> Seat:
        seat = await real(self, call, busy)
        await seat.park(busy)
        return seat

    return [(Bench, "sit", sit)]


@mutant("parked-past-its-wait", check="R3")
def _parked_past_its_wait() -> Sequence[Patch]:
    """A waiter looks at its own time only when it wakes."""

    async def park(self: Seat, busy: Busy) -> bool:
        if self._until <= self._bench.runtime.now():
            raise in_progress(self.call, busy)
        reach("wait.parked")
        return await self.parker.park(min(1.0, max(busy.retry_after, 0.001)))

    return [(Seat, "park", park)]


@mutant("seats-kept", check="I15")
def _seats_kept() -> Sequence[Patch]:
    """A waiter that leaves still counts: after `max_waiters` of them nobody may wait any more."""
    return [(Bench, "stand", lambda *_: None)]


class _Kept(dict[bytes, Any]):
    def pop(self, key: bytes, default: Any = None) -> Any:
        return self.get(key, default)


def _keeping(attribute: str) -> Sequence[Patch]:
    real = Debts.__init__

    def init(self: Debts, *args: Any) -> None:
        real(self, *args)
        setattr(self, attribute, _Kept())

    return [(Debts, "__init__", init)]


@mutant("paid-debts-kept", check="I15")
def _paid_debts_kept() -> Sequence[Patch]:
    """A debt that was paid, or is over, stays on the list: it grows with every lost answer, and is offered for ever."""
    return _keeping("_owed")


@mutant("strays-kept", check="I15", workload="resets")
def _strays_kept() -> Sequence[Patch]:
    """The nonce of a claim that was sent again is remembered when its call has ended: ten thousand of them fill the list."""
    return _keeping("strays")


@mutant("won-claims-expected-for-ever", check="I15")
def _won_claims_expected_for_ever() -> Sequence[Patch]:
    """A claim that was won still counts as on its way: whoever closes waits for it in vain."""
    real = Heart.add

    def add(self: Heart, run: Run) -> None:
        real(self, run)
        self.expected[run.ask.nonce] = None

    return [(Heart, "add", add)]


@mutant("token-kept-at-a-takeover", check="I4")
def _token_kept_at_a_takeover() -> Sequence[Patch]:
    """Who takes a run over has the token of the owner before: in logs, and for whoever compares them, both are one."""
    real = model._take_over

    def take_over(record: Record, ask: Ask, now: float) -> Record:
        return replace(real(record, ask, now), token=record.token)

    return [(model, "_take_over", take_over)]


@mutant("tombstone-keeps-its-body", check="R19")
def _tombstone_keeps_its_body() -> Sequence[Patch]:
    """A purge leaves the result of a used key where it was."""
    return [(model, "bury", lambda record: replace(record, expires=0.0))]
