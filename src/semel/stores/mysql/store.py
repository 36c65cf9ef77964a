"""Records in MariaDB or MySQL (InnoDB). One body for both colours: asyncmy for async, PyMySQL for sync.

Every verb is: read without locking, decide with `model`, write one statement that holds only if the row is still the one
that was read; otherwise read again. The owner's settle, renewal and note skip the reading, for their condition
(own nonce, still running) fits into the statement. So a replay never writes, no lock outlives a statement, and every
verb may be sent again: a reply that was lost shows up as our own nonce.

A key that another transaction holds (`within`) is asked for again for 50 ms and is then `Busy`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, Final, Literal, TypeVar

from semel.errors import ConfigurationError, StoreUnavailable
from semel.keys import Scope
from semel.losses import Losses
from semel.model import Answer, Ask, Note, Record, Renewal, Settle, State, Verdict
from semel.store import Capabilities, Colour, Facts, Page, Query, Settings, Unwatch
from semel.stores.mysql import verbs as verbs
from semel.stores.mysql.address import parse
from semel.stores.mysql.errors import Duplicate, Locked, Lost, lacks_tables
from semel.stores.mysql.pools import AdoptedPool, Crowded, LoopPool, Pool, url_pool
from semel.stores.mysql.rows import Statements, event_from, placeholder, seconds, statements
from semel.stores.mysql.server import prepare, read_facts, schema_sql
from semel.stores.mysql.session import Session
from semel.stores.mysql.table import Table
from semel.stores.mysql.verbs import Patience
from semel.stores.mysql.wires import need
from semel.stores.queries import matches, page_start, states_of
from semel.stores.watchers import Watchers

__all__ = ["MysqlStore", "adopt", "open_url", "schema_sql"]

T = TypeVar("T")
I = TypeVar("I", Ask, Settle, Renewal)  # noqa: E741 - an item
# The states a row may have to read as another one: lapsed runs read as unknown, ended outcomes as expired.
_STORED: Final = {
    State.UNKNOWN: (State.UNKNOWN, State.RUNNING),
    State.EXPIRED: (State.DONE, State.FAILED),
}
_CHUNK: Final = 500  # records that purge drops in one statement


def open_url(url: str, settings: Settings, colour: Colour) -> MysqlStore:
    """A store that makes its own connections, on first use."""
    return MysqlStore(url_pool(parse(url, colour)), settings)


def adopt(client: Any, settings: Settings, colour: Colour) -> MysqlStore:
    """A store on the caller's `asyncmy.Pool`, which is never closed by us."""
    if type(client).__module__.partition(".")[0] == "pymysql":
        raise ConfigurationError(
            "a PyMySQL connection is one transaction of one thread and cannot serve as a store: give semel a URL "
            "(mysql+pymysql://…), and use once.within(connection) to join this connection's transaction"
        )
    need("asyncmy")
    from asyncmy.pool import Pool as DriverPool

    if not isinstance(client, DriverPool):
        raise ConfigurationError(
            f"semel cannot use an asyncmy {type(client).__name__} as a store: hand in an asyncmy.Pool or a URL "
            "(a connection is for once.within)"
        )
    if colour == "sync":
        raise ConfigurationError(
            "an asyncmy pool is async: use AsyncSemel, or give Semel a URL (mysql+pymysql://…)"
        )
    return MysqlStore(AdoptedPool(client), settings)


