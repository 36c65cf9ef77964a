"""Heartbeats: one scheduler for all runs of an engine renews their leases in batches, every third of a lease."""

from __future__ import annotations

import logging
from typing import Final
from weakref import ref

from semel.calls import name_of
from semel.errors import StoreUnavailable
from semel.hooks import AtRisk, Emit, Failed, LeaseGone
from semel.model import Answer, Policy, Renewal
from semel.points import reach
from semel.run import Run
from semel.runtime import Runtime
from semel.store import Store

__all__ = ["Heart"]

_log = logging.getLogger("semel")
_BATCH = 128
_LOOK: Final = 10.0  # seconds: so often it looks whether any run is left, or a forgotten face would stay for a third of its lease


class Heart:
    """Keeps leases alive. A lease decides how soon a dead owner is replaced, never who may write: that is the nonce."""

    def __init__(self, store: Store, runtime: Runtime, emit: Emit | None) -> None:
        self._store = store
        self._runtime = runtime
        self._emit = emit
        # Weakly: a run that nobody holds any more (its caller was interrupted, its response never sent) has no one who
        # could settle it, and must not be kept alive for ever.
        self._runs: dict[bytes, ref[Run]] = {}
        self.expected: dict[bytes, None] = {}
        """Nonces of claims on their way: each may become a run, and whoever closes waits for it."""
        self._ticker = runtime.ticker(self._beat)

    def add(self, run: Run) -> None:
        ask = run.ask
        run.due = due = run.won_at + ask.lease / 3
        self._runs[ask.nonce] = run.weak
        self.expected.pop(ask.nonce, None)
        self._ticker.at(due if ask.lease <= 3 * _LOOK else run.won_at + _LOOK)

    def remove(self, run: Run) -> None:
        self._runs.pop(run.ask.nonce, None)

    def leave(self, run: Run, error: BaseException) -> None:
        """Nobody will record what its thread gives, and its caller has gone: said aloud, for nobody gets an error."""
        self.remove(run)
        if self._emit is not None:
            self._emit(Failed(run.scope, run.attempt, "lost", error))
        _log.warning(
            "the event loop of %s ended while attempt %d still ran in a thread: its outcome cannot be recorded, and when its lease is "
            "over the key is %s. Keep the loop until the thread has ended (`async with`, or `await once.aclose()`); what must not "
            'happen twice needs on_unknown="hold", a step or run.downstream_key(...)',
            name_of(run.call),
            run.attempt,
            "free, and is run again" if run.policy is Policy.RETRY else "unknown",
        )

    def give_up(self, nonce: bytes) -> bool:
        """From now on nobody waits for it. True: it was granted, or may have been, and its function was not reached."""
        if nonce in self.expected:
            del self.expected[nonce]
            return True
        known = self._runs.get(nonce)
        run = None if known is None else known()
        if run is None or run.started:
            return False
        self.remove(run)
        return True

    @property
    def busy(self) -> bool:
        return bool(self.expected or self._alive())

    @property
    def count(self) -> int:
        """How many runs are kept alive; may be asked from any thread."""
        return len(self._alive())

    def _alive(self) -> list[Run]:
        alive = []
        for nonce, known in tuple(self._runs.items()):
            run = known()
            if run is not None:
                alive.append(run)
            else:
                self._runs.pop(nonce, None)
        return alive

    def stop(self) -> None:
        self._ticker.stop()

    async def _beat(self) -> float | None:
        now = self._runtime.now()
        due = [run for run in self._alive() if run.due <= now]
        for start in range(0, len(due), _BATCH):
            await self._renew(due[start : start + _BATCH])
        next_due = min((run.due for run in self._alive()), default=None)
        return None if next_due is None else min(next_due, self._runtime.now() + _LOOK)

    async def _renew(self, runs: list[Run]) -> None:
        reach("renew.sent")
        answers: list[Answer | Exception]
        try:
            answers = await self._store.renew(
                [Renewal(run.scope, run.ask.nonce, run.ask.lease, run.call.options.retention) for run in runs]
            )
        except Exception as error:  # noqa: BLE001 - the heart must go on beating, whatever the store's trouble is
            answers = [error] * len(runs)
        for run, answer in zip(runs, answers, strict=True):
            if run.ask.nonce in self._runs:  # else it was settled meanwhile
                self._heard(run, answer)

    def _heard(self, run: Run, answer: Answer | Exception) -> None:
        lease = run.ask.lease
        if answer is Answer.OK:
            run.lease_at_risk = False
            run.due = self._runtime.now() + lease / 3
        elif answer is Answer.LOST:
            self._lose(run)
        else:
            # No answer, or no record (R17): not a takeover. Ask again soon; the settle will tell.
            run.lease_at_risk = True
            run.due = self._runtime.now() + min(lease / 6, 1.0)
            if self._emit is not None:
                error = answer if isinstance(answer, Exception) else StoreUnavailable("the record is gone")
                self._emit(AtRisk(run.scope, error))

    def _lose(self, run: Run) -> None:
        run.lease_lost = True
        self.remove(run)
        if self._emit is not None:
            self._emit(LeaseGone(run.scope, run.attempt))
        # Past the function there is nothing left to stop: the settle itself will learn of it.
        if run.call.options.on_lease_lost == "cancel" and not run.settling:
            run.interrupt.fire()
