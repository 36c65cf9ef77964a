"""The end of a run reaches the store: fenced by its nonce, repeatable, on a path that the caller cannot cancel."""

from __future__ import annotations

from typing import Any

import msgspec

from semel.calls import name_of
from semel.errors import LeaseLost, NotRecorded, StoreUnavailable
from semel.heart import Heart
from semel.hooks import Emit, LeaseGone, Unrecorded
from semel.model import Answer, Ask, Kind, Settle, Won
from semel.points import reach
from semel.run import Run
from semel.runtime import Runtime
from semel.store import Store

__all__ = ["TOO_LARGE", "Recorder"]

TOO_LARGE = "too large"


class Recorder:
    """Writes outcomes. A failed write after the effect is NotRecorded and goes on in the background, never a release."""

    def __init__(
        self, store: Store, runtime: Runtime, heart: Heart, *, settle_timeout: float, emit: Emit | None
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._heart = heart
        self._settle_timeout = settle_timeout
        self._emit = emit

    async def record(self, run: Run, end: Settle, value: Any) -> None:
        """Store the end of a run. Raises LeaseLost or NotRecorded, never leaves it undecided in silence."""
        reach("settle.sent")
        answer: Answer | Exception
        try:
            answer = (await self._store.settle((end,)))[0]
        except StoreUnavailable as error:
            answer = error
        except BaseException:
            # Cancelled in the middle of the write: it is repeatable, so write it again where nothing can cancel it.
            await self._runtime.protect(self._persist(run, end, value, None))
            raise
        if answer is Answer.OK:
            self._heart.remove(run)
        else:
            await self._runtime.protect(self._persist(run, end, value, answer))
        reach("settle.stored")

    async def _persist(self, run: Run, end: Settle, value: Any, answer: Answer | Exception | None) -> None:
        until = self._runtime.now() + self._settle_timeout
        pause = 0.02
        while True:
            if answer is None:
                answer = await self._try_settle(end)
            if isinstance(answer, Answer):
                if await self._accepted(run, answer):
                    self._heart.remove(run)
                    return
            elif self._runtime.now() >= until:
                self._runtime.background(self._keep_trying(run, end))
                raise self._not_recorded(run, value, answer)
            elif not isinstance(answer, StoreUnavailable) and end.result:
                # The store refuses this very result (too big for a packet, say): keep at least the fact.
                end = msgspec.structs.replace(end, result=b"", marker=TOO_LARGE)
            else:
                await self._runtime.sleep(min(pause, max(0.0, until - self._runtime.now())))
                pause = min(pause * 2, 0.5)
            answer = None

    async def _accepted(self, run: Run, answer: Answer) -> bool:
        """Whether the settle is in. A vanished record is claimed again with the same nonce and settled anew."""
        if answer is Answer.OK:
            return True
        if answer is Answer.GONE and await self._reclaim(run):
            return False
        run.lease_lost = True
        self._heart.remove(run)
        if self._emit is not None:
            self._emit(LeaseGone(run.scope, run.attempt))
        raise LeaseLost(
            f"{name_of(run.call)} was taken over by another owner while attempt {run.attempt} ran; its result was not "
            "accepted. Read the key to see the outcome that counts"
        )

    async def _reclaim(self, run: Run) -> bool:
        try:
            verdict = (await self._store.claim((run.ask,)))[0]
        except StoreUnavailable:
            return True  # no answer is no refusal: the settle is tried again
        return isinstance(verdict, Won | StoreUnavailable)

    async def _try_settle(self, end: Settle) -> Answer | Exception:
        try:
            return (await self._store.settle((end,)))[0]
        except StoreUnavailable as error:
            return error

    def _not_recorded(self, run: Run, value: Any, error: Exception) -> NotRecorded:
        if self._emit is not None:
            self._emit(Unrecorded(run.scope, run.attempt, error))
        problem = NotRecorded(
            f"{name_of(run.call)} ended, but the store has not taken its outcome within {self._settle_timeout:g} s "
            f"({error}); the write goes on in the background. Do not run the effect again",
            value=value,
        )
        problem.__cause__ = error
        return problem

    async def _keep_trying(self, run: Run, end: Settle) -> None:
        """While the process lives: the lease is renewed and the outcome offered, until the store takes it."""
        pause = 0.5
        while True:
            answer = await self._try_settle(end)
            if isinstance(answer, Answer):
                try:
                    if await self._accepted(run, answer):
                        break
                except LeaseLost:
                    break
            await self._runtime.sleep(pause)
            pause = min(pause * 1.5, 5.0)
        self._heart.remove(run)

    async def abandon(self, ask: Ask) -> None:
        """Release a claim whose answer was lost, as long as it could still be holding the key."""
        until = self._runtime.now() + ask.lease
        end = Settle(ask.scope, ask.nonce, Kind.RELEASED, ask.retention)
        pause = 0.02
        while self._runtime.now() < until:
            answer = await self._try_settle(end)
            # GONE may also mean that the claim is still on its way: look again until its lease would be over.
            if answer is Answer.OK or answer is Answer.LOST:
                return
            await self._runtime.sleep(min(pause, max(0.0, until - self._runtime.now())))
            pause *= 2
