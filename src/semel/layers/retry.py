"""One lost request or reply is sent again, unseen by the caller (R16). Safe: every write carries its nonce.

What was lost may arrive all the same, after the second copy was answered: of claims this is told (`semel.losses`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from semel.errors import StoreUnavailable
from semel.keys import Scope
from semel.layers.layer import Layer
from semel.losses import is_unsent
from semel.model import Answer, Ask, Note, Record, Renewal, Settle, Verdict
from semel.posting import Poster, poster_of
from semel.store import Store

__all__ = ["Retry"]

T = TypeVar("T")
R = TypeVar("R")
_Verb: TypeAlias = Callable[[Sequence[R]], Awaitable[list[T]]]


class Retry(Layer):
    """Tries once more, if half of `timeout` is left: the caller's patience is not doubled. Not a login that was refused."""

    def __init__(self, inner: Store, now: Callable[[], float], timeout: float) -> None:
        super().__init__(inner)
        self._now = now
        self._patience = timeout / 2

    async def _again(self, call: Callable[[], Awaitable[T]]) -> T:
        start = self._now()
        try:
            return await call()
        except StoreUnavailable as error:
            if self._now() - start > self._patience or is_unsent(error):
                raise
            return await call()

    async def _batch(
        self, verb: _Verb[R, T], items: Sequence[R], again: _Verb[R, T] | None = None
    ) -> list[T]:
        start = self._now()
        again = again or verb
        try:
            answers = await verb(items)
        except StoreUnavailable as error:
            if self._now() - start > self._patience or is_unsent(error):
                raise
            return await again(items)
        lost = [
            at
            for at, answer in enumerate(answers)
            if isinstance(answer, StoreUnavailable) and not is_unsent(answer)
        ]
        if lost and self._now() - start <= self._patience:
            for at, answer in zip(lost, await again([items[at] for at in lost]), strict=True):
                answers[at] = answer
        return answers

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return await self._batch(self.inner.claim, asks, self._claim_again)

    async def _claim_again(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        self.losses.tell()
        return await self.inner.claim(asks)

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await self._batch(self.inner.settle, ends)

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        return await self._batch(self.inner.renew, renewals)

    async def note(self, note: Note) -> Answer:
        return await self._again(lambda: self.inner.note(note))

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        return await self._again(lambda: self.inner.peek(scope))

    def poster(self) -> Poster | None:
        """The quick way, where there is one below; the second try goes the long one."""
        inner = poster_of(self.inner)
        return (
            None
            if inner is None
            else _Poster(inner, self._claim_again, self.inner.settle, self._now, self._patience)
        )


class _Poster:
    """See `semel.posting`: what is answered at the first try is not looked at here, but by the layer below."""

    __slots__ = (
        "_claim_again",
        "_inner",
        "_now",
        "_patience",
        "_settle_again",
        "claim",
        "claimed",
        "settle",
        "settled",
        "unclaimed",
    )

    def __init__(
        self,
        inner: Poster,
        claim_again: _Verb[Ask, Verdict | Exception],
        settle_again: _Verb[Settle, Answer | Exception],
        now: Callable[[], float],
        patience: float,
    ) -> None:
        self._inner = inner
        self._claim_again, self._settle_again = claim_again, settle_again
        self._now = now
        self._patience = patience
        self.claim, self.claimed, self.unclaimed = inner.claim, inner.claimed, inner.unclaimed
        self.settle, self.settled = inner.settle, inner.settled

    async def reclaim(self, ask: Ask, reply: Any, asked: float) -> Verdict:
        try:
            return await self._inner.reclaim(ask, reply, asked)
        except StoreUnavailable as error:
            if self._now() - asked > self._patience or is_unsent(error):
                raise
        verdict = (await self._claim_again((ask,)))[0]
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        try:
            return await self._inner.resettle(end, reply, asked)
        except StoreUnavailable as error:
            if self._now() - asked > self._patience or is_unsent(error):
                raise
        answer = (await self._settle_again((end,)))[0]
        if isinstance(answer, Exception):
            raise answer
        return answer
