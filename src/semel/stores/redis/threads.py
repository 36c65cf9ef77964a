"""The sync colour: each call has a connection to itself, from a stack per node that all threads share.

A stack (last in, first out) keeps few sockets warm. Multiplexing as the async colour does it would cost every call
two thread hops, which is more than the call itself (docs/decisions/0003). The methods are coroutines that never
suspend: `coro.send(None)` ends them.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import hiredis
from redis import exceptions as driver

from semel.errors import StoreUnavailable
from semel.runtime import run_sync
from semel.stores.places import Place, Places, ThreadTurns
from semel.stores.redis.address import Endpoint, Target, connection
from semel.stores.redis.calls import Arg, Call, Lane, Script, Unwatch
from semel.stores.redis.courier import Courier, Parcel, Trouble, pack
from semel.stores.redis.errors import Full, Lost, NotSent, Overdue, ServerError
from semel.stores.redis.watch_threads import ThreadWatcher

__all__ = ["ThreadLink"]

_MORE: Final = object()  # hiredis: the next reply is not complete yet
_READ_SIZE: Final = 1 << 16
_IDLE_CHECK: Final = 1.0  # a socket that rested longer is looked at before use: the server may have closed it
# What a forked child inherited. Kept alive on purpose: the sockets are the parent's.
_inherited: Final[list[object]] = []


class _Socket:
    """A connected redis-py connection, used by one thread at a time."""

    def __init__(self, made: Any, place: Place) -> None:
        self.place = place
        self._made = made
        self._sock: socket.socket = made._sock  # noqa: SLF001 - the only private part of redis-py that we touch
        self._reader: Any = hiredis.Reader(replyError=ServerError, notEnoughData=_MORE)
        self._buffer = bytearray(_READ_SIZE)
        self._span = -1.0
        self._answered = False
        self.rested = time.monotonic()

    def exchange(self, packed: bytes, replies: int, patience: float, deadline: float) -> list[Any]:
        """Write, then read `replies` replies. Raises `Lost` or `Overdue`; the socket is of no use afterwards."""
        found: list[Any] = []
        gets = self._reader.gets
        try:
            self._limit(patience, deadline)
            self._sock.sendall(packed)
            while True:
                size = self._sock.recv_into(self._buffer)
                if not size:
                    raise driver.ConnectionError("the server closed the connection")
                self._reader.feed(self._buffer, 0, size)
                while (reply := gets()) is not _MORE:
                    found.append(reply)
                if len(found) > replies:
                    raise driver.InvalidResponse("Redis sent more replies than there were calls")
                if len(found) == replies:
                    break
                self._limit(patience, deadline)
        except TimeoutError as error:
            if time.monotonic() >= deadline:
                raise Overdue("no reply within the caller's time") from error
            silence = driver.TimeoutError("the server sent nothing for as long as a call may wait")
            raise Lost(silence, stillborn=not self._answered) from error
        except (OSError, driver.RedisError, hiredis.HiredisError) as error:
            raise Lost(error, stillborn=not self._answered) from error
        self._answered = True
        return found

    def _limit(self, patience: float, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:  # not the socket's to tell: a reply that drips never lets it wait for long
            raise TimeoutError("the caller's time is over")
        span = min(patience, max(0.001, left))
        if abs(span - self._span) > 0.001:  # setting it is a system call
            self._sock.settimeout(span)
            self._span = span

    def looks_dead(self) -> bool:
        """Readable before we asked anything: the server hung up (or speaks out of turn)."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._made.disconnect()


class _Ready:
    """A reply that is there already, to be awaited."""

    __slots__ = ("_error", "_reply")

    def __init__(self, reply: Any, error: Exception | None) -> None:
        self._reply = reply
        self._error = error

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        if self._error is not None:
            raise self._error
        return self._reply


