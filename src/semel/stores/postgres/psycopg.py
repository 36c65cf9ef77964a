"""psycopg as a source of links: the sync colour, and callers who hand in its pools (sync or async).

One set of classes serves both colours: `_Blocking` and `_Awaiting` are the few calls that differ. In the sync colour
no method suspends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any, Literal, TypeVar

import psycopg
from psycopg import waiting
from psycopg.adapt import Dumper
from psycopg.rows import tuple_row
from psycopg.types.string import BytesBinaryDumper

from semel.errors import ConfigurationError
from semel.losses import NotConnected
from semel.stores.connecting import in_time
from semel.stores.places import Place
from semel.stores.postgres.errors import Late, Lost, NotReplicated, Unfit, refused
from semel.stores.postgres.link import SYNC_WAIT, Lender, NotReached, Row

__all__ = ["PsycopgLoans", "PsycopgPool", "PsycopgSource", "T", "kind_of"]

T = TypeVar("T")
_INTERVAL = 0.1


class _TimeIsOver(Exception):
    """Not a TimeoutError: psycopg takes that, an OSError, for a broken socket."""


class _Hexadecimal(Dumper):
    """Bytes in an array, as they are. psycopg's own are written as for a literal: where standard_conforming_strings is off with
    two backslashes, and a parameter means both of them, so that no row was found by it and no lease renewed."""

    oid = psycopg.adapters.types["bytea"].oid

    def dump(self, obj: Any) -> bytes:
        return b"\\x" + bytes(obj).hex().encode()


class _Blocking:
    """psycopg's sync classes."""

    colour: Literal["sync"] = "sync"

    async def connect(self, conninfo: str, options: dict[str, Any], timeout: float) -> Any:
        return in_time(lambda: psycopg.connect(conninfo, **options), timeout, late=lambda late: late.close())

    def cursor(self, connection: Any) -> Any:
        return psycopg.RawCursor(connection, row_factory=tuple_row)

    async def wait(self, answer: Any) -> Any:
        return answer

    def bounded_wait(self, link: _Link) -> Callable[..., Any]:
        blocking, weak = _wait_function(), weakref.ref(link)

        def wait(gen: Any, interval: float = _INTERVAL, **more: Any) -> Any:
            link: Any = weak()  # whoever waits has it
            fileno = link.connection.pgconn.socket
            return blocking(link.bounded(gen), fileno, interval=min(interval, link.interval()), **more)

        return wait

    async def heard(self, connection: Any, timeout: float) -> list[str]:
        return [note.payload for note in connection.notifies(timeout=timeout, stop_after=1)]


class _Awaiting:
    """psycopg's async classes."""

    colour: Literal["async"] = "async"

    async def connect(self, conninfo: str, options: dict[str, Any], timeout: float) -> Any:
        async with asyncio.timeout(timeout):
            return await psycopg.AsyncConnection.connect(conninfo, **options)

    def cursor(self, connection: Any) -> Any:
        return psycopg.AsyncRawCursor(connection, row_factory=tuple_row)

    async def wait(self, answer: Any) -> Any:
        return await answer

    def bounded_wait(self, link: _Link) -> Callable[..., Any]:
        # psycopg's own would, when cancelled, first try to cancel the statement, for up to ten seconds.
        # A link whose statement was given up is cut anyway.
        weak = weakref.ref(link)

        async def wait(gen: Any, interval: float = _INTERVAL, **more: Any) -> Any:
            link: Any = weak()  # whoever waits has it
            fileno = link.connection.pgconn.socket
            interval = min(interval, link.interval())
            return await waiting.wait_async(link.bounded(gen), fileno, interval=interval, **more)

        return wait

    async def heard(self, connection: Any, timeout: float) -> list[str]:
        return [note.payload async for note in connection.notifies(timeout=timeout, stop_after=1)]


_Kind = _Blocking | _Awaiting


def kind_of(colour: Literal["sync", "async"]) -> _Kind:
    return _Blocking() if colour == "sync" else _Awaiting()


