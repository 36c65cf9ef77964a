"""Calls made in one tick of an event loop travel to the store together (≤ 128 a batch, two batches of a kind in flight).

For stores where a batch is cheaper than its parts (`capabilities.batches`). A cancelled caller leaves a batch with
others in it running; one bad item fails alone. At one caller nothing waits: who has been travelling alone leaves at
once, and whoever comes while he is under way leaves at the end of the tick.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from semel.layers.layer import Layer
from semel.model import Answer, Ask, Settle, Verdict
from semel.posting import Brief, Poster, poster_of
from semel.store import Store

__all__ = ["Batch"]

T = TypeVar("T")
R = TypeVar("R")

MOST = 128
IN_FLIGHT = 2
SPLIT = 16
"""So many, with next to nothing in flight, leave in two halves: while the store works on one, this process works on the
other. Together they would come back together, and take turns with the store for ever."""
LONELY = 8
"""After so many batches of one in a row nobody is expected to come along."""
_YOURS: Final[Any] = (
    object()
)  # what the caller of a batch of one is told instead of an answer: carry it yourself


class _Sky:
    """How many items are in flight, of all queues of a layer."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = 0


class _Alone(msgspec.Struct, gc=False):
    """What the store's own quick way gave."""

    reply: Any


class _Queue(Generic[T, R]):
    def __init__(self, verb: Callable[[Sequence[T]], Awaitable[list[R | Exception]]], sky: _Sky) -> None:
        self._verb = verb
        self._sky = sky
        self._items: deque[tuple[T, asyncio.Future[R | Exception]]] = deque()
        self._flying = 0
        self._lonely = 0
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def quiet(self) -> bool:
        """Whether nobody is expected to come along."""
        return self._lonely >= LONELY and not self._flying and not self._items

    def see_off(self, posted: Awaitable[Any]) -> Awaitable[_Alone]:
        """One that the store has taken already, by itself."""
        self._flying += 1  # _depart, without the call
        self._sky.items += 1
        return self._seen_off(posted, asyncio.get_running_loop())

    async def _seen_off(self, posted: Awaitable[Any], loop: asyncio.AbstractEventLoop) -> _Alone:
        try:
            return _Alone(await posted)
        finally:
            self._landed(1, loop)

    def post(self, item: T) -> Awaitable[R | Exception]:
        """Send it, with all others of this tick or alone. What is given is awaited at once."""
        if self.quiet:
            self._depart(1)
            return self._carry(item, asyncio.get_running_loop())
        return self._join(item, asyncio.get_running_loop())

    async def _join(self, item: T, loop: asyncio.AbstractEventLoop) -> R | Exception:
        future: asyncio.Future[R | Exception] = loop.create_future()
        self._items.append((item, future))
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._launch, loop)
        try:
            answer = await future
        except asyncio.CancelledError:
            if (
                future.done()
                and not future.cancelled()
                and future.exception() is None
                and future.result() is _YOURS
            ):
                self._landed(1, loop)  # cancelled after it was told, before it could begin
            raise
        return await self._carry(item, loop) if answer is _YOURS else answer

    async def _carry(self, item: T, loop: asyncio.AbstractEventLoop) -> R | Exception:
        """Nobody travels along: no task is needed, which at one caller is nearly half of what this layer costs."""
        try:
            return (await self._verb((item,)))[0]
        finally:
            self._landed(1, loop)

    def _depart(self, number: int) -> None:
        self._flying += 1
        self._sky.items += number

    def _landed(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._flying -= 1
        self._sky.items -= number
        if self._items and not self._scheduled:
            self._launch(loop)

    def _launch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = False
        while self._items and self._flying < IN_FLIGHT:
            number = len(self._items)
            if number >= SPLIT and self._sky.items * 4 < number:
                number = (number + 1) // 2
            batch = [self._items.popleft() for _ in range(min(MOST, number))]
            if len(batch) == 1 and batch[0][1].done():
                continue  # its caller left before anything was sent
            self._depart(len(batch))
            if len(batch) == 1:
                self._lonely += 1
                batch[0][1].set_result(_YOURS)
                continue
            self._lonely = 0
            task = loop.create_task(self._fly(batch, loop))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fly(
        self, batch: list[tuple[T, asyncio.Future[R | Exception]]], loop: asyncio.AbstractEventLoop
    ) -> None:
        try:
            answers = await self._verb([item for item, _ in batch])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        finally:
            self._landed(len(batch), loop)


class Batch(Layer):
    """One per loop: the faces make it so."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        sky = _Sky()
        self._claims: _Queue[Ask, Verdict] = _Queue(inner.claim, sky)
        self._ends: _Queue[Settle, Answer] = _Queue(inner.settle, sky)

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        if len(asks) == 1:
            return [await self._claims.post(asks[0])]
        return await self.inner.claim(asks)

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        if len(ends) == 1:
            return [await self._ends.post(ends[0])]
        return await self.inner.settle(ends)

    def poster(self) -> Poster:
        """The quick way: whoever asks waits for the batch itself, or goes the store's quick way while nobody else asks."""
        return _Poster(self._claims, self._ends, poster_of(self.inner))


class _Poster:
    """See `semel.posting`."""

    __slots__ = ("_claims", "_ends", "_inner")

    def __init__(
        self, claims: _Queue[Ask, Verdict], ends: _Queue[Settle, Answer], inner: Poster | None
    ) -> None:
        self._claims = claims
        self._ends = ends
        self._inner = inner

    def claim(self, ask: Ask, now: float) -> Awaitable[Any]:
        claims, inner = self._claims, self._inner
        if inner is not None and claims.quiet and (posted := inner.claim(ask, now)) is not None:
            return claims.see_off(posted)
        return claims.post(ask)

    def claimed(self, ask: Ask, reply: Any, *, whole: bool = True) -> Verdict | Brief | None:
        if type(reply) is _Alone:
            return None if self._inner is None else self._inner.claimed(ask, reply.reply, whole=whole)
        return None if isinstance(reply, Exception) else reply

    async def reclaim(self, ask: Ask, reply: Any, asked: float) -> Verdict:
        if self._inner is None:
            raise reply  # whether to try again is the next layer's to say
        return await self._inner.reclaim(ask, reply.reply if type(reply) is _Alone else reply, asked)

    def unclaimed(self, ask: Ask) -> None:
        """A batch goes on without those who left it."""
        if self._inner is not None:
            self._inner.unclaimed(ask)

    def settle(self, end: Settle, now: float) -> Awaitable[Any]:
        ends, inner = self._ends, self._inner
        if inner is not None and ends.quiet and (posted := inner.settle(end, now)) is not None:
            return ends.see_off(posted)
        return ends.post(end)

    def settled(self, end: Settle, reply: Any, asked: float) -> Answer | None:
        if type(reply) is _Alone:
            return None if self._inner is None else self._inner.settled(end, reply.reply, asked)
        return None if isinstance(reply, Exception) else reply

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        if self._inner is None:
            raise reply
        return await self._inner.resettle(end, reply.reply if type(reply) is _Alone else reply, asked)