class _Stack:
    """The idle sockets of one node, and places for those yet to be made.

    Who waits is served in order: a thread that gives a socket back could otherwise take it again at once, for ever
    (under gevent, where nobody interrupts it, that is what happens). A socket keeps its place from its making to its end:
    what a signal's handler that raises takes out of a thread's hands is closed, and free again by itself.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: list[_Socket] = []
        self._places = Places(most)
        self._turns = ThreadTurns[_Socket | Place](self._warm_or_place, self._back)

    def take(self, deadline: float) -> _Socket | Place:
        """An idle socket, or the right to make one. Waits for either; `Full` when none came in time."""
        found = self._warm_or_place() or run_sync(self._turns.wait(deadline - time.monotonic()))
        if found is None:
            text = f"all {self._most} connections to this Redis server are in use (max_connections)"
            raise Full(StoreUnavailable(text))
        return found

    def _warm_or_place(self) -> _Socket | Place | None:
        try:
            while True:
                found = self._idle.pop()
                if time.monotonic() - found.rested < _IDLE_CHECK or not found.looks_dead():
                    return found
                self._places.give(found.place)  # to us, who look for one
                found.close()
        except IndexError:  # none is idle
            return self._places.take()

    def _back(self, found: _Socket | Place) -> None:
        if isinstance(found, _Socket):
            self.give(found)
        else:
            self.lose(found)

    def give(self, back: _Socket) -> None:
        back.rested = time.monotonic()
        self._idle.append(back)
        self._turns.ring()

    def lose(self, broken: _Socket | Place) -> None:
        place = broken.place if isinstance(broken, _Socket) else broken
        self._places.give(place)
        self._turns.ring()
        if isinstance(broken, _Socket):
            broken.close()

    def clear(self) -> None:
        """Close what is idle: it is as dead as the one that just broke, or the link is being closed."""
        with suppress(IndexError):  # none is left, or another thread took it
            while True:
                self.lose(self._idle.pop())


class ThreadLink(Courier):
    """See `Link`. Thread-safe; works with gevent's patched sockets and locks."""

    colour: Literal["sync"] = "sync"

    def __init__(
        self,
        target: Target,
        *,
        timeout: float,
        connect_timeout: float,
        max_connections: int,
        ping_every: float,
    ) -> None:
        super().__init__(target, timeout=timeout, connect_timeout=connect_timeout)
        self._most = max_connections
        self._ping_every = ping_every
        self._watcher: ThreadWatcher | None = None
        self._starting = threading.Lock()
        self._stacks: dict[Endpoint, _Stack] = {}
        self._pid = os.getpid()
        self._closed = False

    # ------------------------------------------------------------------------------------ calls
    def post(self, key: bytes, packed: bytes, lane: Lane = Lane.MAIN) -> Awaitable[Any] | None:
        """See `Link`. The trip is over when this returns; what is awaited is ready."""
        del lane  # each call has a connection to itself
        node = self._topology.locate(key)
        if node is None:
            return None
        try:
            (reply,) = self._trip(node, packed, 1, self._timeout / 2, time.monotonic() + self._timeout)
        except (NotSent, Overdue) as error:
            return _Ready(None, error)
        return _Ready(reply, None)

    async def call(
        self,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[Arg] = (),
        *,
        lane: Lane = Lane.MAIN,
        timeout: float | None = None,
        resend: bool = True,
        acks: int = 0,
        ack_timeout: float = 1.0,
    ) -> Any:
        if timeout is None:
            timeout = self._timeout
        deadline = time.monotonic() + timeout
        trouble: Trouble | None = None
        node = self._topology.locate(keys[0] if keys else None)
        if node is not None and not acks:
            packed = pack((b"EVALSHA", script.sha1, len(keys), *keys, *args))
            try:
                (reply,) = self._trip(node, packed, 1, timeout / 2, deadline)
            except (NotSent, Overdue) as error:
                trouble = error
            else:
                if reply.__class__ is not ServerError:
                    return reply
                trouble = reply
        parcel = self._parcel(Call(script, keys, args, lane, resend, acks, ack_timeout), timeout, deadline)
        parcel.where = str(node)
        return await self._deliver(parcel, trouble)

    async def call_many(self, calls: Sequence[Call], *, timeout: float | None = None) -> list[Any]:
        span = self._timeout if timeout is None else timeout
        deadline = self._now() + span
        parcels = [self._parcel(call, span, deadline) for call in calls]
        results: list[Any] = [None] * len(parcels)
        rest: dict[int, Trouble | None] = {}
        for node, places in self._by_node(parcels).items():
            self._first_tries(node, places, parcels, results, rest)
        for place, trouble in sorted(rest.items()):
            try:
                results[place] = await self._deliver(parcels[place], trouble)
            except Exception as error:  # noqa: BLE001 - an item's error stands in its place
                results[place] = error
        return results

    def _by_node(self, parcels: Sequence[Parcel]) -> dict[Endpoint | None, list[int]]:
        groups: dict[Endpoint | None, list[int]] = {}
        for place, parcel in enumerate(parcels):
            node = None if parcel.acks else self._topology.locate(parcel.key)
            parcel.where = str(node)
            groups.setdefault(node, []).append(place)
        return groups

    def _first_tries(
        self,
        node: Endpoint | None,
        places: list[int],
        parcels: Sequence[Parcel],
        results: list[Any],
        rest: dict[int, Trouble | None],
    ) -> None:
        if node is None:
            rest.update(dict.fromkeys(places))
            return
        packed = b"".join(parcels[place].commands()[0] for place in places)
        first = parcels[places[0]]
        try:
            replies = self._trip(node, packed, len(places), first.timeout / 2, first.deadline)
        except (NotSent, Overdue) as error:
            rest.update(dict.fromkeys(places, error))
            return
        for place, reply in zip(places, replies, strict=True):
            if reply.__class__ is ServerError:
                rest[place] = reply
            else:
                results[place] = reply

    async def command(
        self,
        *args: Arg,
        key: bytes | None = None,
        lane: Lane = Lane.MAIN,
        timeout: float | None = None,
        resend: bool = True,
    ) -> Any:
        return await self._deliver(self._plain(args, key, lane, timeout, resend=resend))

    async def watch(self, channel: bytes, wake: Callable[[], None]) -> Unwatch:
        self._check()
        with self._starting:
            if self._watcher is None or self._watcher.ended:
                self._watcher = ThreadWatcher(
                    self._topology,
                    lambda node: self._connect(node, self._connect_timeout),
                    self._look_up,
                    timeout=self._timeout,
                    ping_every=self._ping_every,
                )
            watcher = self._watcher
        return watcher.watch(channel, wake, self._timeout)

    # ---------------------------------------------------------------------------- Courier's ports
    def _now(self) -> float:
        return time.monotonic()

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - this colour has no loop: blocking is its way of waiting

    async def _exchange(self, node: Endpoint, parcel: Parcel, packed: list[bytes]) -> list[Any]:
        patience = parcel.patience(self._now())
        return self._trip(node, b"".join(packed), len(packed), patience, parcel.deadline)

    async def _ask(self, node: Endpoint, command: tuple[bytes, ...], *, sentinel: bool, limit: float) -> Any:
        asked = _Socket(self._connect(node, limit, sentinel=sentinel), Place())  # beside those of the stacks
        try:
            (reply,) = asked.exchange(pack(command), 1, limit, self._now() + limit)
        except (Lost, Overdue) as error:
            raise NotSent(error.cause if isinstance(error, Lost) else error) from error
        finally:
            asked.close()
        if isinstance(reply, ServerError):
            raise reply
        return reply

    # ---------------------------------------------------------------------------------- sending
    def _trip(
        self, node: Endpoint, packed: bytes, replies: int, patience: float, deadline: float
    ) -> list[Any]:
        stack = self._stack(node)
        carrier = stack.take(deadline)
        try:
            if not isinstance(carrier, _Socket):
                limit = min(self._connect_timeout, deadline - time.monotonic())
                carrier = _Socket(self._connect(node, limit), carrier)
            found = carrier.exchange(packed, replies, patience, deadline)
        except BaseException as error:  # also KeyboardInterrupt: a half-read socket must not be used again
            stack.lose(carrier)
            if isinstance(error, Lost):
                stack.clear()  # its neighbours were most likely cut as well
            raise
        stack.give(carrier)
        if self._closed:
            stack.clear()
        return found

    def _stack(self, node: Endpoint) -> _Stack:
        self._check()
        stack = self._stacks.get(node)
        return stack if stack is not None else self._stacks.setdefault(node, _Stack(self._most))

    def _connect(self, node: Endpoint, limit: float, *, sentinel: bool = False) -> Any:
        if limit <= 0:
            raise Overdue("no time left to connect")
        made = connection(self._target, node, "sync", connect_timeout=limit, sentinel=sentinel)
        try:
            made.connect()
        except Exception as error:  # also of whoever gives the credentials, say
            made.disconnect()
            raise NotSent(error) from error
        if not sentinel:
            self._topology.proven = True
        return made

    # ------------------------------------------------------------------------------ forks, end
    def _check(self) -> None:
        if self._pid != os.getpid():
            _inherited.append((self._stacks, self._watcher, self._starting))
            self._stacks, self._watcher, self._starting = {}, None, threading.Lock()
            self._topology.refreshing = False
            self._pid = os.getpid()
        if self._closed:
            raise StoreUnavailable("this Redis link is closed: open a new one")

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Close what is idle now and what is in use as soon as it comes back."""
        self._closed = True
        if self._pid != os.getpid():
            return  # a child that never used the link has nothing of its own
        for stack in list(self._stacks.values()):
            stack.clear()
        with self._starting:
            watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()
