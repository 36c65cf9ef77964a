"""Writes that the store still owes an answer to: outcomes it did not take, claims whose answer was lost, copies of claims.

One ticker offers them again, in batches, for as long as the process lives (outcomes) or the claim could matter: its
lease, and under hold or probe as long as it could still arrive. A thread or task for each would turn an outage of the
store into one of ours.

A result that the store refuses, or that is too large to arrive in time, is not offered for ever: without it the outcome
is a done marker, as beyond `max_result`, and nobody runs the effect again (R23).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from weakref import WeakSet

import msgspec

from semel.calls import name_of
from semel.errors import LeaseLost, StoreUnavailable
from semel.heart import Heart
from semel.hooks import Emit, LeaseGone
from semel.keys import Scope
from semel.losses import is_unsent, losses_of
from semel.model import Answer, Ask, Busy, Expired, Kind, Policy, Renewal, Replay, Settle, Verdict, Won
from semel.records import GIVEN_BACK
from semel.run import Run
from semel.runtime import Parker, Runtime
from semel.shrinking import LARGE, refuses_the_value, shrunk
from semel.store import Store

__all__ = ["Debt", "Debts"]

_BATCH = 128
_MOST_CLAIMS = 10_000  # past that, lost claims and copies are left to their leases
_FIRST, _LONGEST = 0.02, 1.0
_STRAGGLER = (
    30.0  # how late a claim may still arrive: under hold or probe its grant would be unknown for ever
)
_TRIES = 3  # of one outcome for a call that wants its key: taken, or claimed again first, or told without a result it refuses
_STRIKES = 3  # so often a large result may fail while the store answers its renewals: then its size is why


class Debt(msgspec.Struct):
    end: Settle
    run: Run | None
    until: float
    lasting: bool = False
    """More than one copy may be on its way: the release of one is not the end."""
    due: float = 0.0
    """When it is offered next; `pause` after `pause`, each longer than the one before."""
    pause: float = _FIRST
    strikes: int = 0
    """How often in a row it was too large to arrive."""
    struck: float = -math.inf
    """When it was last found to be: offers that were under way by then say the same once more."""
    paid: bool = False
    """The store has decided on it: answers to other copies of it tell nothing."""
    lost: LeaseLost | None = None
    """What it was paid with, if that was a refusal."""
    offered: bool = False
    """By a call that wants its key: the others need not ask as well."""

    @property
    def large(self) -> bool:
        return len(self.end.result or self.end.steps or b"") > LARGE  # of what `shrink` would leave out

    def put_off(self, now: float, answer: Answer | Exception) -> None:
        pause = self.pause
        self.pause = min(pause * 2, _LONGEST)
        self.due = min(now + self.pause, self.until)
        if self.run is None and isinstance(answer, Exception) and is_unsent(answer):
            # Each offer is a login that is refused, and too many of them lock an account: ever longer pauses, that end with whole
            # seconds, so that many claims share one.
            self.pause = max(1.0, pause * 2)
            self.due = min(math.ceil(now + self.pause), self.until)

    def shrink(self) -> None:
        """Offer less, and soon."""
        self.end, self.pause = shrunk(self.end), _FIRST


class Debts:
    def __init__(
        self, store: Store, runtime: Runtime, heart: Heart, emit: Emit | None, timeout: float
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._heart = heart
        self._emit = emit
        self._timeout = timeout
        self._losses = losses_of(store)
        self.bare: WeakSet[Run] = WeakSet()
        """Runs whose records do not have the steps and ids that their owners know: they were lost and claimed again, or a step
        was made whose note had no answer."""
        self._owed: dict[bytes, Debt] = {}
        self.unwritten: dict[bytes, list[Debt]] = {}
        """Outcomes that the store did not take at once, by the hash of their scope: nobody here claims such a key (`write`).
        Of several of one key all owners but one have been overtaken, and the store knows which; the last attempt comes first."""
        self._lock = threading.RLock()  # of unwritten; a signal's handler may come in between
        self.strays: dict[bytes, None] = {}
        """Nonces of calls under way of which a copy may still reach the store, the oldest first (see `semel.losses`)."""
        self._until = float("inf")
        self._closed = False
        self._ticker = runtime.ticker(self._pay)

    @property
    def owes(self) -> bool:
        """Whether something is still to be offered; may be asked from any thread."""
        return bool(self._owed)

    def hold(self, run: Run, end: Settle) -> Debt:
        """An outcome that the store did not take at once. Whoever has it offers it, and so does whoever wants the key."""
        debt, key = Debt(end, run, math.inf), run.scope.hash
        with self._lock:
            others = (other for other in self.unwritten.get(key, ()) if other.end.nonce != end.nonce)
            self.unwritten[key] = sorted((debt, *others), key=_attempt, reverse=True)
        return debt

    def owe(self, debt: Debt) -> bool:
        """An outcome that the store did not take in time: it is offered until the store decides on it.

        False after `close`: then nobody is left to offer it.
        """
        if self._closed:
            return False
        if not debt.paid:
            self._add(debt)
        return True

    async def write(self, scope: Scope) -> Busy | None:
        """Before a claim: outcomes of this key that are not written yet are offered now. None: the store has decided on them.

        A claim would take the key over, were the lease over, and run again what has happened (R16). So without a decision the key
        is busy as long as the store renews its lease, and StoreUnavailable is raised otherwise.
        """
        while not self._closed:
            debt = next((debt for debt in self.unwritten.get(scope.hash, ()) if not debt.paid), None)
            if debt is None or debt.run is None:
                return None
            if debt.offered:
                return Busy(debt.run.ask.lease, debt.run.attempt)
            debt.offered = True
            try:
                busy = await self._write(debt, debt.run)
            finally:
                debt.offered = False
            if busy is not None:
                return busy
        return None

    async def _write(self, debt: Debt, run: Run) -> Busy | None:
        for left in reversed(range(_TRIES)):
            start, end = self._runtime.now(), debt.end
            (answer,) = await self._pay_batch([debt])
            if debt.paid or self._closed:
                break
            problem = answer if isinstance(answer, Exception) else None
            if left and (problem is None or debt.end is not end):
                continue
            silent = self._runtime.now() - start >= self._timeout * 0.9
            if not silent and await self._renewed(run) is Answer.OK:
                return Busy(run.ask.lease, run.attempt)
            said = "the record was gone" if problem is None else str(problem)
            raise StoreUnavailable(
                f"{name_of(run.call)} has ended here, and the store has not taken its outcome yet ({said}): nothing is run "
                "before that is written. Call again"
            ) from problem
        return None

    def abandon(self, ask: Ask) -> None:
        """A claim whose answer was lost: nobody will run it, so it is released, if it was granted at all.

        The marker says so: if it was a take-over, the attempt before it may have had its effect, and no other request may have
        the key (R14).
        """
        self._heart.expected.pop(ask.nonce, None)
        if len(self._owed) < _MOST_CLAIMS:
            end = Settle(ask.scope, ask.nonce, Kind.RELEASED, ask.retention, marker=GIVEN_BACK)
            patience = ask.lease if ask.policy is Policy.RETRY else max(ask.lease, _STRAGGLER)
            lasting = ask.nonce in self.strays
            self._add(Debt(end, None, self._runtime.now() + patience, lasting))
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

    def lost(self, run: Run) -> None:
        """Another owner has the key. A copy of this run's claim may come when he has freed it."""
        self._heart.remove(run)
        if run.ask.nonce in self.strays:
            self.abandon(run.ask)

    def _add(self, debt: Debt) -> None:
        debt.due = self._runtime.now() + debt.pause
        self._owed[debt.end.nonce] = debt
        self._ticker.at(debt.due)

    async def offer(self, end: Settle) -> Answer | Exception:
        return (await self._offer_all([end]))[0]

    async def _offer_all(self, ends: Sequence[Settle]) -> Sequence[Answer | Exception]:
        try:
            return await self._store.settle(ends)
        except Exception as error:  # noqa: BLE001 - no trouble of the store may lose an outcome
            if len(ends) == 1 or not refuses_the_value(error):
                return [error] * len(ends)
        return [await self.offer(end) for end in ends]  # it is about one of them, and does not say which

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
        self.lost(run)
        if self._emit is not None:
            self._emit(LeaseGone(run.scope, run.attempt))
        raise LeaseLost(
            f"{name_of(run.call)} was taken over by another owner while attempt {run.attempt} ran; its result was not "
            "accepted. Read the key to see the outcome that counts"
        )

    async def reclaim(self, run: Run) -> bool:
        """Claim a vanished record again, with the same nonce; whether it may be ours.

        Who was told that he lost it claims nothing: what vanished was another owner's, and a grant would have no owner (R17).
        This claim may leave a copy behind as any other one: it is given up with the run.
        """
        if run.lease_lost:
            return False
        mark = self._losses.mark
        verdict: Verdict | Exception
        try:
            verdict = (await self._store.claim((run.ask,)))[0]
        except Exception as error:  # noqa: BLE001 - whatever the trouble is
            verdict = StoreUnavailable(str(error))  # no answer is no refusal: the settle is tried again
        if isinstance(verdict, StoreUnavailable) or self._losses.mark is not mark:
            self.suspect(run.ask)
        may_be_ours = isinstance(verdict, Won | StoreUnavailable)
        if may_be_ours and run.has_steps:
            self.bare.add(run)
        return may_be_ours

    def whole(self, run: Run, end: Settle) -> Settle:
        """The same end, with the steps that the record does not have: they outlive a release (R26)."""
        if end.steps is not None or run not in self.bare:
            return end
        return msgspec.structs.replace(end, steps=run.all_steps())

    async def _pay(self, *, at_once: bool = False) -> float | None:
        now = self._runtime.now()
        debts = [debt for debt in list(self._owed.values()) if at_once or debt.due <= now]
        for place, batch in enumerate(_batches(debts)):
            if place and self._runtime.now() >= self._until:
                break
            await self._pay_batch(batch)
        return min((debt.due for debt in list(self._owed.values())), default=None)

    async def _pay_batch(self, batch: Sequence[Debt]) -> Sequence[Answer | Exception]:
        start = self._runtime.now()
        answers = await self._offer_all([debt.end for debt in batch])
        now = self._runtime.now()
        for debt, answer in zip(batch, answers, strict=True):
            if debt.paid:
                continue  # another copy was quicker, and its answer counts: freed since, the key may be anybody's
            if isinstance(answer, Answer):
                paid = await self._is_paid(debt, answer)
            else:
                paid = False
                await self._weigh(debt, answer, start)
            if not paid and now < debt.until:  # the last offer is made when time is over, not before
                debt.put_off(now, answer)
            else:
                self.strike_out(debt)
        return answers

    async def decided(self, debt: Debt, answer: Answer | Exception | None) -> bool:
        """Whether the store has decided on it: by this answer, or by one to whoever wanted the key. Raises LeaseLost if it refused."""
        if not debt.paid and isinstance(answer, Answer) and await self._is_paid(debt, answer):
            self.strike_out(debt)
        if debt.lost is not None:
            raise debt.lost
        return debt.paid

    def strike_out(self, debt: Debt) -> None:
        """It is offered no more."""
        debt.paid = True
        if self._owed.get(debt.end.nonce) is debt:  # else its run has left another: copies of its claim
            self._owed.pop(debt.end.nonce, None)
        key = debt.end.scope.hash
        if debt.run is None or key not in self.unwritten:
            return
        with self._lock:
            others = [other for other in self.unwritten.get(key, ()) if other is not debt]
            if others:
                self.unwritten[key] = others
            else:
                self.unwritten.pop(key, None)

    async def _weigh(self, debt: Debt, problem: Exception, since: float) -> None:
        """It was not taken: tell less of it, if that is because of what it holds.

        Nobody says of a result that it was too large to arrive in time. But where the store answers something small of the
        same run at the same time, again and again, nothing else is left; and whoever closes has no more time to find out.
        A store that says at once that it has no room will have some again: that result is not given up.
        """
        silent = self._runtime.now() - since >= self._timeout * 0.9
        if refuses_the_value(problem) and (debt.end.result or debt.end.steps or debt.end.ref):
            debt.shrink()
        elif debt.run is not None and debt.large and silent and await self._renewed(debt.run) is not None:
            if since >= debt.struck:
                debt.strikes, debt.struck = debt.strikes + 1, self._runtime.now()
            if debt.strikes >= _STRIKES or self._until < float("inf"):
                debt.shrink()
        else:
            debt.strikes = 0

    async def _renewed(self, run: Run) -> Answer | None:
        """What the store says to a renewal of this run now, if it answers."""
        renewal = Renewal(run.scope, run.ask.nonce, run.ask.lease, run.call.options.retention)
        try:
            answer = (await self._store.renew((renewal,)))[0]
        except Exception:  # noqa: BLE001 - whatever its trouble is, it is none of the outcome's
            return None
        return answer if isinstance(answer, Answer) else None

    async def pay_now(self) -> int:
        """Offer everything at once, whenever its next offer is due; how many outcomes the store has taken."""
        before = {nonce for nonce, debt in self._owed.items() if debt.run is not None}
        await self._pay(at_once=True)
        return len(before - self._owed.keys())

    async def _is_paid(self, debt: Debt, answer: Answer) -> bool:
        if debt.run is None:
            # GONE, or LOST to somebody who came and went, may mean that the claim is still on its way, and would be
            # granted to nobody when it arrives: only its own release is an end, or the time in which it could matter.
            return answer is Answer.OK and not debt.lasting
        try:
            paid = await self.accepted(debt.run, answer)
        except LeaseLost as lost:
            debt.lost = lost
            return True
        if paid:
            self.ended(debt.run.ask, debt.end)
        else:
            debt.end = self.whole(debt.run, debt.end)
        return paid

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


def _attempt(debt: Debt) -> int:
    return 0 if debt.run is None else debt.run.attempt


def _batches(debts: Sequence[Debt]) -> list[Sequence[Debt]]:
    """What is large goes last and alone: nothing small fails with it."""
    small = [debt for debt in debts if not debt.large]
    together = [small[start : start + _BATCH] for start in range(0, len(small), _BATCH)]
    return [*together, *([debt] for debt in debts if debt.large)]
