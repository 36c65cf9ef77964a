"""Where the PostgreSQL store lives: its connections on one event loop, or in one process for the sync colour.

Nothing connects before first use. A loop's connections end with the loop; after a fork the child starts afresh and
never touches what it inherited.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import AsyncGeneratorType
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from semel.errors import StoreUnavailable
from semel.forks import survive_fork
from semel.runtime import run_sync
from semel.stores.postgres.errors import unreachable
from semel.stores.postgres.link import Link, NotReached, Source

__all__ = ["Flag", "H", "Home", "Homes", "LoopWorld", "Pool", "Slots", "ThreadWorld", "World"]


class Slots(Protocol):
    """So many at a time, for those who have to wait."""

    def take_now(self) -> bool: ...

    async def take(self, timeout: float) -> bool: ...

    def give(self) -> None: ...


class Flag(Protocol):
    """Something that becomes true."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    async def wait(self, timeout: float) -> bool: ...


class World(Protocol):
    """What differs between threads and a loop."""

    def slots(self, number: int) -> Slots: ...

    def flag(self) -> Flag: ...

    async def pause(self, seconds: float) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Run it in the background. The result, awaited, ends it and waits for its end."""
        ...


class _ThreadSlots:
    def __init__(self, number: int) -> None:
        self._semaphore = threading.Semaphore(number)

    def take_now(self) -> bool:
        return self._semaphore.acquire(blocking=False)

    async def take(self, timeout: float) -> bool:
        return self._semaphore.acquire(timeout=max(0.0, timeout))

    def give(self) -> None:
        self._semaphore.release()


class _ThreadFlag:
    def __init__(self) -> None:
        self._event = threading.Event()
        self.set, self.clear = self._event.set, self._event.clear

    async def wait(self, timeout: float) -> bool:
        return self._event.wait(timeout)


class ThreadWorld:
    def slots(self, number: int) -> Slots:
        return _ThreadSlots(number)

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


class _LoopSlots:
    """asyncio.Semaphore cannot be taken without awaiting it, which the hot path does not want to."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take_now(self) -> bool:
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    async def take(self, timeout: float) -> bool:
        if self.take_now():
            return True
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # handed over in the moment that we gave up
                self.give()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def give(self) -> None:
        """Handed over to who waits longest: left free, it would go to who comes next, and who waits would starve."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


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
    def slots(self, number: int) -> Slots:
        return _LoopSlots(number)

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


class Pool:
    """Links by turns, last in first out, so that few stay warm. Borrowed links go back to their owner's pool."""

    def __init__(self, source: Source, world: World, size: int) -> None:
        self._source = source
        self._world = world
        self._slots = world.slots(size)
        self._idle: list[Link] = []
        self._proven = False
        self._closed = False

    def take_now(self) -> Link | None:
        """A link that is idle; None when `take` is needed."""
        if not self._idle or not self._slots.take_now():
            return None
        try:
            link = self._idle.pop()
        except IndexError:  # another thread took it
            link = None
        if link is None or link.dead:
            self._slots.give()
            return None
        return link

    def give_now(self, link: Link) -> None:
        """Back from a statement that was answered; only for links of our own."""
        self._idle.append(link)
        self._slots.give()
        if self._closed:
            self.drop_idle()

    async def take(self, deadline: float) -> Link:
        """A link by then, or StoreUnavailable / ConfigurationError."""
        if not await self._slots.take(deadline - time.monotonic()):
            raise StoreUnavailable(
                f"every connection to PostgreSQL at {self._source.where} was in use for too long: raise ?pool=, "
                "or look for slow statements"
            )
        try:
            while self._idle:
                link = self._idle.pop()
                if not link.dead:
                    return link
            return await self._open(deadline)
        except BaseException:
            self._slots.give()
            raise

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
        try:
            if not self._source.owned:
                await self._source.back(link)
            elif self._closed or link.dead:
                await link.quit()
            else:
                self._idle.append(link)
        finally:
            self._slots.give()

    async def drop(self, link: Link) -> None:
        """This link is of no more use."""
        link.cut()
        try:
            if not self._source.owned:
                await self._source.back(link)
        finally:
            self._slots.give()

    def drop_idle(self) -> None:
        """What is idle was made before a link was found dead: most likely it is dead too."""
        while self._idle:
            self._idle.pop().cut()

    async def empty(self) -> None:
        """Close what is idle, politely."""
        while self._idle:
            await self._idle.pop().quit()

    async def close(self) -> None:
        self._closed = True
        await self.empty()


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
