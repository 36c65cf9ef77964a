"""Writes that the store still owes an answer to: outcomes it did not take, claims whose answer was lost, copies of claims.

One ticker offers them again, in batches, for as long as the process lives (outcomes) or the claim could matter: its
lease, and under hold or probe as long as it could still arrive. A thread or task for each would turn an outage of the
store into one of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from semel.calls import name_of
from semel.errors import LeaseLost, StoreUnavailable
from semel.heart import Heart
from semel.hooks import Emit, LeaseGone
from semel.model import Answer, Ask, Expired, Kind, Policy, Replay, Settle, Verdict, Won
from semel.run import Run
from semel.runtime import Parker, Runtime
from semel.store import Store

__all__ = ["Debts"]

_BATCH = 128
_MOST_CLAIMS = 10_000  # past that, lost claims and copies are left to their leases
_FIRST, _LONGEST = 0.02, 1.0
_STRAGGLER = (
    30.0  # how late a claim may still arrive: under hold or probe its grant would be unknown for ever
)


class _Debt(msgspec.Struct):
    end: Settle
    run: Run | None
    until: float
    lasting: bool = False
    """More than one copy may be on its way: the release of one is not the end."""
    due: float = 0.0
    """When it is offered next; `pause` after `pause`, each longer than the one before."""
    pause: float = _FIRST

    def put_off(self, now: float) -> None:
        self.pause = min(self.pause * 2, _LONGEST)
        self.due = min(now + self.pause, self.until)


class Debts:
    def __init__(self, store: Store, runtime: Runtime, heart: Heart, emit: Emit | None) -> None:
        self._store = store
        self._runtime = runtime
        self._heart = heart
        self._emit = emit
        self._owed: dict[bytes, _Debt] = {}
        self.strays: dict[bytes, None] = {}
        """Nonces of calls under way of which a copy may still reach the store, the oldest first (see `semel.losses`)."""
        self._until = float("inf")
        self._closed = False
        self._ticker = runtime.ticker(self._pay)

    def owe(self, run: Run, end: Settle) -> bool:
        """An outcome that the store did not take in time: it is offered until the store decides on it.

        False after `close`: then nobody is left to offer it.
        """
        if self._closed:
            return False
        self._add(_Debt(end, run, float("inf")))
        return True

    def abandon(self, ask: Ask) -> None:
        """A claim whose answer was lost: nobody will run it, so it is released, if it was granted at all."""
        if len(self._owed) < _MOST_CLAIMS:
            end = Settle(ask.scope, ask.nonce, Kind.RELEASED, ask.retention)
            patience = ask.lease if ask.policy is Policy.RETRY else max(ask.lease, _STRAGGLER)
            lasting = ask.nonce in self.strays
            self._add(_Debt(end, None, self._runtime.now() + patience, lasting))
        self.strays.pop(ask.nonce, None)

    def suspect(self, ask: Ask) -> None:
        """It was sent again: the copy whose answer was lost may arrive after whatever the store says to this one."""
        self.strays[ask.nonce] = None
        while len(self.strays) > _MOST_CLAIMS:
            self.strays.pop(next(iter(self.strays)), None)

    def leave(self, ask: Ask, verdict: Verdict) -> None:
        """A call ends without the key. A copy of its claim that arrives when the key is free would be granted to nobody.

        Not before the call ends: until then a copy that is granted is its own, and found by its next claim. An outcome
        refuses copies by itself.
        """
        if ask.nonce in self.strays:
            self.strays.pop(ask.nonce, None)
            if not isinstance(verdict, Replay | Expired):
                self.abandon(ask)

    def ended(self, ask: Ask, end: Settle) -> None:
        """A run is settled. Freed, its key may be had and freed by others before a copy of its claim arrives."""
        if ask.nonce in self.strays and end.kind is Kind.RELEASED:
            self.abandon(ask)
        self.strays.pop(ask.nonce, None)

    def _add(self, debt: _Debt) -> None:
        debt.due = self._runtime.now() + debt.pause
        self._owed[debt.end.nonce] = debt
        self._ticker.at(debt.due)

    async def offer(self, end: Settle) -> Answer | Exception:
        return (await self._offer_all([end]))[0]

    async def _offer_all(self, ends: Sequence[Settle]) -> Sequence[Answer | Exception]:
        try:
            return await self._store.settle(ends)
        except Exception as error:  # noqa: BLE001 - no trouble of the store may lose an outcome
            return [error] * len(ends)

    async def accepted(self, run: Run, answer: Answer) -> bool:
        """Whether the settle is in. A vanished record is claimed again with the same nonce; then False: settle anew."""
        if answer is Answer.OK:
            self._heart.remove(run)
            return True
        if answer is Answer.GONE:
            if await self.reclaim(run):
                return False
            try:
                record, _ = await self._store.peek(run.scope)
            except Exception:  # noqa: BLE001 - no answer is no refusal
                return False
            if record is not None and record.nonce == run.ask.nonce:
                # Buried: an earlier copy of this very settle was stored, and its retention is over already.
                self._heart.remove(run)
                return True
        run.lease_lost = True
        self._heart.remove(run)
        if self._emit is not None:
            self._emit(LeaseGone(run.scope, run.attempt))
        raise LeaseLost(
            f"{name_of(run.call)} was taken over by another owner while attempt {run.attempt} ran; its result was not "
            "accepted. Read the key to see the outcome that counts"
        )

    async def reclaim(self, run: Run) -> bool:
        """Claim a vanished record again, with the same nonce; whether it may be ours.

        Who was told that he lost it claims nothing: what vanished was another owner's, and a grant would have no owner (R17).
        """
        if run.lease_lost:
            return False
        try:
            verdict = (await self._store.claim((run.ask,)))[0]
        except Exception:  # noqa: BLE001 - whatever the trouble is
            return True  # no answer is no refusal: the settle is tried again
        return isinstance(verdict, Won | StoreUnavailable)

    async def _pay(self, *, at_once: bool = False) -> float | None:
        now = self._runtime.now()
        debts = [debt for debt in list(self._owed.values()) if at_once or debt.due <= now]
        for start in range(0, len(debts), _BATCH):
            if start and self._runtime.now() >= self._until:
                break
            batch = debts[start : start + _BATCH]
            answers = await self._offer_all([debt.end for debt in batch])
            now = self._runtime.now()
            for debt, answer in zip(batch, answers, strict=True):
                paid = isinstance(answer, Answer) and await self._is_paid(debt, answer)
                if paid or debt.until <= now:  # the last offer is made when time is over, not before
                    self._owed.pop(debt.end.nonce, None)
                else:
                    debt.put_off(now)
        return min((debt.due for debt in list(self._owed.values())), default=None)

    async def pay_now(self) -> int:
        """Offer everything at once, whenever its next offer is due; how many outcomes the store has taken."""
        before = {nonce for nonce, debt in self._owed.items() if debt.run is not None}
        await self._pay(at_once=True)
        return len(before - self._owed.keys())

    async def _is_paid(self, debt: _Debt, answer: Answer) -> bool:
        if debt.run is None:
            # GONE, or LOST to somebody who came and went, may mean that the claim is still on its way, and would be
            # granted to nobody when it arrives: only its own release is an end, or the time in which it could matter.
            return answer is Answer.OK and not debt.lasting
        try:
            return await self.accepted(debt.run, answer)
        except LeaseLost:
            return True

    async def close(self, timeout: float) -> None:
        """Offer outcomes for at most `timeout` seconds more, and lost claims once; then stop.

        A store that does not answer is not waited for: its answer is heard in the background, or nowhere.
        """
        self._until = self._runtime.now() + timeout
        if self._owed:
            ended = self._runtime.parker()
            self._runtime.background(self._last_offers(ended))
            await ended.park(timeout)
        else:
            self._ticker.stop()
        self._closed = True

    async def _last_offers(self, ended: Parker) -> None:
        try:
            self._ticker.stop()
            # One try for claims, too: under hold or probe one that nobody ran would stay unknown until a person looks.
            await self._pay(at_once=True)
            while (
                any(debt.run is not None for debt in list(self._owed.values()))
                and self._runtime.now() < self._until
            ):
                await self._runtime.sleep(_FIRST)
                await self._pay(at_once=True)
        finally:
            ended.wake()