class _Link:
    place: Place

    def __init__(
        self, connection: Any, kind: _Kind, where: str, *, prepare: bool | None, own: bool = False
    ) -> None:
        self.connection = connection
        self.prepare = prepare
        self.greeted: int = connection.info.backend_pid
        self._kind = kind
        self._where = where
        self.restore = False
        self._until = inf
        self._held_back = False
        self._doubles = connection.info.parameter_status("standard_conforming_strings") == "off"
        if own:
            # Not at exit: a forked child would say goodbye on its parent's connection.
            weakref.finalize(self, connection.pgconn.finish).atexit = False
        # Its connection does not hold the link: one that is lost must go at once, not when a full collection comes.
        self._handler = _noticing(weakref.ref(self))
        connection.add_notice_handler(self._handler)
        # psycopg's statements have no timeout: the generator that carries one is given an end of its own.
        connection.wait = kind.bounded_wait(self)

    def _noticed(self, notice: Any) -> None:
        if notice.source_function == SYNC_WAIT:
            self._held_back = True

    def interval(self) -> float:
        return max(0.001, min(_INTERVAL, self._until - time.monotonic()))

    def bounded(self, gen: Any) -> Any:
        """The same generator, ending when the statement's time is over."""
        try:
            state = next(gen)
            while True:
                ready = yield state
                if not ready and time.monotonic() >= self._until:
                    raise _TimeIsOver
                state = gen.send(ready)
        except StopIteration as stop:
            return stop.value
        finally:
            gen.close()

    @property
    def dead(self) -> bool:
        closed: bool = self.connection.closed
        return closed

    async def fetch(self, sql: str, args: Sequence[Any], timeout: float) -> Sequence[Row]:
        self._until = time.monotonic() + timeout
        cursor = self._kind.cursor(self.connection)
        if self._doubles:
            cursor.adapters.register_dumper(bytes, _Hexadecimal)
            cursor.adapters.register_dumper(bytes, BytesBinaryDumper)  # outside of arrays, as it was
        rows: Sequence[Row] = await self._ask(cursor, sql, args)
        if self._held_back:
            self._held_back = False
            raise NotReplicated("the commit stopped waiting for its synchronous standby")
        return rows

    async def script(self, sql: str, timeout: float) -> None:
        self._until = time.monotonic() + timeout
        await self._ask(self._kind.cursor(self.connection), sql, None)

    async def heard(self, timeout: float) -> list[str]:
        """Payloads of notifications, as soon as there is one."""
        self._until = inf
        return await self._kind.heard(self.connection, timeout)

    async def look(self, timeout: float) -> None:
        """Silence may also be a cut cable: Lost when nobody answers."""
        try:
            await self.script("select", timeout)
        except Late as late:
            raise Lost(str(late)) from late

    async def _ask(self, cursor: Any, sql: str, args: Sequence[Any] | None) -> Any:
        wait = self._kind.wait
        try:
            if args is None:
                await wait(cursor.execute(sql.encode()))
                return ()
            await wait(cursor.execute(sql.encode(), args, prepare=self.prepare, binary=True))
            return await wait(cursor.fetchall()) if cursor.description else ()
        except psycopg.Error as error:
            raise self._meaning(error) from error
        except UnicodeEncodeError as error:
            raise Unfit(str(error)) from error
        except _TimeIsOver as error:
            raise Late("no answer in time") from error
        except OSError as error:
            raise Lost(str(error)) from error

    def _meaning(self, error: psycopg.Error) -> Exception:
        if error.sqlstate:
            return refused(error, self._where)
        if isinstance(error, psycopg.DataError):
            return Unfit(str(error))
        if isinstance(error, psycopg.OperationalError) or self.dead:
            return Lost(str(error))
        return RuntimeError(f"psycopg refused a statement of semel: {error}")

    def free(self) -> Any:
        """The connection without anything of ours on it."""
        self.connection.remove_notice_handler(self._handler)
        del self.connection.wait
        return self.connection

    def cut(self) -> None:
        _shut(self.connection)
        self._close()

    async def quit(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self.connection.closed:
            self.connection.pgconn.finish()


def _noticing(weak: weakref.ref[_Link]) -> Callable[[Any], None]:
    def noticed(notice: Any) -> None:
        if (link := weak()) is not None:
            link._noticed(notice)  # noqa: SLF001 - our own

    return noticed


def _wait_function() -> Any:
    """Psycopg chooses its way to wait when it is imported, which may be before gevent patches the process (preload)."""
    patched = sys.modules.get("gevent.monkey")
    if patched is not None and patched.is_module_patched("select"):
        return waiting.wait_poll
    return waiting.wait


def _shut(connection: Any) -> None:
    """End both directions of the socket: whoever reads it gets up, and libpq has nobody left to say goodbye to."""
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=socket.dup(connection.pgconn.socket)) as own,
    ):
        own.shutdown(socket.SHUT_RDWR)


class _Ear:
    def __init__(self, link: _Link) -> None:
        self._link = link
        self._stopped = False

    async def open(self, channel: str, timeout: float) -> _Ear:
        try:
            await self._link.script(f'listen "{channel}"', timeout)
        except BaseException:
            self._link.cut()
            raise
        return self

    async def hear(self, timeout: float) -> list[str]:
        if self._stopped:
            raise Lost("the ear was closed")
        try:
            heard = await self._link.heard(timeout)
        except (psycopg.Error, OSError) as error:
            raise Lost(str(error)) from error
        if not heard:
            await self._link.look(2.0)
        return heard

    def stop(self) -> None:
        self._stopped = True
        _shut(self._link.connection)

    async def quit(self) -> None:
        await self._link.quit()


