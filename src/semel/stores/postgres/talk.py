"""One statement to PostgreSQL and its answer, whatever happens to the connection in between.

`Talk.run` answers or raises within its deadline. A link that turns out to be dead is replaced and the statement is
sent once more: every statement of the store may run twice (claim and settle by their nonce, the others by nature;
who cannot says so).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from semel.errors import ConfigurationError, StoreUnavailable
from semel.losses import Losses
from semel.runtime import run_sync
from semel.store import Settings
from semel.stores import unfit
from semel.stores.postgres.errors import Clash, Late, Lost, NotReplicated, Trouble
from semel.stores.postgres.home import Gate, Homes, Pool, World
from semel.stores.postgres.link import Link, Row, Source
from semel.stores.postgres.sql import SCHEMA_VERSION, statements
from semel.stores.postgres.wake import Listening
from semel.stores.watchers import Watchers

__all__ = ["Talk"]

T = TypeVar("T")
_OLDER: Final = "this semel is too new for them, go on with the one that made them"


class _Home:
    """What the store has on one loop, or in one process."""

    def __init__(self, world: World, pool: Pool, listening: Listening) -> None:
        self.world = world
        self.pool = pool
        self.listening = listening
        self.gate = Gate(world)

    async def close(self) -> None:
        await self.listening.close()
        await self.pool.close()


class Talk:
    """Statements by name, on links of `source`."""

    def __init__(self, source: Source, settings: Settings, *, size: int, listens: bool) -> None:
        self.source = source
        self.watchers = Watchers()
        self.losses = Losses()
        self.listens = listens
        self._sql = statements(settings.table)
        self._settings = settings
        self._ready = False
        self._unreplicated = False
        channel, watchers = settings.table.rpartition(".")[2], self.watchers

        def make_home(world: World) -> _Home:
            listening = Listening(source, world, channel, watchers, settings.timeout)
            return _Home(world, Pool(source, world, size), listening)

        self.homes = Homes(source.colour, make_home)
        if source.colour == "sync":
            # A forgotten store closes its connections when it is collected, at the latest at exit.
            weakref.finalize(self, _close_quietly, self.homes)

    def deadline(self) -> float:
        return time.monotonic() + self._settings.timeout

    async def run(
        self, name: str, args: Sequence[Any], deadline: float, *, may_be_lost: bool = False
    ) -> Sequence[Row]:
        """The rows of a statement. Raises Locked, Unfit, StoreUnavailable or ConfigurationError.

        With `may_be_lost` it is sent once only, and Lost means that it may have run.
        """
        # The common case, without a coroutine more than it needs: a warm link, and an answer.
        home, link, tries = self.homes.found(), None, 1 if may_be_lost else 1 + self.source.spares
        if home is not None and self._ready and not self._unreplicated:
            link = home.pool.take_now()
        if home is not None and link is not None:
            try:
                rows = await link.fetch(self._sql[name], args, max(0.001, deadline - time.monotonic()))
            except Clash:
                await home.pool.give(link)
            except BaseException as error:
                tries -= 1
                if not await self._may_go_on(home, link, error, tries):
                    raise
            else:
                home.pool.give_now(link)
                return rows
        return await self._run(name, args, deadline, tries, may_be_lost=may_be_lost)

    def post(self, name: str, args: Sequence[Any]) -> Coroutine[Any, Any, Sequence[Row]] | None:
        """The rows of a statement that is sent once, on a link that is warm and idle now; None: there is none, see `run`.

        It is awaited at once. Raises as `run` does, and Clash and Lost: then it may be sent again.
        """
        home = self.homes.found()
        if home is None or not self._ready or self._unreplicated or (link := home.pool.take_now()) is None:
            return None
        return self._posted(home, link, self._sql[name], args)

    async def _posted(self, home: _Home, link: Link, sql: str, args: Sequence[Any]) -> Sequence[Row]:
        try:
            rows = await link.fetch(sql, args, self._settings.timeout)
        except BaseException as error:
            await self._may_go_on(home, link, error, 0)
            raise
        home.pool.give_now(link)
        return rows

    async def _run(
        self, name: str, args: Sequence[Any], deadline: float, tries: int, *, may_be_lost: bool
    ) -> Sequence[Row]:
        home = await self.homes.here()
        if not self._ready:
            await self._get_ready(home, deadline)
        if self._unreplicated:
            await self._catch_up(home, deadline)
        while True:
            try:
                return await self._on_a_link(
                    home, lambda link: _fetch(link, self._sql[name], args, deadline), deadline, tries
                )
            except Clash as clash:
                if time.monotonic() >= deadline:
                    raise clash.told(self.source.where) from clash
            except Lost as lost:
                if may_be_lost:
                    raise
                raise lost.told(self.source.where) from lost

    async def _on_a_link(
        self, home: _Home, use: Callable[[Link], Awaitable[T]], deadline: float, tries: int
    ) -> T:
        while True:
            link = await home.pool.take(deadline)
            try:
                answer = await use(link)
            except BaseException as error:
                tries -= 1
                if not await self._may_go_on(home, link, error, tries):
                    raise
            else:
                await home.pool.give(link)
                return answer

    async def _may_go_on(self, home: _Home, link: Link, error: BaseException, tries: int) -> bool:
        """Put the link where it belongs after an error. True: the statement may be sent again, on another link."""
        if isinstance(error, Lost):
            self.losses.tell()
            await home.pool.drop(link)
            home.pool.drop_idle()
            return tries > 0
        if isinstance(error, Trouble) and not isinstance(error, Late):
            await home.pool.give(link)  # the server answered: the link is as good as before
        else:
            await home.pool.drop(link)
        if isinstance(error, NotReplicated):
            self._unreplicated = True
        if isinstance(error, Late | NotReplicated):
            raise error.told(self.source.where) from error
        return False

    async def listen(self, deadline: float) -> None:
        """See to it that notifications of other processes arrive; where they cannot, say so in `listens`."""
        home = await self.homes.here()
        if not self._ready:
            await self._get_ready(home, deadline)
        if self.listens:
            await home.listening.ensure(max(0.0, deadline - time.monotonic()) / 2)
            if home.listening.deaf:
                self.listens = False

    # ------------------------------------------------------------------------------------------- first use
    async def _get_ready(self, home: _Home, deadline: float) -> None:
        place = await home.gate.take(deadline - time.monotonic())
        if place is None:
            raise StoreUnavailable(f"PostgreSQL at {self.source.where} did not answer in time")
        try:
            tries = 1 + self.source.spares
            while not self._ready:
                try:
                    await self._on_a_link(home, lambda link: self._greet(link, deadline), deadline, tries)
                except (
                    Clash
                ):  # under a stricter isolation level, with somebody who creates the tables as well
                    if time.monotonic() >= deadline:
                        raise
                    continue
                await home.pool.empty()  # links made before it was known whether statements stay prepared
                self._ready = True
        except Trouble as trouble:
            raise trouble.told(self.source.where) from trouble
        finally:
            home.gate.give(place)

    async def _greet(self, link: Link, deadline: float) -> None:
        """Look at who answers, and at the tables; make them when they are missing and we may."""
        pid, known = (await _fetch(link, self._sql["hello"], (), deadline))[0]
        if pid != link.greeted:
            # A pooler gives each transaction another server process: nothing stays prepared, nobody is listened to.
            self.listens = False
            self.source.prepares = False
        elif self.source.prepares is None:
            self.source.prepares = True
        if not known:
            if not self._settings.create:
                raise unfit.no_tables(
                    f"PostgreSQL at {self.source.where} has no table {self._settings.table}, and creating it was not allowed",
                    "run the output of `semel schema sql URL`",
                )
            await link.script(self._sql["schema"], max(0.001, deadline - time.monotonic()))
        found = await _fetch(link, self._sql["version"], (), deadline)
        version, unlogged, temporary = found[0] if found else (None, None, None)
        if version is None:  # as a migration has that was written from the declarations
            raise ConfigurationError(
                f"the tables {self._settings.table} in PostgreSQL at {self.source.where} have no schema version: it was deleted, or "
                "something else made them, without the columns, indexes and functions that semel needs. Drop them if they hold no "
                "records, and run the output of `semel schema sql URL`; or use another table= for this program"
            )
        if version != SCHEMA_VERSION:
            raise ConfigurationError(
                f"the tables {self._settings.table} in PostgreSQL at {self.source.where} have schema version {version}, "
                f"this semel knows version {SCHEMA_VERSION}: {_OLDER if version < SCHEMA_VERSION else 'upgrade semel'}, or use another "
                "table= for this program"
            )
        if unlogged:
            raise ConfigurationError(f"PostgreSQL at {self.source.where}: {unfit.unlogged(unlogged)}")
        if temporary:
            raise ConfigurationError(f"PostgreSQL at {self.source.where}: {unfit.temporary(temporary)}")

    async def _catch_up(self, home: _Home, deadline: float) -> None:
        """A commit was not waited for: wait until a later one is replicated, and the doubt is over."""
        sql = self._sql["barrier"]
        try:
            await self._on_a_link(
                home, lambda link: _fetch(link, sql, (), deadline), deadline, 1 + self.source.spares
            )
        except Trouble as trouble:
            raise trouble.told(self.source.where) from trouble
        self._unreplicated = False

    async def aclose(self) -> None:
        await self.homes.close()


async def _fetch(link: Link, sql: str, args: Sequence[Any], deadline: float) -> Sequence[Row]:
    return await link.fetch(sql, args, max(0.001, deadline - time.monotonic()))


def _close_quietly(homes: Homes[Any]) -> None:
    run_sync(homes.close())
