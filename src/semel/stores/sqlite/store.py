"""Records in an SQLite file: nothing to install, many processes on one machine, durable when it answers.

`sqlite:///relative.db`, `sqlite:////absolute.db`. Write-ahead log, synchronous=FULL. A claim looks first, on a
connection for reading, and takes the write lock only if there is something to write: a replay never does. Writes
of all threads and loops of a process share one commit. The clock is the process's: all users of a file are on
one machine. Across processes nobody is woken (`notifies` is false); a look at a key costs microseconds.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from semel.errors import ConfigurationError, StoreUnavailable
from semel.keys import Scope
from semel.model import Answer, Ask, Kind, Note, Record, Renewal, Settle, Verdict
from semel.store import Capabilities, Colour, Facts, Page, Query, Settings, Unwatch
from semel.stores.sqlite.desk import Desk
from semel.stores.sqlite.errors import explain, is_busy
from semel.stores.sqlite.facts import read_facts
from semel.stores.sqlite.file import DatabaseFile
from semel.stores.sqlite.poster import SqlitePoster
from semel.stores.sqlite.records import Records
from semel.stores.sqlite.schema import check_table, ensure_schema, schema_sql
from semel.stores.sqlite.writer import Job

__all__ = ["SqliteStore", "adopt", "open_url", "schema_sql"]

T = TypeVar("T")
_FORMS: Final = "write sqlite:///relative.db or sqlite:////absolute/path.db"


def open_url(url: str, settings: Settings, colour: Colour) -> SqliteStore:
    """A store on the file that the URL names; nothing is opened or created before its first use."""
    return SqliteStore(_path(url), settings, colour)


def adopt(client: object, settings: Settings, colour: Colour) -> NoReturn:
    """Refused: one connection cannot both hold a caller's transaction and commit records on its own."""
    del client, settings, colour
    raise ConfigurationError(
        "semel opens its own connections to SQLite: pass the file's URL (sqlite:///file.db) instead of a connection; to "
        "commit a record together with your own rows, use within(connection)"
    )


