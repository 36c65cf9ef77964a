"""Where sessions come from: a pool per event loop, a pool for threads, a pool that the caller owns.

A pool gives a live session or raises: `ConfigurationError` or `StoreUnavailable` (it could not connect), `Crowded` (all
connections stayed busy). Connections are made when they are needed. Async ones belong to the loop that made them and
are closed with it; a forked child leaves all of its parent's untouched and makes its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import Any, Final, Literal, Protocol, TypeVar

from semel.errors import ConfigurationError
from semel.forks import survive_fork
from semel.stores.mysql.address import Address
from semel.stores.mysql.errors import translate, unreachable
from semel.stores.mysql.session import Session
from semel.stores.mysql.wires import adopt_asyncmy, dial_asyncmy, dial_pymysql

__all__ = ["AdoptedPool", "Crowded", "LoopPool", "Pool", "ThreadPool"]

T = TypeVar("T")
# What a forked child inherited. Kept alive on purpose: finalizing a transport would touch the epoll set and the
# sockets that parent and child share.
_inherited: Final[list[object]] = []


class Crowded(Exception):
    """Every connection stayed busy for as long as the caller could wait."""


class Pool(Protocol):
    """One colour's sessions."""

    @property
    def colour(self) -> Literal["sync", "async"]: ...

    @property
    def where(self) -> str: ...

    async def take(self, until: float, *, fresh: bool) -> Session:
        """A live session to use until the monotonic time `until`; `fresh`: on a connection made just now."""
        ...

    async def give(self, session: Session) -> None:
        """Take it back; one that is not clean is closed."""
        ...

    async def bounded(self, work: Awaitable[T], until: float) -> T:
        """Await, at most until then; TimeoutError afterwards."""
        ...

    async def pause(self, span: float) -> None: ...

    async def aclose(self) -> None: ...


def _closed() -> ConfigurationError:
    return ConfigurationError("this store was closed: open a new one, or close it later")


# -------------------------------------------------------------------------------------------------- threads