class PsycopgSource:
    """Connections of our own, made from a URL."""

    owned = True
    spares = 1

    def __init__(
        self,
        conninfo: str,
        where: str,
        *,
        server_settings: dict[str, str],
        colour: Literal["sync", "async"],
        prepares: bool | None,
    ) -> None:
        self.where = where
        self.prepares = prepares
        self._conninfo = conninfo
        self._options: dict[str, Any] = {
            "autocommit": True,
            "application_name": server_settings["application_name"],
            "client_encoding": "UTF8",  # a database of SQL_ASCII would give every text as bytes
        }
        if path := server_settings.get("search_path"):
            self._options["options"] = f"-c search_path={path}"
        self._kind = kind_of(colour)

    @property
    def colour(self) -> Literal["sync", "async"]:
        return self._kind.colour

    async def open(self, timeout: float) -> _Link:
        options = {**self._options, "connect_timeout": max(2, int(timeout))}
        try:
            connection = await self._kind.connect(self._conninfo, options, timeout)
        except (psycopg.Error, OSError) as error:
            raise NotReached(str(error)) from error
        return _Link(connection, self._kind, self.where, prepare=bool(self.prepares), own=True)

    async def rest(self) -> None:
        """Nothing of ours is on its way without somebody who waits for it."""

    async def back(self, link: _Link) -> None:
        """Links of our own are kept by whoever opened them: one that is given back is over."""
        await link.quit()

    async def listen(self, channel: str, timeout: float) -> _Ear | None:
        return await _Ear(await self.open(timeout)).open(channel, timeout)


class PsycopgPool:
    """A pool of psycopg_pool, sync or async."""

    errors: tuple[type[BaseException], ...] = (psycopg.Error, OSError)

    def __init__(self, pool: Any, *, colour: Literal["sync", "async"]) -> None:
        self.where = "the given pool"
        self._pool = pool
        self._kind = kind_of(colour)

    @property
    def size(self) -> int:
        size: int = self._pool.max_size
        return size

    async def lend(self, timeout: float) -> Any:
        try:
            return await self._kind.wait(self._pool.getconn(timeout))
        except psycopg.OperationalError as error:
            if "not open yet" in str(error):  # psycopg_pool has the same class for one that was closed
                raise NotConnected(
                    f"{self.where} was never opened ({error}): open the pool first (pool.open(), or `with pool:`)"
                ) from error
            raise

    async def take_back(self, connection: Any) -> None:
        await self._kind.wait(self._pool.putconn(connection))

    async def spare(self, timeout: float) -> Any:
        conninfo, options = self._pool.conninfo, self._pool.kwargs or {}
        if not isinstance(conninfo, str) or callable(options):
            return None  # made anew for each connection: only the pool knows how; waiters poll
        return await self._kind.connect(conninfo, dict(options), timeout)


class PsycopgLoans:
    """Connections of a pool that the caller owns: each goes back after its statement, as it was."""

    owned = False
    prepares: bool | None = True  # as the pool's connections are made; not ours to change

    def __init__(self, lender: Lender, *, colour: Literal["sync", "async"]) -> None:
        self.where = lender.where
        self._lender = lender
        self._kind = kind_of(colour)

    @property
    def spares(self) -> int:
        return self._lender.size

    @property
    def colour(self) -> Literal["sync", "async"]:
        return self._kind.colour

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except self._lender.errors as error:
            raise NotReached(str(error)) from error

    async def open(self, timeout: float) -> _Link:
        connection = await self._ask(self._lender.lend(timeout))
        if connection.info.parameter_status("client_encoding") == "SQL_ASCII":
            await self._lender.take_back(connection)
            raise ConfigurationError(
                f"the connections of {self.where} have client_encoding SQL_ASCII, where psycopg gives every text as bytes: make them "
                'with client_encoding="UTF8", or give semel a URL'
            )
        link = _Link(connection, self._kind, self.where, prepare=None)
        if not connection.autocommit:
            await self._kind.wait(connection.set_autocommit(True))
            link.restore = True
        return link

    async def rest(self) -> None:
        """Nothing of ours is on its way without somebody who waits for it."""

    async def back(self, link: _Link) -> None:
        connection = link.free()
        if link.restore and not connection.closed:
            await self._kind.wait(connection.set_autocommit(False))
        await self._lender.take_back(connection)

    async def listen(self, channel: str, timeout: float) -> _Ear | None:
        connection = await self._ask(self._lender.spare(timeout))
        if connection is None:
            return None
        if not connection.autocommit:
            await self._kind.wait(connection.set_autocommit(True))
        return await _Ear(_Link(connection, self._kind, self.where, prepare=None)).open(channel, timeout)
