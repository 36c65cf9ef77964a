"""PostgreSQL's NOTIFY, for relays that are to hear of a commit in another process at once. A hint, and never more than that:
what it does not tell is found by looking, and while nobody listens the relay looks as it always does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, Protocol

from semel.errors import ConfigurationError
from semel.messaging.database import Database
from semel.messaging.events import Alarm, Emit
from semel.messaging.pauses import delay, waited

__all__ = ["Listener"]

_BACKOFF: Final = (0.25, 30.0)
_CHECK: Final = 30.0  # a connection that says nothing for so long is asked whether it still lives


class Listener:
    """A connection of its own that listens, opened again when it is lost."""

    def __init__(self, database: Database, channel: str, wake: Callable[[], None], emit: Emit) -> None:
        self._database = database
        self._channel = channel
        self._wake = wake
        self._emit = emit
        self.listening = asyncio.Event()

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`. Whatever goes wrong is told, and tried again after a while."""
        failures = 0
        while not stopping.is_set():
            try:
                link = await self._open()
                try:
                    failures = 0
                    self.listening.set()
                    self._wake()  # what was committed while nobody listened
                    await self._listen(link, stopping)
                finally:
                    self.listening.clear()
                    await link.close()
            except ConfigurationError as error:
                self._emit(Alarm("configuration", str(error)))
                return
            except Exception as error:  # noqa: BLE001 - any driver's; without a listener the relay looks by itself
                failures += 1
                self._emit(Alarm("listener", f"not listening for commits, looking instead: {error}"))
                await waited(stopping, delay(_BACKOFF, failures))

    async def _listen(self, link: _Link, stopping: asyncio.Event) -> None:
        end = asyncio.ensure_future(stopping.wait())
        try:
            while not stopping.is_set():
                heard = asyncio.ensure_future(link.heard())
                await asyncio.wait({heard, end}, timeout=_CHECK, return_when=asyncio.FIRST_COMPLETED)
                if heard.done():
                    heard.result()
                    self._wake()
                    continue
                heard.cancel()
                await asyncio.gather(heard, return_exceptions=True)
                if not stopping.is_set():
                    await link.check()
        finally:
            end.cancel()

    async def _open(self) -> _Link:
        engine: Any = self._database.any_engine
        made = _LINKS.get(engine.dialect.driver)
        if engine.dialect.name != "postgresql" or made is None:
            raise ConfigurationError(
                f"NOTIFY is heard through psycopg or asyncpg on PostgreSQL, not through {engine.dialect.driver}: give "
                'Relay(listen="postgresql+psycopg://…"), or leave notify out'
            )
        found: Any
        if self._database.engine is not None:
            found = await asyncio.to_thread(self._database.engine.raw_connection)
        else:
            found = await engine.raw_connection()
        link = made(found.driver_connection)
        found.detach()  # out of the pool: it is never given to anybody else
        try:
            await link.begin(self._channel)
        except BaseException:
            await link.close()
            raise
        return link


class _Link(Protocol):
    def __init__(self, connection: Any) -> None: ...

    async def begin(self, channel: str) -> None: ...

    async def heard(self) -> None:
        """Comes back when something was told; raises when the connection is lost."""

    async def check(self) -> None:
        """Raises unless the server answers."""

    async def close(self) -> None: ...


class _Psycopg:
    """psycopg, of either colour: its socket is watched by the loop, what came is read where it does not wait."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._awaits = asyncio.iscoroutinefunction(self._connection.execute)

    async def _do(self, verb: str, *args: Any) -> None:
        answer = getattr(self._connection, verb)
        await (answer(*args) if self._awaits else asyncio.to_thread(answer, *args))

    async def begin(self, channel: str) -> None:
        await self._do("rollback")
        await self._do("set_autocommit", True)
        await self._do("execute", f"LISTEN {channel}")

    async def heard(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        while not await self._told():
            ready.clear()
            number = self._connection.fileno()
            loop.add_reader(number, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(number)

    async def _told(self) -> bool:
        if self._awaits:
            return bool([note async for note in self._connection.notifies(timeout=0)])
        return bool(list(self._connection.notifies(timeout=0)))

    async def check(self) -> None:
        await self._do("execute", "SELECT 1")

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # it may be the lost one
            await self._do("close")


class _Asyncpg:
    """asyncpg calls back."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._news = asyncio.Event()

    async def begin(self, channel: str) -> None:
        self._connection.add_termination_listener(self._tell)
        await self._connection.add_listener(channel, self._tell)

    def _tell(self, *_: object) -> None:
        self._news.set()

    async def heard(self) -> None:
        await self._news.wait()
        self._news.clear()
        if self._connection.is_closed():
            raise ConnectionError("the server ended the listening connection")

    async def check(self) -> None:
        await self._connection.execute("SELECT 1")

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # it may be the lost one
            await self._connection.close(timeout=5)


_LINKS: Final[dict[str, type[_Link]]] = {
    "psycopg": _Psycopg,
    "psycopg_async": _Psycopg,
    "asyncpg": _Asyncpg,
}
