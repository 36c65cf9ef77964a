"""Calls made in one tick of an event loop travel to the store together (≤ 128 a batch, two batches in flight).

For stores where a batch is cheaper than its parts (`capabilities.batches`). A cancelled caller leaves a batch with
others in it running; one bad item fails alone. At one caller nothing waits: the batch leaves at the end of the tick.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from semel.layers.layer import Layer
from semel.model import Answer, Ask, Settle, Verdict
from semel.store import Store

__all__ = ["Batch"]

T = TypeVar("T")
R = TypeVar("R")

MOST = 128
IN_FLIGHT = 2
_YOURS: Final[Any] = (
    object()
)  # what the caller of a batch of one is told instead of an answer: carry it yourself


class _Queue(Generic[T, R]):
    def __init__(self, verb: Callable[[Sequence[T]], Awaitable[list[R | Exception]]]) -> None:
        self._verb = verb
        self._items: deque[tuple[T, asyncio.Future[R | Exception]]] = deque()
        self._flying = 0
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(self, item: T) -> R | Exception:
        loop = asyncio.get_running_loop()
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
                self._landed(loop)  # cancelled after it was told, before it could begin
            raise
        return await self._carry(item, loop) if answer is _YOURS else answer

    async def _carry(self, item: T, loop: asyncio.AbstractEventLoop) -> R | Exception:
        """Nobody travels along: no task is needed, which at one caller is nearly half of what this layer costs."""
        try:
            return (await self._verb((item,)))[0]
        finally:
            self._landed(loop)

    def _landed(self, loop: asyncio.AbstractEventLoop) -> None:
        self._flying -= 1
        self._launch(loop)

    def _launch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = False
        while self._items and self._flying < IN_FLIGHT:
            batch = [self._items.popleft() for _ in range(min(MOST, len(self._items)))]
            if len(batch) == 1 and batch[0][1].done():
                continue  # its caller left before anything was sent
            self._flying += 1
            if len(batch) == 1:
                batch[0][1].set_result(_YOURS)
                continue
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
            self._landed(loop)


class Batch(Layer):
    """One per loop: the faces make it so."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._claims: _Queue[Ask, Verdict] = _Queue(inner.claim)
        self._ends: _Queue[Settle, Answer] = _Queue(inner.settle)

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        if len(asks) == 1:
            return [await self._claims.put(asks[0])]
        return await self.inner.claim(asks)

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        if len(ends) == 1:
            return [await self._ends.put(ends[0])]
        return await self.inner.settle(ends)
