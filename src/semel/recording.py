"""The end of a run reaches the store: fenced by its nonce, repeatable, on a path that the caller cannot cancel."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, Final

import msgspec

from semel import forks, steps
from semel.calls import name_of
from semel.debts import Debt, Debts
from semel.errors import LeaseLost, NotRecorded, StoreUnavailable
from semel.heart import Heart
from semel.hooks import Emit, Unrecorded
from semel.model import Answer, Kind, Policy, Settle
from semel.points import reach
from semel.posting import Poster
from semel.run import Run
from semel.runtime import Runtime, in_spite_of
from semel.shrinking import refuses_the_value
from semel.store import Store
from semel.turns import quiet

__all__ = ["Recorder", "done_of"]

_DONE, _RELEASED, _OK = Kind.DONE, Kind.RELEASED, Answer.OK  # asked for once: see `semel.flow`
_LEFT: Final = 2 / 3  # of a lease, when its renewal is due
# What happens to an end that the store has not taken in time.
_WRITTEN: Final = "the write goes on in the background. Do not run the effect again"
_FREED: Final = "the write goes on in the background: call again when it has freed the key"
_ABANDONED: Final = (
    "the face was closed meanwhile, so nobody writes it any more: when the lease is over, the key is free or unknown, as "
    "on_unknown says. Look the effect up before you call again, and close a face after its calls"
)


class Recorder:
    """Writes outcomes. A failed write after the effect is NotRecorded and goes on in the background, never a release."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        heart: Heart,
        debts: Debts,
        *,
        settle_timeout: float,
        timeout: float,
        emit: Emit | None,
        poster: Poster | None,
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._heart = heart
        self._debts = debts
        self._settle_timeout = settle_timeout
        # One answer of the store may take longer than the caller waits for all of them (R16). 0 is one offer and its answer, which
        # takes up to `timeout`: a caller who did not wait for it at all would be told NotRecorded by every healthy store.
        self._hurried = 0 < settle_timeout < timeout
        self._slack = 1.5 * timeout  # the first answer comes within `timeout`, or never
        self._emit = emit
        self._poster = poster

    async def record(self, run: Run, end: Settle, value: Any) -> None:
        """Store the end of a run. Raises LeaseLost or NotRecorded, never leaves it undecided in silence.

        A key is not freed under a step of its run: then it is stored when that has ended, and nobody waits for it (R4).
        """
        if run.epoch != forks.epoch:
            run.check_process()
        held: Debt | None = None
        if end.kind is not _DONE:
            if run.busy and end.kind is not Kind.FAILED:
                run.leave()
                self._runtime.background(self._record_when_quiet(run, end, _left_out(run, end)))
                return
            end = self._debts.whole(run, end)
        asked = self._runtime.now()
        over = run.due + run.ask.lease * _LEFT  # counted from the last renewal that was answered
        if (run.lease_at_risk or asked + self._slack >= over) and end.kind is not _RELEASED:
            held = self._debts.hold(run, end)  # who wants the key meanwhile must not find it free (R16)
        until = asked + self._settle_timeout
        answer: Answer | Exception | None
        try:
            run.settling = True  # from here on it is stored, whoever is interrupted
            reach("settle.sent")
            post = self._poster
            if self._hurried:
                answer = None
            elif post is None or (posted := post.settle(end, asked)) is None:
                answer = (await self._store.settle((end,)))[0]
            else:
                try:
                    reply = await posted
                except Exception as trouble:  # noqa: BLE001 - the store knows what to do about it
                    reply = trouble
                answer = post.settled(end, reply, asked) or await post.resettle(end, reply, asked)
            if answer is _OK:
                self._taken(run, end, held)
        except Exception as error:  # noqa: BLE001 - whatever the store's trouble is, the effect has happened
            answer = error
        except BaseException as error:
            # Cancelled in the middle of the write: it is repeatable, so write it again where nothing can cancel it.
            posted = None  # a wait that was struck ends here, and not after that
            await self._rescue(run, end, value, until, error)
            raise
        if answer is not _OK:
            await self._runtime.protect(self._persist(run, end, value, answer, until, held))
        reach("settle.stored")

    def _taken(self, run: Run, end: Settle, held: Debt | None) -> None:
        self._heart.remove(run)
        if self._debts.strays:
            self._debts.ended(run.ask, end)
        if held is not None:
            self._debts.strike_out(held)

    async def _rescue(self, run: Run, end: Settle, value: Any, until: float, error: BaseException) -> None:
        try:
            persisting = self._runtime.protect(self._persist(run, end, value, None, until))
            await in_spite_of(error, self._runtime, persisting)
        except (LeaseLost, NotRecorded):
            raise
        except BaseException:
            # Struck, perhaps before it began; once more is no harm.
            self._debts.owe(self._debts.hold(run, end))
            raise

    async def _record_when_quiet(self, run: Run, end: Settle, left_out: AbstractSet[str]) -> None:
        """With what its last steps have left: a ref, and themselves among the steps that the end brings along."""
        await quiet(run, self._runtime)
        known = None if end.steps is None else run.all_steps(left_out)
        with suppress(NotRecorded, LeaseLost):  # hooks are told; whoever ended the run has gone
            await self.record(run, msgspec.structs.replace(end, ref=run.ref, steps=known), None)

    async def _persist(
        self,
        run: Run,
        end: Settle,
        value: Any,
        answer: Answer | Exception | None,
        until: float,
        held: Debt | None = None,
    ) -> None:
        """Offer the outcome until the store has decided on it, or `settle_timeout` is over."""
        pause = 0.02
        said: Exception = StoreUnavailable("the store did not answer in time")
        debt = held or self._debts.hold(run, end)
        try:
            while True:
                if answer is None:
                    answer = await self._offered(debt.end, until)
                if await self._debts.decided(debt, answer):
                    return
                if isinstance(answer, Answer):
                    said = StoreUnavailable("the record was gone; it was claimed again")
                elif answer is not None:
                    if refuses_the_value(answer) and type(answer) is type(said):
                        debt.shrink()  # too big for a packet, say; a signal's error comes but once
                    said = answer  # and silence after it tells nothing more
                if self._runtime.now() >= until:
                    goes_on = self._debts.owe(debt)
                    raise self._not_recorded(run, debt.end, value, said, goes_on=goes_on)
                await self._runtime.sleep(min(pause, max(0.0, until - self._runtime.now())))
                pause = min(pause * 2, 0.5)
                answer = None
        except (LeaseLost, NotRecorded):
            raise
        except BaseException:
            # A signal's handler raised: a thread cannot be protected from it, so it is offered in the background from here on.
            self._debts.owe(debt)
            raise

    async def _offered(self, end: Settle, until: float) -> Answer | Exception | None:
        """One more offer. Its answer is waited for until then and no longer, None by then: the store may take its own time."""
        answers: list[Answer | Exception] = []
        heard = self._runtime.parker()

        async def offer() -> None:
            try:
                answers.append(await self._debts.offer(end))
            finally:
                heard.wake()

        self._runtime.background(offer())
        await heard.park(max(0.0, until - self._runtime.now()))
        return answers[0] if answers else None

    def _not_recorded(
        self, run: Run, end: Settle, value: Any, error: Exception, *, goes_on: bool
    ) -> NotRecorded:
        if self._emit is not None:
            self._emit(Unrecorded(run.scope, run.attempt, error))
        what_next = _ABANDONED if not goes_on else _FREED if end.kind is Kind.RELEASED else _WRITTEN
        problem = NotRecorded(
            f"{name_of(run.call)} ended, but the store has not taken its outcome within {self._settle_timeout:g} s "
            f"({error}); {what_next}",
            value=value,
        )
        problem.__cause__ = error
        return problem


def _left_out(run: Run, end: Settle) -> AbstractSet[str]:
    """Names of steps that the end does not bring along, where it brings any."""
    return set() if end.steps is None else run.steps.keys() - steps.decode(end.steps).keys()


def done_of(run: Run, data: bytes, marker: str, policy: Policy | None = None) -> Settle:
    """The end of a run whose effect happened."""
    options, ask = run.call.options, run.ask
    summary = run.summary() if run.has_steps else None
    return Settle(
        ask.scope, ask.nonce, _DONE, options.retention, options.tombstone,
        data, marker, run.ref, None, 0.0, policy, summary,
    )  # fmt: skip
