"""One claim reaches the store and its answer comes back, or it is left to the debts: nobody may wait for what nobody runs."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from semel import steps
from semel.debts import Debts
from semel.door import Door
from semel.heart import Heart
from semel.losses import is_unsent, losses_of
from semel.model import Answer, Ask, Kind, Policy, Replay, Settle, Unknown, Verdict, Won
from semel.points import reach
from semel.posting import Brief, Poster
from semel.runtime import Runtime
from semel.store import Store

__all__ = ["Asker"]


class Asker:
    """Asks the store, on its quick way if it has one (see `semel.posting`)."""

    def __init__(
        self, store: Store, runtime: Runtime, heart: Heart, debts: Debts, poster: Poster | None, door: Door
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._expected = heart.expected
        self._door = door
        self._debts = debts
        self._unwritten = debts.unwritten
        self._poster = poster
        self._losses = losses_of(store)

    def claim(self, ask: Ask) -> Coroutine[Any, Any, Verdict]:
        """The store's verdict. Raises what the store raises."""
        return self.brief(ask, whole=True)  # type: ignore[return-value]  # whole, it is never brief

    async def brief(self, ask: Ask, *, whole: bool = False) -> Verdict | Brief:
        """As `claim`, but of a plain replay only what its caller needs, unless the `whole` record is wanted."""
        if self._unwritten and (busy := await self._debts.write(ask.scope)) is not None:
            return busy
        reach("claim.sent")
        nonce, expected = ask.nonce, self._expected
        expected[nonce] = None  # before the look at the door: whoever closes it waits for this one
        if self._door.closed:
            del expected[nonce]
            self._door.check()
        post, posted, mark = self._poster, None, self._losses.mark
        verdict: Verdict | Brief | Exception | None
        try:
            if post is None or (posted := post.claim(ask, asked := self._runtime.now())) is None:
                verdict = (await self._store.claim((ask,)))[0]
                if isinstance(verdict, Exception):
                    raise verdict
            else:
                try:
                    reply: Any = await posted
                except Exception as trouble:  # noqa: BLE001 - the store knows what to do about its own
                    reply = trouble
                verdict = post.claimed(ask, reply, whole=whole)
                if verdict is None:
                    verdict = await post.reclaim(ask, reply, asked)
            if type(verdict) is not Won:  # else `Heart.add` does it
                expected.pop(nonce, None)
            elif verdict.record.steps and not steps.are_readable(verdict.record.steps):
                verdict = await self._give_back(ask, verdict)
            if self._losses.mark is not mark and not isinstance(verdict, Replay | Brief):
                self._debts.suspect(ask)
        except BaseException as error:
            if post is not None and posted is not None:
                posted = None  # a wait that was struck ends here, and not when the last one has let go of the error
                post.unclaimed(ask)
            self._give_up(ask, error, lost=self._losses.mark is not mark)
            raise
        return verdict

    def _give_up(self, ask: Ask, error: BaseException, *, lost: bool) -> None:
        """No answer: the store may have granted it. Nobody will run it, so nobody may wait for it."""
        if lost:
            self._debts.suspect(ask)
        elif is_unsent(error) and ask.nonce not in self._debts.strays:
            # A login that was refused has claimed nothing, and a release would be one more of them.
            self._expected.pop(ask.nonce, None)
            return
        self._debts.abandon(ask)

    async def _give_back(self, ask: Ask, won: Won) -> Unknown:
        """Granted, but its steps cannot be read here: known now, before an effect that could not be recorded (R15).

        Whoever has the version, or the key, that wrote them goes on with it.
        """
        end = Settle(ask.scope, ask.nonce, Kind.RELEASED, ask.retention)
        released = False
        try:
            released = await self._debts.offer(end) is Answer.OK
        finally:
            self._expected.pop(ask.nonce, None)
            if not released:
                self._debts.abandon(ask)
        self._debts.ended(ask, end)
        return Unknown(won.record, Policy.HOLD, unreadable=True)
