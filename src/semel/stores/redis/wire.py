"""One multiplexed connection to one Redis server, on one event loop.

redis-py dials (TLS, login, database); then the socket's transport is given to `Wire`, whose `data_received` feeds
hiredis and hands the replies out in order. What is sent within one tick of the loop leaves in one write, or a few.
Measured against redis-py's own pool this costs about a tenth of the CPU per call (docs/decisions/0003).

A wire lives once: it dials, serves, and dies. Dying tells every waiting call whether it was `NotSent` or `Lost`;
whoever waits decides whether to send again, on whichever wire is then the right one.
"""

from __future__ import annotations

import asyncio
import math
import select
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import hiredis
from redis import exceptions as driver

from semel.errors import StoreUnavailable
from semel.stores.posted import Posted, resume
from semel.stores.redis.errors import Full, Lost, NotSent, Overdue, ServerError

__all__ = ["Wire", "forget", "transport_of"]

_MORE: Final = object()  # hiredis: the next reply is not complete yet
_CONNECTING, _OPEN, _DEAD = 0, 1, 2
# Calls that are written before their tick is over: the server works on them while we prepare the next ones.
_ENOUGH: Final = 16
# Reads (of up to 256 KiB) that a loop which was busy elsewhere may make before it is judged which replies are late.
_CATCH_UP: Final = 64


# A call that waits: its future, its bytes, when it was queued (loop's clock), the silence after which the connection
# is given up, its deadline. A tuple, because one is made per call.
_Slot: TypeAlias = tuple[asyncio.Future[Any] | Posted, bytes, float, float, float]


def transport_of(connection: Any) -> asyncio.Transport:
    """The transport under a connected redis-py connection; its only private part that we touch."""
    writer: asyncio.StreamWriter | None = getattr(connection, "_writer", None)
    if writer is None:
        raise driver.ConnectionError("redis-py gave no open transport: this redis version is not supported")
    return writer.transport  # type: ignore[return-value]  # StreamWriter's is declared too wide


def forget(connection: Any) -> None:
    """Tell redis-py that its connection is over. With `nowait` its coroutine has nothing to wait for."""
    ending = connection.disconnect(nowait=True)
    try:
        ending.send(None)
    except StopIteration:
        return
    ending.close()


