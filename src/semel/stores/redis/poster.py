# ruff: noqa: SLF001 - the other half of RedisStore
"""The quick way to Redis: a claim or settle is packed and queued by plain calls on this loop's own connection.

See `semel.posting`. What does not end in a plain reply (no connection yet, a lost reply, a moved slot, a long record) goes on
where `RedisStore` takes its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.model import Answer, Ask, Settle, Verdict
from semel.posting import Brief
from semel.stores.posted import Posted
from semel.stores.redis.errors import NotSent, Overdue, ServerError
from semel.stores.redis.record import LARGE_SIZE, Large, answer, short_verdict, verdict

if TYPE_CHECKING:
    from semel.stores.redis.loops import Home, LoopLink
    from semel.stores.redis.store import RedisStore

__all__ = ["RedisPoster"]


class RedisPoster:
    """See `Poster`. Belongs to one event loop, as its connections do."""

    __slots__ = ("_claim_command", "_home", "_link", "_post", "_settle_command", "_store")

    def __init__(self, store: RedisStore, link: LoopLink) -> None:
        self._store = store
        self._link = link
        self._post = link.post_from
        self._claim_command, self._settle_command = store.claim_command, store.settle_command
        self._home: Home | None = None

    def _at_home(self) -> Home | None:
        """This loop's connections, once the store has been looked at and they were made."""
        if self._store._checked:
            self._home = self._link.home()
        return self._home

    def claim(self, ask: Ask, now: float) -> Posted | None:
        home = self._home
        if (home is None or home.closed) and (home := self._at_home()) is None:
            return None
        route, command = self._claim_command(ask)
        return self._post(home, now, route, command)

    def claimed(self, ask: Ask, reply: Any, *, whole: bool = True) -> Verdict | Brief | None:
        if reply.__class__ is not bytes:
            return None
        found = verdict(ask, reply) if whole else short_verdict(ask, reply)
        return None if found.__class__ is Large else found  # type: ignore[return-value]  # mypy does not narrow by __class__

    async def reclaim(self, ask: Ask, reply: Any, asked: float) -> Verdict:
        _raise_unknown(reply)
        return await self._store.claim_late(ask, reply, self._link.spent(asked))

    def unclaimed(self, ask: Ask) -> None:
        """The connection keeps the slot and throws the reply away."""

    def settle(self, end: Settle, now: float) -> Posted | None:
        home = self._home
        if (home is None or home.closed) and (home := self._at_home()) is None:
            return None
        if end.actor or len(end.result) > LARGE_SIZE:
            return None
        route, command = self._settle_command(end)
        return self._post(home, now, route, command)

    def settled(self, end: Settle, reply: Any, asked: float) -> Answer | None:
        del asked
        if reply.__class__ is not bytes:
            return None
        said = answer(end.scope, end.new_nonce or end.nonce, reply)
        self._store._watchers.wake(end.scope.hash)
        return said

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        _raise_unknown(reply)
        return await self._store.settle_late(end, reply, self._link.spent(asked))


def _raise_unknown(reply: Any) -> None:
    """Trouble of the connection is known and cured; any other error is a mistake of ours, and must be seen."""
    if isinstance(reply, Exception) and not isinstance(reply, NotSent | Overdue | ServerError):
        raise reply
