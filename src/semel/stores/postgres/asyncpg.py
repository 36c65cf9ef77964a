"""asyncpg as a source of links: the async colour's fast driver."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Coroutine, Sequence
from math import inf
from typing import Any, Final, Literal

import asyncpg
from asyncpg.exceptions import InternalClientError

from semel.errors import ConfigurationError
from semel.stores.places import Place
from semel.stores.postgres.errors import Late, Lost, NotReplicated, Unfit, refused
from semel.stores.postgres.link import SYNC_WAIT, Lender, NotReached, Row

__all__ = ["AsyncpgLoans", "AsyncpgPool", "AsyncpgSource"]

_ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, InternalClientError)


# asyncpg asks the server about array types when it meets them first: three more trips for the first batch of a connection. Behind a
# pooler each may go to another server process, and what is meant to keep the look-up from being compiled (it turns `jit` off for the
# session) stays on one that is somebody else's. These types have had the same numbers since there are types; text[] it knows.
_ELEMENTS: Final = {
    "bool": (1000, 16),
    "bytea": (1001, 17),
    "int4": (1007, 23),
    "int8": (1016, 20),
    "float8": (1022, 701),
}
_ARRAYS: Final = [
    {
        "oid": oid, "ns": "pg_catalog", "name": f"_{name}", "kind": b"b", "basetype": None, "elemtype": element, "elemdelim": b",",
        "range_subtype": None, "attrtypoids": None, "attrnames": None, "depth": 0, "basetype_name": None, "elemtype_name": name,
        "range_subtype_name": None,
    }
    for name, (oid, element) in _ELEMENTS.items()
]  # fmt: skip


class _Watchdog:
    """Ends statements whose time is over. One timer for all of them: asyncpg's own, one per statement, costs a tenth
    of a replay."""

    def __init__(self) -> None:
        self._busy: set[_Link] = set()
        self._armed = False
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, link: _Link, now: float) -> None:
        self._busy.add(link)
        if not self._armed or now > self._due + 1.0:  # so late, a signal's handler struck it
            self._armed = True
            self._wait(now)

    def unwatch(self, link: _Link) -> None:
        self._busy.discard(link)

    def _wait(self, now: float) -> None:
        pause = min(0.1, max(0.01, min(link.until for link in self._busy) - now))
        self._due = now + pause
        if self._timer is not None:
            self._timer.cancel()  # it has rung, or never will
        self._timer = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        for link in [link for link in self._busy if link.until <= now]:
            self._busy.discard(link)
            link.overdue = True
            link.cut()
        self._armed = bool(self._busy)
        if self._armed:
            self._wait(now)


# A loop runs in one thread: its watchdog needs no lock.
_watchdogs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watchdog] = weakref.WeakKeyDictionary()


class _Link:
    __slots__ = (
        "__weakref__",
        "_bind",
        "_held_back",
        "_prepared",
        "_watchdog",
        "_where",
        "connection",
        "greeted",
        "overdue",
        "place",
        "until",
    )
    place: Place

    def __init__(self, connection: Any, where: str, *, prepares: bool = False) -> None:
        self.connection = connection
        # The statement itself rather than its text: asyncpg's search for it costs as much as a key's look-up. And straight to
        # asyncpg's protocol: a statement's own `fetch` is three coroutines more, a tenth of a replay.
        self._prepared: dict[str, Any] | None = {} if prepares else None
        protocol = getattr(connection, "_protocol", None) if prepares else None
        self._bind: Any = getattr(protocol, "bind_execute", None)
        self.greeted: int = connection.get_server_pid()
        self.until = inf
        self.overdue = False
        self._where = where
        self._held_back = False
        self._watchdog = _watchdogs.setdefault(asyncio.get_running_loop(), _Watchdog())

    def heed_notices(self) -> _Link:
        """Only on a connection of our own: a pool complains about listeners when its connection breaks."""
        self.connection.add_log_listener(self._noticed)
        return self

    def _noticed(self, _: Any, notice: Any) -> None:
        if getattr(notice, "server_source_function", "") == SYNC_WAIT:
            self._held_back = True

    @property
    def dead(self) -> bool:
        try:
            closed: bool = self.connection.is_closed()
        except asyncpg.InterfaceError:  # a pool takes a broken connection back by itself
            return True
        return closed

    async def fetch(self, sql: str, args: Sequence[Any], timeout: float) -> Sequence[Row]:
        now = time.monotonic()
        self.until = now + timeout
        self._watchdog.watch(self, now)
        try:
            statement = self._prepared.get(sql) if self._prepared is not None else None
            if statement is None:
                rows: Sequence[Row] = await self._first(sql, args)
            elif self._bind is None:
                rows = await statement.fetch(*args)
            else:
                rows = (await self._bind(statement._state, args, "", 0, True, None))[0]  # noqa: SLF001 - see __init__
        except Exception as error:
            # Of a connection that was cut in the middle asyncpg itself may stumble over what is not there any more.
            if not isinstance(error, _ERRORS) and not self.overdue and not self.dead:
                raise
            raise self._meaning(error) from error
        finally:
            self._watchdog.unwatch(self)
        if self._held_back:
            self._held_back = False
            raise NotReplicated("the commit stopped waiting for its synchronous standby")
        return rows

    async def _first(self, sql: str, args: Sequence[Any]) -> Sequence[Row]:
        rows: Sequence[Row]
        if self._prepared is None:
            rows = await self.connection.fetch(sql, *args)
        else:
            statement = self._prepared[sql] = await self.connection.prepare(sql)
            rows = await statement.fetch(*args)
        return rows

    async def script(self, sql: str, timeout: float) -> None:
        try:
            await self.connection.execute(sql, timeout=timeout)
        except _ERRORS as error:
            raise self._meaning(error) from error

    def _meaning(self, error: Exception) -> Exception:
        if self.overdue or isinstance(error, TimeoutError):
            return Late("no answer in time")
        if isinstance(error, asyncpg.PostgresError):
            return refused(error, self._where)
        if isinstance(error, ValueError):  # asyncpg's own DataError: a value that it cannot encode
            return Unfit(str(error))
        if isinstance(error, asyncpg.InterfaceError) and not self.dead:
            return RuntimeError(f"asyncpg refused a statement of semel: {error}")
        return Lost(str(error))

    def cut(self) -> None:
        if not self.dead:
            self.connection.terminate()

    async def quit(self) -> None:
        try:
            await self.connection.close(timeout=1)
        except _ERRORS:
            self.cut()


class _Ear:
    """Notifications arrive by callback; None in the queue means that the connection is gone."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()

    async def open(self, channel: str, timeout: float) -> _Ear:
        try:
            async with asyncio.timeout(timeout):
                await self._connection.add_listener(channel, self._notified)
        except _ERRORS as error:
            self._connection.terminate()
            raise NotReached(str(error)) from error
        except BaseException:
            self._connection.terminate()
            raise
        self._connection.add_termination_listener(self._ended)
        return self

    def _notified(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        self._queue.put_nowait(str(payload))

    def _ended(self, _: Any) -> None:
        self._queue.put_nowait(None)

    async def hear(self, timeout: float) -> list[str]:
        try:
            async with asyncio.timeout(timeout):
                heard = [await self._queue.get()]
        except TimeoutError:
            await self._still_there()
            return []
        while not self._queue.empty():
            heard.append(self._queue.get_nowait())
        if None in heard:
            raise Lost("the listening connection is gone")
        return [payload for payload in heard if payload is not None]

    async def _still_there(self) -> None:
        """Silence may also be a cut cable."""
        try:
            await self._connection.execute("select", timeout=2)
        except _ERRORS as error:
            raise Lost(str(error)) from error

    def stop(self) -> None:
        self._queue.put_nowait(None)

    async def quit(self) -> None:
        self._connection.remove_termination_listener(self._ended)
        try:
            await self._connection.close(timeout=1)
        except _ERRORS:
            self._connection.terminate()


_GRACE = 1.0
"""Seconds that an opening gets beyond its caller's time, so that it is not cancelled in the middle: see `AsyncpgSource._to_its_end`."""
# Strong references: the loop keeps weak ones only.
_opening: set[asyncio.Task[Any]] = set()


def _hang_up(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().terminate()


class AsyncpgSource:
    """Connections of our own, made from a URL."""

    colour: Literal["async"] = "async"
    owned = True
    spares = 1

    def __init__(
        self, dsn: str, where: str, *, server_settings: dict[str, str], prepares: bool | None
    ) -> None:
        self.where = where
        self.prepares = prepares
        self._dsn = dsn
        self._server_settings = server_settings
        self._left: set[asyncio.Task[Any]] = set()

    async def open(self, timeout: float) -> _Link:
        connection = await self._connect(timeout, statements=100 if self.prepares else 0)
        with contextlib.suppress(AttributeError):  # an asyncpg that keeps its types elsewhere looks them up
            connection._protocol.get_settings().register_data_types(_ARRAYS)  # noqa: SLF001 - there is no public way
        return _Link(connection, self.where, prepares=bool(self.prepares)).heed_notices()

    async def _connect(self, timeout: float, *, statements: int) -> Any:
        opening = asyncpg.connect(
            self._dsn,
            timeout=timeout + _GRACE,
            statement_cache_size=statements,
            max_cached_statement_lifetime=0,
            server_settings=self._server_settings,
        )
        try:
            return await self._to_its_end(opening, timeout)
        except asyncpg.exceptions.ClientConfigurationError as error:
            raise ConfigurationError(f"the URL of PostgreSQL at {self.where} is wrong: {error}") from error
        except _ERRORS as error:
            raise NotReached(str(error)) from error

    async def _to_its_end(self, opening: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """A new connection. A caller that is cancelled, or does not wait any longer, leaves it on its way, to be closed when it
        is there.

        Cancelled between TCP and TLS, asyncpg leaves a future behind whose error nobody reads, and asyncio complains.
        """
        task = asyncio.ensure_future(opening)
        _opening.add(task)
        task.add_done_callback(_opening.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout)
        except asyncio.CancelledError:
            self._leave(task)
            raise
        if not done:
            self._leave(task)
            raise TimeoutError(f"no connection within {timeout:g} s")
        return task.result()

    def _leave(self, task: asyncio.Task[Any]) -> None:
        task.add_done_callback(_hang_up)
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def rest(self) -> None:
        here = asyncio.get_running_loop()
        left = [task for task in tuple(self._left) if task.get_loop() is here]
        if not left:
            return
        _, late = await asyncio.wait(left, timeout=_GRACE)
        for task in late:  # its caller was cancelled long before his time was over
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=1)

    async def back(self, link: _Link) -> None:
        """Links of our own are kept by whoever opened them: one that is given back is over."""
        await link.quit()

    async def listen(self, channel: str, timeout: float) -> _Ear | None:
        return await _Ear(await self._connect(timeout, statements=0)).open(channel, timeout)


class AsyncpgPool:
    """An asyncpg.Pool."""

    errors: tuple[type[BaseException], ...] = _ERRORS

    def __init__(self, pool: Any) -> None:
        self.where = "the given pool"
        self._pool = pool

    @property
    def size(self) -> int:
        size: int = self._pool.get_max_size()
        return size

    async def lend(self, timeout: float) -> Any:
        return await self._pool.acquire(timeout=timeout)

    async def take_back(self, connection: Any) -> None:
        with contextlib.suppress(*_ERRORS):  # the pool has thrown a broken connection away by itself
            await self._pool.release(connection)

    async def spare(self, timeout: float) -> Any:
        # asyncpg has no public way to this. Without it waiters poll.
        make = getattr(self._pool, "_get_new_connection", None)
        if make is None:
            return None
        async with asyncio.timeout(timeout):
            return await make()


class AsyncpgLoans:
    """Connections of a pool that the caller owns: its settings stay, each goes back after its statement."""

    colour: Literal["async"] = "async"
    owned = False
    prepares: bool | None = True  # as the pool was made; not ours to change

    def __init__(self, lender: Lender) -> None:
        self.where = lender.where
        self._lender = lender

    @property
    def spares(self) -> int:
        return self._lender.size

    async def open(self, timeout: float) -> _Link:
        return _Link(await self._ask(self._lender.lend(timeout)), self.where)

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except self._lender.errors as error:
            raise NotReached(str(error)) from error

    async def rest(self) -> None:
        """Nothing of ours is on its way without somebody who waits for it."""

    async def back(self, link: _Link) -> None:
        await self._lender.take_back(link.connection)

    async def listen(self, channel: str, timeout: float) -> _Ear | None:
        connection = await self._ask(self._lender.spare(timeout))
        return None if connection is None else await _Ear(connection).open(channel, timeout)
