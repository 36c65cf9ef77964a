"""The async colour's watcher: a task per event loop keeps the subscriptions, the loop delivers the bytes."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any

from redis import exceptions as driver

from semel.errors import SemelError, StoreUnavailable
from semel.stores.redis.address import Endpoint
from semel.stores.redis.calls import Unwatch
from semel.stores.redis.errors import NotSent
from semel.stores.redis.topology import Topology
from semel.stores.redis.watch import Line, Ticket, Watcher
from semel.stores.redis.wire import forget, transport_of

__all__ = ["LoopWatcher"]


class _LoopLine(Line, asyncio.Protocol):
    def __init__(self, node: Endpoint, made: Any, watcher: LoopWatcher) -> None:
        super().__init__(node, asyncio.get_running_loop().time())
        self._made = made
        self._watcher = watcher
        self._transport = transport_of(made)
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.set_protocol(self)
        if self._transport.is_closing():
            raise driver.ConnectionError("the server closed the connection right after the login")

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._watcher.received(self, data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        forget(self._made)
        self._watcher.lost(self, exc or driver.ConnectionError("the server closed the connection"))
        if not self.gone.done():
            self.gone.set_result(None)


class LoopWatcher(Watcher):
    """Made on its loop; everything but `add` and `remove` runs there."""

    def __init__(
        self,
        topology: Topology,
        dial: Callable[[Endpoint], Awaitable[Any]],
        look_up: Callable[[], Awaitable[None]],
        *,
        timeout: float,
        ping_every: float,
    ) -> None:
        super().__init__(topology, timeout=timeout, ping_every=ping_every)
        self._loop = asyncio.get_running_loop()
        self._dial = dial
        self._ask_around = look_up
        self._due = asyncio.Event()
        self._open_lines: set[_LoopLine] = set()
        self._task = self._loop.create_task(self._serve())

    async def watch(self, channel: bytes, wake: Callable[[], None], timeout: float) -> Unwatch:
        standing: asyncio.Future[SemelError | None] = self._loop.create_future()

        def settle(error: SemelError | None) -> None:
            if not standing.done():
                standing.set_result(error)

        ticket = Ticket(channel, wake, settle)
        self.add(ticket)
        try:
            async with asyncio.timeout(timeout):
                error = await standing
        except TimeoutError as late:
            self.remove(ticket)
            raise StoreUnavailable(f"Redis did not confirm the subscription within {timeout:g} s") from late
        except BaseException:
            self.remove(ticket)
            raise
        if error is not None:
            raise error

        async def unwatch() -> None:
            self.remove(ticket)

        return unwatch

    def _now(self) -> float:
        return self._loop.time()

    def _nudge(self) -> None:
        self._due.set()

    async def _open(self, node: Endpoint) -> Line:
        try:
            made = await self._dial(node)
            line = _LoopLine(node, made, self)
        except Exception as error:  # also of whoever gives the credentials, say
            raise NotSent(error) from error
        self._open_lines = {known for known in self._open_lines if not known.gone.done()} | {line}
        return line

    async def _look_up(self) -> None:
        await self._ask_around()

    async def _serve(self) -> None:
        try:
            while True:
                self._due.clear()
                wait = await self.turn() - self._now()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if wait == math.inf else max(0.0, wait)):
                        await self._due.wait()
        except GeneratorExit:
            raise  # collected: its loop is closed, and nothing can be ended there
        except BaseException:  # also when somebody cancels all tasks of the loop
            self.shut()
            raise

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self.shut()
        if waiting := [line.gone for line in self._open_lines]:
            await asyncio.wait(waiting, timeout=1.0)
