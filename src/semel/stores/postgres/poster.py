# ruff: noqa: SLF001 - the other half of PostgresStore
"""The quick way to PostgreSQL: one claim or settle, one statement on a warm link, with one coroutine between flow and driver.

See `semel.posting`. What the statement does not decide by itself, or what goes wrong with its link, goes on where
`PostgresStore` takes its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from semel import model
from semel.errors import CodecError
from semel.model import Answer, Ask, Settle, Verdict
from semel.posting import Brief
from semel.stores.postgres.errors import Locked, Trouble
from semel.stores.postgres.link import Row
from semel.stores.postgres.sql import brief_of, claim_words, new_words, settle_words

if TYPE_CHECKING:
    from semel.stores.postgres.store import PostgresStore

__all__ = ["PostgresPoster"]

_ONCE_MORE: Final = (Trouble, CodecError, ValueError)
"""What the long way may still make good, or tells in its own words."""


class PostgresPoster:
    """See `Poster`. Belongs to one event loop, as its links do."""

    __slots__ = ("_hunch", "_store", "_talk")

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._talk = store._talk
        self._hunch = store._hunch

    def claim(self, ask: Ask, now: float) -> Coroutine[Any, Any, Sequence[Row]] | None:
        del now
        try:
            if self._hunch.new and (new := new_words(ask, self._store._skew)) is not None:
                sent = self._talk.post(*new)
                return None if sent is None else self._hunch.follow(sent)
            words = claim_words(ask, self._store._skew)
        except (CodecError, ValueError):
            return None
        return self._talk.post(*words)

    def claimed(self, ask: Ask, reply: Any, *, whole: bool = True) -> Verdict | Brief | None:
        if isinstance(reply, Exception):
            return self._store.LOCKED if isinstance(reply, Locked) else None
        if not reply:
            return None  # of a wrong hunch
        row = reply[0]
        if row[1]:
            self._hunch.learn(new=True)
            return model.claim(None, ask, row[0])[0]
        self._hunch.learn(new=False)
        if not whole and (brief := brief_of(row, ask)) is not None:
            return brief
        return self._store.judged(row, ask)

    async def reclaim(self, ask: Ask, reply: Any, asked: float) -> Verdict:
        self._raise_final(reply)
        verdict = (await self._store.claim_late(ask, self._deadline(asked)))[0]
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def unclaimed(self, ask: Ask) -> None:
        """A link that was left in the middle of its statement has been dropped."""

    def settle(self, end: Settle, now: float) -> Coroutine[Any, Any, Sequence[Row]] | None:
        del now
        try:
            words = settle_words(end, self._store._skew)
        except (CodecError, ValueError):
            return None
        return None if words is None else self._talk.post(*words)

    def settled(self, end: Settle, reply: Any, asked: float) -> Answer | None:
        del asked
        if isinstance(reply, Exception) or not reply:
            return None
        self._talk.watchers.wake(end.scope.hash)
        return Answer.OK

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        try:
            self._raise_final(reply)
            answer = (await self._store.settle_late(end, self._deadline(asked)))[0]
        finally:
            self._talk.watchers.wake(end.scope.hash)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @staticmethod
    def _raise_final(reply: Any) -> None:
        if isinstance(reply, Exception) and not isinstance(reply, _ONCE_MORE):
            raise reply

    def _deadline(self, asked: float) -> float:
        """The time that the first try has left."""
        return self._talk.deadline() - (asyncio.get_running_loop().time() - asked)