class MysqlStore:
    """See `semel.store.Store`."""

    capabilities = Capabilities(
        durable=True, shared=True, joins_transactions=True, batches=True, server_clock=True
    )

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self._pool = pool
        self._settings = settings
        self._words = statements(settings.table)
        self._moved = 0.0
        self._limit = 0
        """The server's max_allowed_packet; 0 until the tables were looked at."""
        self._proven = False
        self.losses = Losses()
        self._watchers = Watchers()

    @property
    def colour(self) -> Literal["sync", "async"]:
        return self._pool.colour

    @property
    def _skew(self) -> float:
        """How far tests have moved the store's clock, in seconds."""
        return self._moved

    @_skew.setter
    def _skew(self, value: float) -> None:
        self._moved = value
        self._words = Statements(self._settings.table, value)

    # ------------------------------------------------------------------------------------------- hot verbs
    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        async def work(batch: Sequence[Ask], table: Table) -> list[Verdict | Exception]:
            return await verbs.claim(table, batch, Patience(self._pool.pause, verbs.LOCK_WAIT))

        return await self._batch(asks, work)

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        async def work(batch: Sequence[Settle], table: Table) -> list[Answer | Exception]:
            return await verbs.settle(table, batch, self._long_patience(table.session))

        try:
            return await self._batch(ends, work)
        finally:
            for end in ends:
                self._watchers.wake(end.scope.hash)

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        async def work(batch: Sequence[Renewal], table: Table) -> list[Answer | Exception]:
            return await verbs.renew(table, batch, self._long_patience(table.session))

        return await self._batch(renewals, work)

    async def note(self, note: Note) -> Answer:
        async def work(table: Table) -> Answer | Exception:
            return await verbs.note(table, note, self._long_patience(table.session))

        answer = await self._run(work)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _long_patience(self, session: Session) -> Patience:
        """A write after the effect waits for a locked row as long as it can and still answer for itself."""
        return Patience(self._pool.pause, 0.5 * (session.until - time.monotonic()))

    async def _batch(
        self, items: Sequence[I], work: Callable[[Sequence[I], Table], Awaitable[list[T]]]
    ) -> list[T]:
        """Answers in the order of the items. One key asked for several times is decided in that order."""
        until = time.monotonic() + self._settings.timeout
        answers: dict[int, T] = {}
        waiting = sorted(range(len(items)), key=lambda at: items[at].scope.hash)
        while waiting:
            first = {items[at].scope.hash: at for at in reversed(waiting)}
            turn = [at for at in waiting if first[items[at].scope.hash] == at]
            answered = await self._run(partial(work, [items[at] for at in turn]), until)
            answers.update(zip(turn, answered, strict=True))
            waiting = [at for at in waiting if at not in answers]
        return [answers[at] for at in range(len(items))]

    # ---------------------------------------------------------------------------------------------- reading
    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        now, found = await self._run(lambda table: table.read([scope.hash]))
        row = found.get(scope.hash)
        if row is not None and row.record is None:
            raise verbs.unreadable(row.nonce)
        return None if row is None else row.record, now

    async def scan(self, query: Query) -> Page:
        if query.history is not None:
            return await self._history(query.history)
        page_start(query)  # refused before a connection is taken
        return await self._run(lambda table: _scan(table, query))

    async def _history(self, scope: Scope) -> Page:
        rows = await self._run(lambda table: table.session.query(table.words["history"], (scope.hash,)))
        now = seconds(rows[0][0])
        lines = [row[1:] for row in rows if row[1] is not None]
        kept = any(line[-1] is None or seconds(line[-1]) > now for line in lines)
        return Page(events=tuple(event_from(line[:-1]) for line in lines) if kept else (), now=now)

    async def facts(self) -> Facts:
        return await self._run(lambda table: read_facts(table.session, table.words))

    # ---------------------------------------------------------------------------------------------- purging
    async def purge(self, limit: int) -> int:
        dropped = 0
        until = time.monotonic() + 0.5 * self._settings.timeout
        while dropped < limit:
            wanted = min(_CHUNK, limit - dropped)
            count, seen = await self._run(partial(_purge, wanted))
            dropped += count
            if seen < wanted or time.monotonic() >= until:
                break
        await self._run(_purge_audit)
        return dropped

    # --------------------------------------------------------------------------------------------- watching
    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        """Wakes for settles of this process; other processes' are found by polling."""
        self._watchers.add(scope.hash, wake)

        async def unwatch() -> None:
            self._watchers.remove(scope.hash, wake)

        return unwatch

    async def leave(self) -> None:
        """Close what the running loop opened; see `semel.store`."""
        if isinstance(self._pool, LoopPool):
            await self._pool.leave()

    async def aclose(self) -> None:
        await self._pool.aclose()

    # ---------------------------------------------------------------------------------------------- running
    async def _run(self, work: Callable[[Table], Awaitable[T]], until: float | None = None) -> T:
        """Run `work` within the time-out: once, and once more on a new connection when the first was lost.

        Half of the time is for the first try, so that one lost reply stays unseen; all of it when tables may have
        to be made.
        """
        start = time.monotonic()
        if until is None:
            until = start + self._settings.timeout
        halfway = start + 0.5 * (until - start) if self._limit else until
        try:
            return await self._try(work, halfway, fresh=False)
        except (Lost, TimeoutError, Crowded) as error:
            if not isinstance(error, Crowded):
                self.losses.tell()
            if time.monotonic() >= until:
                raise StoreUnavailable(f"{self._pool.where} did not answer in time") from None
        try:
            return await self._try(work, until, fresh=True)
        except Crowded as error:
            raise StoreUnavailable(
                f"{self._pool.where}: all connections are busy; raise pool= in the URL, or use fewer threads"
            ) from error
        except (Lost, TimeoutError) as error:
            cause = error.__cause__ or error
            raise StoreUnavailable(
                f"{self._pool.where} did not answer within {self._settings.timeout:g} s"
            ) from cause

    async def _try(self, work: Callable[[Table], Awaitable[T]], until: float, *, fresh: bool) -> T:
        try:
            return await self._pool.bounded(self._on_a_session(work, until, fresh=fresh), until)
        except ConfigurationError as error:
            if self._proven and error.__cause__ is not None and not lacks_tables(error.__cause__):
                # It worked before: a login or a right was taken away. The caller may wait for it to come back.
                raise StoreUnavailable(str(error)) from error
            raise
        except (Locked, Duplicate) as error:
            raise StoreUnavailable(f"{self._pool.where} is too busy with other transactions") from error

    async def _on_a_session(self, work: Callable[[Table], Awaitable[T]], until: float, *, fresh: bool) -> T:
        session = await self._pool.take(until, fresh=fresh)
        try:
            if not self._limit:
                self._limit = await prepare(session, self._words, create=self._settings.create)
            session.limit = self._limit
            answer = await work(Table(session, self._words))
            self._proven = True
            return answer
        finally:
            await self._pool.give(session)