def _path(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ConfigurationError(f"{url!r} is not an SQLite URL: {_FORMS}")
    if scheme != "sqlite":
        raise ConfigurationError(
            f"the URL scheme {scheme!r} names a driver; semel uses Python's own sqlite3 in both colours: {_FORMS}"
        )
    rest, question, _ = rest.partition("?")
    if question:
        raise ConfigurationError(
            f"an SQLite URL takes no options after '?': {_FORMS} and pass settings as arguments"
        )
    if rest in {"", "/"} or ":memory:" in rest:
        raise ConfigurationError(
            "an SQLite database in memory would be another one for each connection: use memory:// (gone with the "
            f"process), or {_FORMS}"
        )
    if not rest.startswith("/"):
        raise ConfigurationError(
            f"an SQLite URL has no host ({rest.partition('/')[0]!r} stands in its place): {_FORMS}"
        )
    if "\0" in rest or rest.startswith("/file:"):
        raise ConfigurationError(f"{rest[1:]!r} cannot be a file name here: {_FORMS}")
    try:
        os.fsencode(rest)
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{rest[1:]!r} cannot be a file name here ({error}): {_FORMS}") from error
    return os.path.realpath(rest[1:])


class SqliteStore:
    """One colour's view of a file; stores of both colours on one file share its connections and its writer."""

    # No `batches`: the desk gathers the calls of a tick, and answers each one by itself.
    capabilities = Capabilities(durable=True, shared=True, joins_transactions=True)

    def __init__(self, path: str, settings: Settings, colour: Colour) -> None:
        self.colour: Colour = "sync" if colour == "sync" else "async"
        self._settings = settings
        self._timeout = settings.timeout
        self._records = Records(check_table(settings.table))
        self._file = DatabaseFile.at(path)
        self._epoch: object = None
        self._closed = False
        self._last_desk: Desk | None = None
        self._desks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Desk] = weakref.WeakKeyDictionary()
        self._guards: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[None]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def path(self) -> str:
        """The file, for those who must know whether another connection is of the same one."""
        return self._file.path

    @property
    def _skew(self) -> float:
        """Moves the store's clock, for tests."""
        return self._records.skew

    @_skew.setter
    def _skew(self, seconds: float) -> None:
        self._records.skew = seconds

    # -------------------------------------------------------------------------------------- verbs
    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        if len(asks) == 1 and self.colour == "async":
            if self._epoch is not self._file.epoch:
                await self._ready()
            desk, loop = self._desk()
            return [await desk.claim(asks[0], loop)]
        deadline = await self._ready()
        records = self._records
        verdicts: list[Any] = await self._read(partial(records.look_all, asks=asks), deadline)
        open_at = [at for at, verdict in enumerate(verdicts) if verdict is None]
        if open_at:
            job = Job(
                records.claim, [asks[at] for at in open_at], deadline, together=records.claim_all, alike=True
            )
            for at, verdict in zip(open_at, await self._write(job), strict=True):
                verdicts[at] = verdict
        return verdicts

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        if not ends:
            return []
        if len(ends) == 1 and self.colour == "async":
            if self._epoch is not self._file.epoch:
                await self._ready()
            desk, loop = self._desk()
            return [await desk.settle(ends[0], loop)]
        deadline = await self._ready()
        records, wake = self._records, partial(self._file.wake, ends)
        alike = all(end.kind is Kind.DONE for end in ends)
        return await self._write(Job(records.settle, ends, deadline, wake, records.settle_all, alike=alike))

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        if not renewals:
            return []
        return await self._write(Job(self._records.renew, renewals, await self._ready()))

    async def note(self, note: Note) -> Answer:
        answer: Answer = await self._one(self._records.note, note, await self._ready())
        return answer

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        deadline = await self._ready()
        return await self._read(lambda db: self._records.peek(db, scope), deadline)

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        leave = self._file.watch(scope.hash, wake)

        async def unwatch() -> None:
            leave()

        return unwatch

    async def scan(self, query: Query) -> Page:
        deadline = await self._ready()
        return await self._blocking(self._file.read, lambda db: self._records.scan(db, query), deadline)

    async def purge(self, limit: int) -> int:
        deadline = await self._ready()
        removed, more = 0, True
        while more and removed < limit and time.monotonic() < deadline:
            gone, more = await self._one(self._records.purge, limit - removed, deadline)
            removed += gone
        return removed

    async def facts(self) -> Facts:
        deadline = await self._ready()
        return await self._blocking(self._file.read, lambda db: read_facts(db, self._file.path), deadline)

    async def aclose(self) -> None:
        self._closed, self._epoch = True, None
        await self._blocking(self._file.leave, self)
        if self.colour == "async":
            guard = self._guards.pop(asyncio.get_running_loop(), None)
            if guard is not None:
                await guard.aclose()

    # ---------------------------------------------------------------------------------- two colours
    def poster(self) -> SqlitePoster | None:
        """The quick way, for the flow of one event loop; threads write by themselves."""
        return SqlitePoster(self) if self.colour == "async" else None

    def _desk(self) -> tuple[Desk, asyncio.AbstractEventLoop]:
        """Where the calls of the running loop are gathered."""
        loop = asyncio.get_running_loop()
        desk = self._last_desk
        if desk is None or desk.loop() is not loop:
            desk = self._desks.get(loop)
            if desk is None:
                desk = self._desks[loop] = Desk(loop, self._file, self._records, self._timeout)
            self._last_desk = desk
        return desk, loop

    async def _read(self, work: Callable[[sqlite3.Connection], T], deadline: float) -> T:
        if self.colour == "sync":
            return self._file.read(work, deadline)
        # In the loop itself: a look at a key takes less time than handing it to a thread.
        try:
            return self._file.read_now(work)
        except sqlite3.Error as error:
            if not is_busy(error):
                raise explain(error, self._file.path) from error
        return await self._blocking(self._file.read, work, deadline)

    async def _write(self, job: Job) -> list[Any]:
        if self.colour == "sync":
            return self._file.writer.commit(job)
        return await self._file.writer.commit_async(job)

    async def _one(
        self, step: Callable[[sqlite3.Connection, Any], Any], item: object, deadline: float
    ) -> Any:
        answer = (await self._write(Job(step, (item,), deadline)))[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _blocking(self, call: Callable[..., T], *args: Any) -> T:
        """For what may take longer than a look: in a thread, when the caller has a loop."""
        if self.colour == "sync":
            return call(*args)
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)

    # ---------------------------------------------------------------------------- opening, ending
    async def _ready(self) -> float:
        """Open the file if it is not; the time by which this call must be answered."""
        deadline = time.monotonic() + self._timeout
        if self._epoch is not self._file.epoch:
            await self._open(deadline)
        return deadline

    async def _open(self, deadline: float) -> None:
        if self._closed:
            raise StoreUnavailable(f"this store on {self._file.path!r} is closed: open a new one")
        if self.colour == "async":
            await self._stay_with_loop()
        self._epoch = await self._blocking(
            self._file.open, self, self._check, self._settings.create, deadline
        )

    def _check(self, db: sqlite3.Connection, deadline: float) -> None:
        ensure_schema(db, self._settings.table, create=self._settings.create, deadline=deadline)

    async def _stay_with_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop not in self._guards:
            guard = self._guards[loop] = _until_the_loop_ends(weakref.ref(self), loop)
            await anext(guard)

    def leave_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop ends: close what it opened. Another loop that still uses the store opens it again by itself."""
        self._guards.pop(loop, None)
        self._epoch = None
        self._file.leave(self)


async def _until_the_loop_ends(
    store: weakref.ref[SqliteStore], loop: asyncio.AbstractEventLoop
) -> AsyncGenerator[None]:
    # A loop closes its async generators before it closes itself: the one public hook for "closed with it".
    try:
        yield
    finally:
        there = store()
        if there is not None:
            there.leave_loop(loop)
