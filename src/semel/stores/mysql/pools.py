"""Where sessions come from: a pool per event loop, a pool for threads, a pool that the caller owns.

A pool gives a live session or raises: `ConfigurationError` or `StoreUnavailable` (it could not connect), `Crowded` (all
connections stayed busy). Connections are made when they are needed. Async ones belong to the loop that made them and
are closed with it; a forked child leaves all of its parent's untouched and makes its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import suppress
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

from semel.errors import ConfigurationError
from semel.forks import survive_fork
from semel.stores.mysql.address import Address
from semel.stores.mysql.errors import translate, unreachable
from semel.stores.mysql.logins import Login, UrlLogin
from semel.stores.mysql.session import Session
from semel.stores.mysql.wires import adopt_asyncmy, need
from semel.stores.places import LoopTurns, Place, Places, ThreadTurns

__all__ = ["AdoptedPool", "Crowded", "LoopPool", "Pool", "ThreadPool", "url_pool"]

T = TypeVar("T")
_Found: TypeAlias = Session | Place
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


def url_pool(address: Address) -> Pool:
    """A pool of our own connections. A driver that is not installed is refused."""
    need(address.driver)
    login = UrlLogin(address)
    return LoopPool(login) if address.driver == "asyncmy" else ThreadPool(login)


def _closed() -> ConfigurationError:
    return ConfigurationError("this store was closed: open a new one, or close it later")


class _Stock:
    """Sessions that are idle, and places for those yet to be made; the last one used is the next one taken, by who waits
    longest.

    A session keeps its place from its making to its end. To take one that is idle, and to give it back, is one call: a
    signal's handler that raises loses nothing between two. What it takes from a thread's hands is closed, and free again.
    """

    def __init__(self, size: int, turns: type[ThreadTurns[_Found] | LoopTurns[_Found]]) -> None:
        self.closed = False
        self._size = size
        self._places = Places(size)
        self._turns = turns(self._warm_or_place, self._back)
        self._idle: list[Session] = []

    async def take(self, until: float, *, fresh: bool) -> _Found:
        """An idle session, or the right to make a connection."""
        if fresh:
            self._cut_idle()  # made before one was found dead: most likely they are dead too
        found = await self._turns.wait(until - time.monotonic())
        if self.closed:
            if isinstance(found, Session):
                found.wire.cut()
            raise _closed()
        if found is None:
            raise Crowded(self._size)
        if fresh and isinstance(found, Session):
            found.wire.cut()
            return found.place
        return found

    def _warm_or_place(self) -> _Found | None:
        if self.closed:
            return Place()  # nobody waits any more: each is told
        with suppress(IndexError):  # another thread took it
            while self._idle:
                session = self._idle.pop()
                if session.wire.alive:
                    return session
                session.wire.cut()
                self._places.give(session.place)  # to us, who look for one
        return self._places.take()

    def _back(self, found: _Found) -> None:
        if isinstance(found, Session):
            self.give(found)
        else:
            self.free(found)

    def give(self, session: Session) -> None:
        if session.clean:
            self._idle.append(session)
            self._turns.ring()
        else:
            session.wire.cut()
            self.free(session.place)
        if self.closed:  # asked last: it may be closed from another thread, at any time
            self._cut_idle()

    def free(self, place: Place) -> None:
        self._places.give(place)
        self._turns.ring()

    def _cut_idle(self) -> None:
        for session in self._swept():
            session.wire.cut()
            self.free(session.place)

    def _swept(self) -> Iterator[Session]:
        with suppress(IndexError):  # none is left, or another thread took it
            while True:
                yield self._idle.pop()

    async def quit(self) -> None:
        """Close what is idle, politely; what is in use follows when it comes back."""
        self.closed = True
        self._turns.ring()
        for session in self._swept():
            await session.wire.quit()

    def abandon(self) -> None:
        """The same without a word."""
        self.closed = True
        self._turns.ring()
        self._cut_idle()


# -------------------------------------------------------------------------------------------------- threads


class ThreadPool:
    """PyMySQL connections, shared by threads."""

    colour: Literal["sync"] = "sync"

    def __init__(self, login: Login) -> None:
        self.where = login.where
        self._login = login
        self._stock = _Stock(login.size, ThreadTurns)
        survive_fork(self, ThreadPool._forked)

    def _forked(self) -> None:
        _inherited.append(self._stock)
        closed, self._stock = self._stock.closed, _Stock(self._login.size, ThreadTurns)
        self._stock.closed = closed

    async def take(self, until: float, *, fresh: bool) -> Session:
        found = await self._stock.take(until, fresh=fresh)
        session = found if isinstance(found, Session) else await self._dial(found, until)
        session.until = until
        return session

    async def _dial(self, place: Place, until: float) -> Session:
        wire = None
        try:
            patience = max(0.001, until - time.monotonic())
            wire = self._login.connect(patience)
            session = Session(wire, self.where)
            session.place, session.until = place, until
            await session.settle_in()
            return session
        except BaseException:
            if wire is not None:
                wire.cut()
            self._stock.free(place)
            raise

    async def give(self, session: Session) -> None:
        self._stock.give(session)

    async def bounded(self, work: Awaitable[T], until: float) -> T:
        del until  # each statement is bounded by its socket's time-out
        return await work

    async def pause(self, span: float) -> None:
        time.sleep(span)  # noqa: ASYNC251 - a sync store's coroutines never meet a loop

    async def aclose(self) -> None:
        await self._stock.quit()


# ---------------------------------------------------------------------------------------------------- loops


class _Home:
    """What a pool has on one event loop."""

    def __init__(self, size: int) -> None:
        self.stock = _Stock(size, LoopTurns)
        self._guard = self._until_the_loop_ends()

    async def _until_the_loop_ends(self) -> AsyncGenerator[None]:
        # A loop closes its async generators before it closes itself: the one public hook for "closed with it".
        try:
            yield
        finally:
            await self.stock.quit()

    async def settle_in(self) -> None:
        await anext(self._guard)

    async def aclose(self) -> None:
        await self._guard.aclose()


class LoopPool:
    """asyncmy connections of our own, per event loop."""

    colour: Literal["async"] = "async"

    def __init__(self, login: Login) -> None:
        self.where = login.where
        self._login = login
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
        if home is None or home.stock.closed:
            for other, held in tuple(self._homes.items()):  # those of other threads' loops come and go
                if held.stock.closed or other.is_closed():
                    self._homes.pop(other, None)
            home = self._homes[loop] = _Home(self._login.size)
            await home.settle_in()
        return home

    async def take(self, until: float, *, fresh: bool) -> Session:
        stock = (await self._home()).stock
        found = await stock.take(until, fresh=fresh)
        session = found if isinstance(found, Session) else await self._dial(stock, found, until)
        session.until = until
        return session

    async def _dial(self, stock: _Stock, place: Place, until: float) -> Session:
        wire = None
        try:
            wire = await self._login.connect_async()
            session = Session(wire, self.where)
            session.place, session.until = place, until
            await session.settle_in()
            return session
        except BaseException:
            if wire is not None:
                wire.cut()
            stock.free(place)
            raise

    async def give(self, session: Session) -> None:
        try:
            home = self._homes.get(asyncio.get_running_loop())
        except RuntimeError:  # closed when nobody ran its loop any more
            home = None
        if home is None:
            session.wire.cut()
        else:
            home.stock.give(session)

    async def bounded(self, work: Awaitable[T], until: float) -> T:
        async with asyncio.timeout(until - time.monotonic()):
            return await work

    async def pause(self, span: float) -> None:
        await asyncio.sleep(span)

    async def leave(self) -> None:
        """Close what belongs to the running loop; other loops go on."""
        home = self._homes.pop(asyncio.get_running_loop(), None)
        if home is not None:
            await home.aclose()

    async def aclose(self) -> None:
        self._closed = True
        homes, self._homes = self._homes, {}
        here = asyncio.get_running_loop()
        for loop, home in homes.items():
            if loop is here:
                await home.aclose()
            elif not loop.is_closed():
                with suppress(RuntimeError):  # it closed in this very moment
                    loop.call_soon_threadsafe(home.stock.abandon)


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