class ThreadPool:
    """PyMySQL connections, shared by threads; the last one used is the next one taken."""

    colour: Literal["sync"] = "sync"

    def __init__(self, address: Address) -> None:
        self.where = address.where
        self._options = address.options()
        self._prefers_tls = address.prefers_tls
        self._size = address.pool
        self._closed = False
        self._reset()
        survive_fork(self, ThreadPool._forked)

    def _reset(self) -> None:
        # Taken by its own `with`: a signal's handler that raises inside of a condition's would leave it locked for good.
        self._lock = threading.RLock()  # gevent has one of its own; of a plain lock it has not
        self._free = threading.Condition(self._lock)
        self._idle: list[Session] = []
        self._count = 0

    def _forked(self) -> None:
        _inherited.append(self._idle)
        self._reset()

    async def take(self, until: float, *, fresh: bool) -> Session:
        session = self._reserve(until, fresh=fresh)
        if session is None:
            session = await self._dial(until)
        session.until = until
        return session

    def _reserve(self, until: float, *, fresh: bool) -> Session | None:
        """An idle session, or None with the right to make a connection."""
        with self._lock:
            while True:
                if self._closed:
                    raise _closed()
                while self._idle:
                    session = self._idle.pop()
                    if not fresh and session.wire.alive:
                        return session
                    session.wire.cut()
                    self._count -= 1
                if self._count < self._size:
                    self._count += 1
                    return None
                if not self._free.wait(until - time.monotonic()):
                    raise Crowded(self._size)

    async def _dial(self, until: float) -> Session:
        wire = None
        try:
            patience = max(0.001, until - time.monotonic())
            wire = dial_pymysql(self._options, self.where, patience, prefers_tls=self._prefers_tls)
            session = Session(wire, self.where)
            session.until = until
            await session.settle_in()
            return session
        except BaseException:
            if wire is not None:
                wire.cut()
            self._forget()
            raise

    def _forget(self) -> None:
        with self._lock:
            self._count -= 1
            self._free.notify()

    async def give(self, session: Session) -> None:
        if session.clean and not self._closed:
            with self._lock:
                self._idle.append(session)
                self._free.notify()
            return
        session.wire.cut()
        self._forget()

    async def bounded(self, work: Awaitable[T], until: float) -> T:
        del until  # each statement is bounded by its socket's time-out
        return await work

    async def pause(self, span: float) -> None:
        time.sleep(span)  # noqa: ASYNC251 - a sync store's coroutines never meet a loop

    async def aclose(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._count -= len(idle)
            self._free.notify_all()
        for session in idle:
            await session.wire.quit()


# ---------------------------------------------------------------------------------------------------- loops


class _Home:
    """What a pool has on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.idle: list[Session] = []
        self.count = 0
        self.closed = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._guard = self._until_the_loop_ends()

    async def _until_the_loop_ends(self) -> AsyncGenerator[None]:
        # A loop closes its async generators before it closes itself: the one public hook for "closed with it".
        try:
            yield
        finally:
            await self._quit()

    async def settle_in(self) -> None:
        await anext(self._guard)

    async def wait(self) -> None:
        """Until a session came back or a place became free."""
        turn = self.loop.create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.wake()  # it was our turn, and we are not going to take it
            raise

    def wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def _quit(self) -> None:
        self.closed = True
        idle, self.idle = self.idle, []
        self.count -= len(idle)
        while self._waiting:
            self.wake()
        for session in idle:
            await session.wire.quit()

    async def aclose(self) -> None:
        await self._guard.aclose()

    def abandon(self) -> None:
        """Close from another thread's request, in this loop."""
        self.closed = True
        idle, self.idle = self.idle, []
        for session in idle:
            session.wire.cut()


class LoopPool:
    """asyncmy connections of our own, per event loop."""

    colour: Literal["async"] = "async"

    def __init__(self, address: Address) -> None:
        self.where = address.where
        self._options = address.options()
        self._size = address.pool
        self._closed = False
        self._homes: dict[asyncio.AbstractEventLoop, _Home] = {}
        survive_fork(self, LoopPool._forked)

    def _forked(self) -> None:
        _inherited.append(self._homes)
        self._homes = {}

    async def _home(self) -> _Home:
        if self._closed:
            raise _closed()
        loop = asyncio.get_running_loop()
        home = self._homes.get(loop)
        if home is None or home.closed:
            for ended in [other for other, held in self._homes.items() if held.closed or other.is_closed()]:
                self._homes.pop(ended, None)
            home = self._homes[loop] = _Home(loop)
            await home.settle_in()
        return home

    async def take(self, until: float, *, fresh: bool) -> Session:
        home = await self._home()
        session = await self._reserve(home, fresh=fresh)
        if session is None:
            session = await self._dial(home, until)
        session.until = until
        return session

    async def _reserve(self, home: _Home, *, fresh: bool) -> Session | None:
        """An idle session, or None with the right to make a connection."""
        while True:
            if home.closed:
                raise _closed()
            while home.idle:
                session = home.idle.pop()
                if not fresh and session.wire.alive:
                    return session
                session.wire.cut()
                home.count -= 1
            if home.count < self._size:
                home.count += 1
                return None
            await home.wait()

    async def _dial(self, home: _Home, until: float) -> Session:
        wire = None
        try:
            wire = await dial_asyncmy(self._options, self.where)
            session = Session(wire, self.where)
            session.until = until
            await session.settle_in()
            return session
        except BaseException:
            if wire is not None:
                wire.cut()
            home.count -= 1
            home.wake()
            raise

    async def give(self, session: Session) -> None:
        home = self._homes.get(asyncio.get_running_loop())
        if home is None or home.closed or not session.clean:
            session.wire.cut()
            if home is not None:
                home.count -= 1
                home.wake()
            return
        home.idle.append(session)
        home.wake()

    async def bounded(self, work: Awaitable[T], until: float) -> T:
        async with asyncio.timeout(until - time.monotonic()):
            return await work

    async def pause(self, span: float) -> None:
        await asyncio.sleep(span)

    async def aclose(self) -> None:
        self._closed = True
        homes, self._homes = self._homes, {}
        here = asyncio.get_running_loop()
        for loop, home in homes.items():
            if loop is here:
                await home.aclose()
            elif not loop.is_closed():
                with suppress(RuntimeError):  # it closed in this very moment
                    loop.call_soon_threadsafe(home.abandon)


# -------------------------------------------------------------------------------------------------- adopted


class AdoptedPool:
    """The caller's `asyncmy.Pool`. It keeps its settings and is never closed by us."""

    colour: Literal["async"] = "async"
    where = "MariaDB/MySQL (the pool handed in)"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._pid = os.getpid()
        self._explicit: set[Session] = set()

    async def take(self, until: float, *, fresh: bool) -> Session:
        del fresh  # the pool itself drops connections that are known to be dead
        if os.getpid() != self._pid:
            raise ConfigurationError(
                "an asyncmy pool cannot be used after a fork: make it in the child process, or give semel a URL"
            )
        if self._pool._loop is not asyncio.get_running_loop():  # noqa: SLF001 - there is no public way to ask
            raise ConfigurationError(
                "an asyncmy pool belongs to the event loop it was made in: make it in this loop, or give semel a URL"
            )
        from asyncmy.errors import MySQLError

        connection = None
        try:
            connection = await self._pool.acquire()
            session = Session(adopt_asyncmy(connection), self.where)
            session.until = until
            if not connection.get_autocommit():
                # Each of our statements is a transaction of its own; given back as it was.
                await connection.autocommit(True)
                self._explicit.add(session)
            return session
        except BaseException as error:
            if connection is not None:
                await self._pool.release(connection)
            if not isinstance(error, MySQLError | OSError):
                raise
            told = unreachable(error, self.where) if connection is None else translate(error, self.where)
            raise told from error

    async def give(self, session: Session) -> None:
        wire: Any = session.wire
        connection = wire.connection
        try:
            if not session.clean:
                connection.close()
            elif session in self._explicit:
                await connection.autocommit(False)
        finally:
            self._explicit.discard(session)
            await self._pool.release(connection)

    async def bounded(self, work: Awaitable[T], until: float) -> T:
        async with asyncio.timeout(until - time.monotonic()):
            return await work

    async def pause(self, span: float) -> None:
        await asyncio.sleep(span)

    async def aclose(self) -> None:
        """Nothing is ours."""