class Wire(asyncio.Protocol):
    """Calls in order over one socket. Not thread-safe: it belongs to its loop."""

    def __init__(self, dial: Callable[[], Awaitable[Any]], *, cap: int, max_queued_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._cap = cap
        self._max_queued_bytes = max_queued_bytes
        self._queue: list[_Slot] = []
        self._queued_bytes = 0
        self._crowded = True
        """Whether the next call may be one too many; else it is not even looked at: a tick's calls are few, and leave soon."""
        self._pending: deque[_Slot] = deque()
        self._woken: deque[Posted] = deque()
        self._state = _CONNECTING
        self.dead = False
        self._answered = False
        self._paused = False
        self._flushing = False
        self._heard = -math.inf  # when the last byte came
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._behind = 0  # reads of what had lain there, in a row
        self._transport: asyncio.Transport | None = None
        self._connection: Any = None
        self._reader = hiredis.Reader(replyError=ServerError, notEnoughData=_MORE)
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._dialling = self._loop.create_task(self._dial(dial))

    # ------------------------------------------------------------------------------------ calls
    def send(
        self, packed: bytes, now: float, patience: float, deadline: float, *, urgent: bool = False
    ) -> asyncio.Future[Any]:
        """Queue one command for this tick's write. The future ends in a reply (also a `ServerError`, as a value),
        or raises `NotSent`, `Lost` or `Overdue`. Cancelling it keeps its place: the reply is thrown away.
        """
        if self._crowded:
            self._make_sure_of_room(urgent=urgent)
        future = self._loop.create_future()
        self._queue.append((future, packed, now, patience, deadline))
        self._queued_bytes += len(packed)
        self._filled()
        if now + patience < self._timer_at:
            self._arm(now + patience)
        return future

    def post(self, packed: bytes, now: float, patience: float, deadline: float) -> Posted:
        """The same for a caller that awaits it at once, and that nobody else waits for."""
        if self._crowded:
            self._make_sure_of_room(urgent=False)
        posted = Posted(self._loop)
        queue = self._queue
        queue.append((posted, packed, now, patience, deadline))
        queued = self._queued_bytes = self._queued_bytes + len(packed)
        if not self._flushing or len(queue) >= _ENOUGH or queued > self._max_queued_bytes:
            self._filled()
        if now + patience < self._timer_at:
            self._arm(now + patience)
        return posted

    def _filled(self) -> None:
        """The queue has its first call, or enough for a write, or more than it may hold."""
        if self._queued_bytes > self._max_queued_bytes:
            self._crowded = True
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._tick)
        elif len(self._queue) >= _ENOUGH:
            self._flush()

    def _make_sure_of_room(self, *, urgent: bool) -> None:
        if len(self._pending) + len(self._queue) >= self._cap and not urgent:
            raise Full(StoreUnavailable(f"{self._cap} calls already wait on this Redis connection"))
        if self._queued_bytes > self._max_queued_bytes:
            raise Full(StoreUnavailable(f"{self._queued_bytes} bytes already wait to be written to Redis"))

    def _tick(self) -> None:
        self._flushing = False
        self._flush()

    def _flush(self) -> None:
        if self._state != _OPEN or self._paused or self._transport is None:
            self._crowded = True  # what is queued stays queued
            return  # _dial and resume_writing flush again
        try:
            # Whoever gave up before the write costs the server nothing.
            sent = [
                slot
                for slot in self._queue
                if not (slot[0].over if type(slot[0]) is Posted else slot[0].done())
            ]
            self._queue, self._queued_bytes = [], 0
            self._pending += sent
            self._crowded = len(self._pending) + _ENOUGH >= self._cap
            if sent:
                self._transport.write(b"".join([slot[1] for slot in sent]))
        except BaseException as error:
            self._struck(error)  # what is expected was perhaps not sent
            raise

    def data_received(self, data: bytes) -> None:
        reader, woken, pending = self._reader, self._woken, self._pending
        gets, wake = reader.gets, woken.append
        try:
            reader.feed(data)
            self._heard = self._loop.time()
            reply = gets()
            while reply is not _MORE:
                waiting = pending[0][0]
                if type(waiting) is Posted:
                    if not waiting.over:
                        waiting.value, waiting.over = reply, True
                        wake(waiting)
                elif not waiting.done():
                    waiting.set_result(reply)
                del pending[0]
                reply = gets()
            self._answered = True
        except (IndexError, hiredis.HiredisError) as error:
            # A reply nobody asked for, or no Redis protocol: order can no longer be trusted.
            self.lose(driver.InvalidResponse(f"Redis sent what cannot be matched to a call: {error}"))
        except BaseException as error:
            self._struck(error)  # a reply may be gone
            raise
        if woken:  # after the last of them was read
            resume(woken, self._loop)

    # ------------------------------------------------------------------------------------- time
    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = self._loop.call_at(due, self._sweep)

    def _sweep(self) -> None:
        """One timer per connection: end overdue calls, and give the connection up when it is silent too long."""
        self._timer, self._timer_at = None, math.inf
        now = self._loop.time()
        following = math.inf
        silent = False
        late: list[asyncio.Future[Any] | Posted] = []
        for future, _, sent, patience, deadline in (*self._pending, *self._queue):
            if future.done():
                continue
            quiet_until = max(sent, self._heard) + patience
            silent = silent or (quiet_until <= now and self._state == _OPEN)
            if deadline <= now:
                late.append(future)
                continue
            # While dialling, the connect timeout watches; afterwards silence is measured from the last byte.
            due = deadline if self._state == _CONNECTING else min(quiet_until, deadline)
            following = min(following, due)
        if not (late or silent):
            self._behind = 0
        elif self._catches_up():
            self._arm(now)  # right after the loop's next look at its sockets
            return
        for future in late:
            future.set_exception(Overdue("no reply within the caller's time"))
        if silent:
            self.lose(driver.TimeoutError("the server sent nothing for as long as a call may wait"))
        elif following < math.inf:
            self._arm(following)

    def _catches_up(self) -> bool:
        """Whether replies lie unread in the socket: a loop that was busy elsewhere is late, not the server. Not for ever."""
        reads, self._behind = self._behind, 0
        if self._transport is None or self._transport.is_closing() or reads == _CATCH_UP:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        if not poll.poll(0):
            return False
        self._behind = reads + 1
        return True

    # --------------------------------------------------------------------------- life and death
    async def _dial(self, dial: Callable[[], Awaitable[Any]]) -> None:
        try:
            connection = await dial()
            self._connection = connection
            transport = transport_of(connection)
            transport.set_protocol(self)
        except asyncio.CancelledError:
            self.lose(driver.ConnectionError("the link was closed while it was connecting"))
            raise
        except Exception as error:  # noqa: BLE001 - handed on, whole, to every waiting call
            self.lose(error)
            return
        if self._state == _DEAD or transport.is_closing():
            transport.abort()
            self.lose(driver.ConnectionError("the connection was closed right after the login"))
            self._let_go()
            return
        self._transport = transport
        self._state = _OPEN
        self._heard = self._loop.time()  # from now on silence counts
        self._sweep()
        self._flush()

    def pause_writing(self) -> None:
        self._paused = self._crowded = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def eof_received(self) -> bool:
        return False  # close the transport: a half-open Redis connection is of no use

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(exc or driver.ConnectionError("the server closed the connection"))
        self._let_go()

    def _struck(self, error: BaseException) -> None:
        """A signal's handler raised in the middle: from now on replies may be told to the wrong calls."""
        self.lose(driver.ConnectionError(f"{type(error).__name__} struck while the connection was used"))

    def lose(self, cause: BaseException) -> None:
        """Give the connection up. Calls that were written are `Lost`, the others `NotSent`."""
        if self._state == _DEAD and not (self._pending or self._queue):  # else telling them was struck
            return
        self._state = _DEAD
        self.dead = True
        for future, *_ in self._pending:
            if not future.done():
                future.set_exception(Lost(cause, stillborn=not self._answered))
        for future, *_ in self._queue:
            if not future.done():
                future.set_exception(NotSent(cause))
        self._pending.clear()
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._woken:  # answered, and not resumed
            self._loop.call_soon(resume, self._woken, self._loop)
        if self._transport is not None:
            self._transport.abort()  # connection_lost follows in the next tick
        elif self._connection is None:
            self._let_go()

    def _let_go(self) -> None:
        if self._connection is not None:
            forget(self._connection)
            self._connection = None
        if not self._gone.done():
            self._gone.set_result(None)

    async def aclose(self) -> None:
        """Close now; returns when the socket is closed."""
        self.lose(driver.ConnectionError("the link was closed"))
        if not self._dialling.done():
            self._dialling.cancel()
            await asyncio.wait({self._dialling})
        await asyncio.wait({self._gone}, timeout=1.0)