async def _scan(table: Table, query: Query) -> Page:
    """Rows in scope order that may match, a page at a time, until the page is full or the table ends."""
    conditions, values = _conditions(query)
    text = table.words.scan(conditions)
    after = last = page_start(query)
    records: list[Record] = []
    while True:
        now, rows = await table.find(text, {**values, "after": after, "limit": query.limit + 1})
        if not rows:
            now = seconds((await table.session.query(table.words["clock"]))[0][0])
            return Page(records=tuple(records), now=now)
        for found in rows:
            record = found.record or placeholder(found, now)
            if not matches(record, query, now):
                continue
            if len(records) == query.limit:
                return Page(records=tuple(records), cursor=last.hex(), now=now)
            records.append(record)
            last = found.scope.hash
        after = rows[-1].scope.hash


def _conditions(query: Query) -> tuple[list[str], dict[str, Any]]:
    conditions: list[str] = []
    values: dict[str, Any] = {}
    for name in ("tenant", "operation", "ref"):
        wanted = getattr(query, name)
        if wanted is not None:
            conditions.append(f"r.`{name}` = %({name})s")
            values[name] = wanted
    stored = sorted({held.value for state in states_of(query) for held in _STORED.get(state, (state,))})
    if query.abandoned:
        stored = [State.RUNNING.value]
    # An unreadable state needs attention too.
    known = ", ".join(f"'{state.value}'" for state in State)
    names = ", ".join(f"'{state}'" for state in stored) or "''"
    conditions.append(f"(r.`state` IN ({names}) OR r.`state` NOT IN ({known}))")
    return conditions, values


async def _purge(limit: int, table: Table) -> tuple[int, int]:
    """How many records were dropped, and how many rows had something to do."""
    rows = sorted(await table.session.query(table.words["due"], (limit,)), key=itemgetter(0))
    seen = [({"scope": row[0], "nonce": row[1], "version": row[2]}, bool(row[3])) for row in rows]
    await _change("bury", [one for one, buried in seen if buried], table)
    return await _change("purge", [one for one, buried in seen if not buried], table), len(seen)


async def _change(name: str, values: Sequence[dict[str, Any]], table: Table) -> int:
    """Run a batch statement; where somebody holds one of the rows at this moment, all others one by one."""
    if not values:
        return 0
    try:
        return await table.join(name, values)
    except Locked:
        return 0 if len(values) == 1 else sum([await _change(name, [one], table) for one in values])


async def _purge_audit(table: Table) -> None:
    for (scope,) in await table.session.query(table.words["stale"]):
        with suppress(Locked):  # somebody writes to it: next time
            await table.session.write(table.words["purge_audit"], (scope,))
