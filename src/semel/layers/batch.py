"""Calls made in one tick of an event loop travel to the store together (≤ 128 a batch, two batches of a kind in flight).

For stores where a batch is cheaper than its parts (`capabilities.batches`). A cancelled caller leaves a batch with
others in it running; one bad item fails alone. At one caller nothing waits: who has been travelling alone leaves at
once, and whoever comes while he is under way leaves at the end of the tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec

from semel.layers.layer import Layer
from semel.losses import Losses, is_unsent
from semel.model import Answer, Ask, Settle, Verdict
from semel.posting import Brief, Poster, interrupted, poster_of
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
_YOURS: Final[Any] = object()
"""What the caller of a batch of one is told instead of an answer: carry it yourself."""


class _Sky:
    """How many items are in flight, of all queues of a layer."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = 0


class _Alone(msgspec.Struct, gc=False):
    """What the store's own quick way gave."""

    reply: Any


class _Waiter(Generic[T, R]):
    """One call in the queue. `up`: it flies alone, and its caller carries it."""

    __slots__ = ("future", "item", "up")

    def __init__(self, item: T, future: asyncio.Future[R | Exception]) -> None:
        self.item = item
        self.future = future
        self.up = False


class _Flight(Generic[T, R]):
    """Several calls under way together."""

    __slots__ = ("number", "up", "waiters")

    def __init__(self, waiters: list[_Waiter[T, R]]) -> None:
        self.waiters = waiters
        self.number = len(waiters)
        self.up = True

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception | asyncio.CancelledError):
            # What a signal's handler raised is for whom it struck: the others must not end their loop with it once more.
            error = interrupted(error)
        for waiter in self.waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)


class _Queue(Generic[T, R]):
    """A signal's handler may raise wherever Python calls something. So who is counted as flying is counted next to its `try`,
    and taken back first of all in its `finally`, with no call in between: a flight that never lands would keep all others
    on the ground."""

    def __init__(
        self, verb: Callable[[Sequence[T]], Awaitable[list[R | Exception]]], sky: _Sky, losses: Losses
    ) -> None:
        self._verb = verb
        self._sky = sky
        self._losses = losses
        self._waiters: list[_Waiter[T, R]] = []
        self._flying = 0
        self._lonely = 0
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def quiet(self) -> bool:
        """Whether nobody is expected to come along."""
        return self._lonely >= LONELY and not self._flying and not self._waiters

    async def see_off(self, posted: Awaitable[Any], loop: asyncio.AbstractEventLoop) -> _Alone:
        """One that the store has taken already, by itself. Awaited at once."""
        self._flying += 1
        self._sky.items += 1
        try:
            return _Alone(await posted)
        finally:
            self._flying -= 1
            self._sky.items -= 1
            self._go_on(loop)

    def post(self, item: T) -> Awaitable[R | Exception]:
        """Send it, with all others of this tick or alone. What is given is awaited at once."""
        send = self._carry if self.quiet else self._join
        return send(item, asyncio.get_running_loop())

    async def _carry(self, item: T, loop: asyncio.AbstractEventLoop) -> R | Exception:
        """Nobody travels along: no task is needed, which at one caller is nearly half of what this layer costs."""
        self._flying += 1
        self._sky.items += 1
        try:
            return (await self._verb((item,)))[0]
        finally:
            self._flying -= 1
            self._sky.items -= 1
            self._go_on(loop)

    async def _join(self, item: T, loop: asyncio.AbstractEventLoop) -> R | Exception:
        waiter: _Waiter[T, R] = _Waiter(item, loop.create_future())
        try:
            self._schedule(loop)
            self._waiters.append(waiter)
            answer = await waiter.future
            return (await self._verb((item,)))[0] if answer is _YOURS else answer
        finally:
            if waiter.up:
                waiter.up = False
                self._flying -= 1
                self._sky.items -= 1
                self._go_on(loop)
            waiter.future.cancel()  # struck before it was launched, it is not to be

    # --------------------------------------------------------------------------------------------- together
    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Unless somebody has. If the first one in the queue has left, a signal's handler may have struck the launch."""
        if not (self._scheduled and self._waiters) or self._waiters[0].future.done():
            loop.call_soon(self._launch, loop)
            self._scheduled = True

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """There is room again."""
        if self._waiters and not self._scheduled and not loop.is_closed():
            self._launch(loop)

    def _launch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = False
        try:
            while self._waiters and self._flying < IN_FLIGHT:
                self._lift(loop)
        except BaseException:  # of a signal's handler: whoever is left has the next turn
            self._schedule(loop)
            raise

    def _lift(self, loop: asyncio.AbstractEventLoop) -> None:
        number = len(self._waiters)
        if number >= SPLIT and self._sky.items * 4 < number:
            number = (number + 1) // 2
        if number == 1:
            self._lift_one()
        else:
            self._lift_many(min(MOST, number), loop)

    def _lift_one(self) -> None:
        waiter = self._waiters[0]
        if not waiter.future.done():  # else its caller left before anything was sent
            self._lonely += 1
            waiter.future.set_result(_YOURS)
            waiter.up = True
            self._flying += 1
            self._sky.items += 1
        del self._waiters[0]

    def _lift_many(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._lonely = 0
        flight = _Flight(self._waiters[:number])
        del self._waiters[:number]
        self._flying += 1
        self._sky.items += number
        try:
            task = loop.create_task(self._fly(flight, loop))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, flight, loop))
        except BaseException as error:
            self._land(flight, loop)
            flight.fail(error)
            raise

    async def _fly(self, flight: _Flight[T, R], loop: asyncio.AbstractEventLoop) -> None:
        try:
            # Without those who left before anything was sent.
            waiters = [waiter for waiter in flight.waiters if not waiter.future.done()]
            answers = await self._verb([waiter.item for waiter in waiters]) if waiters else []
            for waiter, answer in zip(waiters, answers, strict=True):
                if not waiter.future.done():
                    waiter.future.set_result(answer)
        except Exception as error:  # noqa: BLE001 - it is handed to those who wait
            if is_unsent(error):  # that of some of them: a store may take a batch in several parts
                self._losses.tell()
            flight.fail(error)
        finally:
            self._land(flight, loop)

    def _ended(
        self, flight: _Flight[T, R], loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]
    ) -> None:
        """However it ended, and if it was struck before it could begin."""
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._land(flight, loop)
            flight.fail(error)

    def _land(self, flight: _Flight[T, R], loop: asyncio.AbstractEventLoop) -> None:
        if flight.up:
            flight.up = False
            self._flying -= 1
            self._sky.items -= flight.number
            self._go_on(loop)


class Batch(Layer):
    """One per loop: the faces make it so."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        sky = _Sky()
        self._claims: _Queue[Ask, Verdict] = _Queue(inner.claim, sky, self.losses)
        self._ends: _Queue[Settle, Answer] = _Queue(inner.settle, sky, self.losses)

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
            return claims.see_off(posted, asyncio.get_running_loop())
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
            return ends.see_off(posted, asyncio.get_running_loop())
        return ends.post(end)

    def settled(self, end: Settle, reply: Any, asked: float) -> Answer | None:
        if type(reply) is _Alone:
            return None if self._inner is None else self._inner.settled(end, reply.reply, asked)
        return None if isinstance(reply, Exception) else reply

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        if self._inner is None:
            raise reply
        return await self._inner.resettle(end, reply.reply if type(reply) is _Alone else reply, asked)
