"""Where the PostgreSQL store lives: its connections on one event loop, or in one process for the sync colour.

Nothing connects before first use. A loop's connections end with the loop; after a fork the child starts afresh and
never touches what it inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from types import AsyncGeneratorType
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from semel.bell import Bell
from semel.errors import StoreUnavailable
from semel.forks import survive_fork
from semel.runtime import run_sync
from semel.stores.places import LoopTurns, Place, Places, T, ThreadTurns, Turns
from semel.stores.postgres.errors import unreachable
from semel.stores.postgres.link import Link, NotReached, Source

__all__ = ["Flag", "Gate", "H", "Home", "Homes", "LoopWorld", "Pool", "ThreadWorld", "World"]


class Flag(Protocol):
    """Something that becomes true."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    async def wait(self, timeout: float) -> bool: ...


class World(Protocol):
    """What differs between threads and a loop."""

    def turns(self, look: Callable[[], T | None], back: Callable[[T], None]) -> Turns[T]:
        """Those who wait until `look` finds something."""
        ...

    def flag(self) -> Flag: ...

    async def pause(self, seconds: float) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Run it in the background. The result, awaited, ends it and waits for its end."""
        ...


class _ThreadFlag:
    """A bell for each who waits. An event is waited for in Python, under a lock that a signal's handler which raises there
    leaves behind."""

    def __init__(self) -> None:
        self._up = False
        self._waiting: list[Bell] = []

    def set(self) -> None:
        self._up = True
        with contextlib.suppress(IndexError):  # the last of them has just given up
            while self._waiting:
                self._waiting.pop().ring()

    def clear(self) -> None:
        self._up = False

    async def wait(self, timeout: float) -> bool:
        bell = Bell()
        try:
            self._waiting.append(bell)
            # Looked at with the bell in its place: whoever sets it from here on rings it.
            return self._up or bell.heard(timeout)
        finally:
            with contextlib.suppress(ValueError):  # rung
                self._waiting.remove(bell)


class ThreadWorld:
    def turns(self, look: Callable[[], T | None], back: Callable[[T], None]) -> Turns[T]:
        return ThreadTurns(look, back)

    def flag(self) -> Flag:
        return _ThreadFlag()

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - the sync colour: there is no loop to block

    def spawn(self, work: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        thread = threading.Thread(target=run_sync, args=(work,), name="semel-postgres-listen", daemon=True)
        thread.start()

        async def end() -> None:
            if thread is not threading.current_thread():
                thread.join(2.0)

        return end


class _LoopFlag:
    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.set, self.clear = self._event.set, self._event.clear

    async def wait(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                return await self._event.wait()
        except TimeoutError:
            return False


class LoopWorld:
    def turns(self, look: Callable[[], T | None], back: Callable[[T], None]) -> Turns[T]:
        return LoopTurns(look, back)

    def flag(self) -> Flag:
        return _LoopFlag()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def spawn(self, work: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        task = asyncio.get_running_loop().create_task(work)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task], timeout=2.0)

        return end


class Gate:
    """One at a time."""

    def __init__(self, world: World) -> None:
        self._places = Places(1)
        self._turns = world.turns(self._places.take, self.give)

    async def take(self, timeout: float) -> Place | None:
        return await self._turns.wait(timeout)

    def give(self, place: Place) -> None:
        self._places.give(place)
        self._turns.ring()


class Pool:
    """Links by turns, last in first out, so that few stay warm. Borrowed links go back to their owner's pool.

    A link keeps its place from its making to its end. To take one that is idle, and to give it back, is one call: a signal's
    handler that raises loses nothing between two.
    """

    def __init__(self, source: Source, world: World, size: int) -> None:
        self._source = source
        self._world = world
        self._places = Places(size)
        self._turns: Turns[Link | Place] = world.turns(self._warm_or_place, self._back)
        self._idle: list[Link] = []
        self._proven = False
        self._closed = False

    def take_now(self) -> Link | None:
        """A link that is idle; None when `take` is needed."""
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if not link.dead:
                return link
            link.cut()
            self._places.give(link.place)  # to us, who look for one
        return None

    def give_now(self, link: Link) -> None:
        """Back from a statement that was answered; only for links of our own."""
        self._idle.append(link)
        self._turns.ring()
        if self._closed:
            self.drop_idle()

    async def take(self, deadline: float) -> Link:
        """A link by then, or StoreUnavailable / ConfigurationError."""
        found = await self._turns.wait(deadline - time.monotonic())
        if found is None:
            raise StoreUnavailable(
                f"every connection to PostgreSQL at {self._source.where} was in use for too long: raise ?pool=, "
                "or look for slow statements"
            )
        if not isinstance(found, Place):
            return found
        try:
            link = await self._open(deadline)
            link.place = found
        except BaseException:
            self._free(found)
            raise
        return link

    def _warm_or_place(self) -> Link | Place | None:
        return self.take_now() or self._places.take()

    def _back(self, found: Link | Place) -> None:
        if isinstance(found, Place):
            self._free(found)
        else:
            self.give_now(found)

    def _free(self, place: Place) -> None:
        self._places.give(place)
        self._turns.ring()

    async def _open(self, deadline: float) -> Link:
        refusal: Exception | None = None
        while True:
            try:
                link = await self._source.open(max(0.001, deadline - time.monotonic()))
            except NotReached as error:
                cause = error.__cause__ or error
                told, pointless = unreachable(cause, self._source.where, proven=self._proven)
                if refusal is None or not isinstance(cause, TimeoutError):
                    refusal = told  # a last try that was cut short says less than the one before
                if pointless or time.monotonic() + 0.05 >= deadline:
                    raise refusal from refusal.__cause__
                await self._world.pause(0.05)
            else:
                self._proven = True
                return link

    async def give(self, link: Link) -> None:
        if self._source.owned and not self._closed and not link.dead:
            self.give_now(link)
            return
        try:
            await (link.quit() if self._source.owned else self._source.back(link))
        finally:
            self._free(link.place)

    async def drop(self, link: Link) -> None:
        """This link is of no more use."""
        try:
            link.cut()
            if not self._source.owned:
                await self._source.back(link)
        finally:
            self._free(link.place)

    def drop_idle(self) -> None:
        """What is idle was made before a link was found dead: most likely it is dead too."""
        for link in self._swept():
            link.cut()
            self._free(link.place)

    async def empty(self) -> None:
        """Close what is idle, politely."""
        for link in self._swept():
            try:
                await link.quit()
            finally:
                self._free(link.place)

    def _swept(self) -> Iterator[Link]:
        with contextlib.suppress(IndexError):  # none is left, or another thread took it
            while True:
                yield self._idle.pop()

    async def close(self) -> None:
        self._closed = True
        await self.empty()
        await self._source.rest()


class Home(Protocol):
    async def close(self) -> None: ...


H = TypeVar("H", bound=Home)

# What a forked child inherited. Kept alive on purpose: finalizing it would touch sockets that the parent uses.
_inherited: Final[list[object]] = []


class Homes(Generic[H]):
    """One home per running loop; one for all threads in the sync colour."""

    def __init__(self, colour: Literal["sync", "async"], make: Callable[[World], H]) -> None:
        self._sync = colour == "sync"
        self._make = make
        self._lock = threading.Lock()
        self._homes: dict[object, H] = {}
        self._guards: dict[object, AsyncGenerator[None]] = {}
        survive_fork(self, Homes._abandon)

    def _abandon(self) -> None:
        _inherited.append((self._homes, self._guards))
        self._lock = threading.Lock()
        self._homes, self._guards = {}, {}

    def found(self) -> H | None:
        return self._homes.get(None if self._sync else asyncio.get_running_loop())

    async def here(self) -> H:
        return self.found() or await self._settle_in(None if self._sync else asyncio.get_running_loop())

    async def _settle_in(self, place: asyncio.AbstractEventLoop | None) -> H:
        with self._lock:
            home = self._homes.get(place)
            if home is not None:
                return home
            home = self._homes[place] = self._make(ThreadWorld() if place is None else LoopWorld())
            if place is None:
                return home
            guard = self._guards[place] = self._until_the_loop_ends(place)
        await anext(guard)
        return home

    async def _until_the_loop_ends(self, place: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        # A loop closes its async generators before it closes itself: the one public hook for "closed with it".
        try:
            yield
        finally:
            await self._leave(place)

    async def _leave(self, place: object) -> None:
        with self._lock:
            home = self._homes.pop(place, None)
        if home is not None:
            await home.close()

    async def close(self) -> None:
        """Close what belongs here: everything in the sync colour, this loop's home in the async one."""
        place = None if self._sync else asyncio.get_running_loop()
        await self._leave(place)
        guard = self._guards.pop(place, None)
        # Unless the loop is closing it right now.
        if isinstance(guard, AsyncGeneratorType) and not guard.ag_running:
            await guard.aclose()
