"""A simulated store with a quick way (`semel.posting`): the same messages, sent and read by plain calls, as Redis does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from semel.errors import StoreUnavailable
from semel.layers import Retry
from semel.losses import Losses
from semel.model import Answer, Ask, Replay, Settle, State, Verdict
from semel.posting import Brief, Poster
from semel.store import Capabilities

if TYPE_CHECKING:
    from semel.testing.simulation.stores import Link

__all__ = ["QuickLink"]


class QuickLink(Retry):
    """A link that sends again by itself what was lost, and takes posts."""

    def __init__(self, link: Link, now: Callable[[], float], timeout: float) -> None:
        super().__init__(link, now, timeout)
        self._link = link

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self._link.capabilities, resends=True)

    def poster(self) -> Poster:
        return _Poster(self._link, self._now, self._patience, self.losses)


class _Poster:
    """See `Poster`. What ended in trouble is sent once more, as long as `Retry` would."""

    def __init__(self, link: Link, now: Callable[[], float], patience: float, losses: Losses) -> None:
        self._link = link
        self._now = now
        self._patience = patience
        self._losses = losses

    def claim(self, ask: Ask, now: float) -> Awaitable[Any] | None:
        del now
        self._link.count_post("claim")
        return self._link.claim((ask,))

    def claimed(self, ask: Ask, reply: Any, *, whole: bool = True) -> Verdict | Brief | None:
        del ask
        if isinstance(reply, Exception) or isinstance(reply[0], Exception):
            return None
        verdict: Verdict = reply[0]
        if whole or not isinstance(verdict, Replay):
            return verdict
        record = verdict.record
        plain = record.state is State.DONE and not (
            record.ref or record.marker or record.error or record.steps or record.resolved
        )
        return Brief(record.attempts, record.expires, record.result, 0) if plain else verdict

    async def reclaim(self, ask: Ask, reply: Any, asked: float) -> Verdict:
        self._give_up_on(reply, asked)
        self._losses.tell()
        verdict = (await self._link.claim((ask,)))[0]
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def _give_up_on(self, reply: Any, asked: float) -> None:
        error = reply if isinstance(reply, Exception) else reply[0]
        if not isinstance(error, StoreUnavailable) or self._now() - asked > self._patience:
            raise error

    def unclaimed(self, ask: Ask) -> None:
        """The reply is thrown away."""

    def settle(self, end: Settle, now: float) -> Awaitable[Any] | None:
        del now
        self._link.count_post("settle")
        return self._link.settle((end,))

    def settled(self, end: Settle, reply: Any, asked: float) -> Answer | None:
        del end, asked
        if isinstance(reply, Exception) or isinstance(reply[0], Exception):
            return None
        answer: Answer = reply[0]
        return answer

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        self._give_up_on(reply, asked)
        answer = (await self._link.settle((end,)))[0]
        if isinstance(answer, Exception):
            raise answer
        return answer
