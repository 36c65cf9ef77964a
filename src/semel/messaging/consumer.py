"""A running consumer: messages from a broker to handlers, each admitted once, in order per key.

receive ──▶ wait for the key's turn ──▶ [middlewares ──▶ session, admit, handler, commit] ──▶ ack
                                             └ fails: counted, tried again after a while, at last a dead letter ┘
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError

from semel.errors import (
    ConfigurationError,
    InProgress,
    KeyMismatch,
    OutcomeUnknown,
    PreviousFailure,
    StoreUnavailable,
)
from semel.messaging import letters
from semel.messaging.events import Alarm, DeadLettered, Emit, Handled, HandlerFailed
from semel.messaging.failures import is_away
from semel.messaging.handling import Handling, is_cancelled
from semel.messaging.message import Message
from semel.messaging.pauses import delay, waited
from semel.messaging.sinks.closing import Closing
from semel.messaging.sources import PROBLEM, open_source
from semel.points import reach
from semel.shown import said

if TYPE_CHECKING:
    from semel.messaging.inbox import Inbox
    from semel.messaging.sources import Delivery, Source
    from semel.once import AsyncSemel, Semel

__all__ = ["Consumer", "Counts", "Entry", "Middleware"]

Next = Callable[[Message], Awaitable[bool]]
Middleware = Callable[[Message, Next], Awaitable[bool]]
T = TypeVar("T")
_RETRY_POLL: Final = 0.5
_HOLD: Final = 10.0  # after so long others may try again what a consumer died over while it tried again
_AWAY: Final = (0.2, 2.0)  # between attempts while the database is away
_SPARED: Final = 3  # attempts in a row that may be lost with their connection before that counts as a failure
_PURGE: Final = 60.0
_LAST_LOOK: Final = 1.0  # seconds, for what looks after letters and admissions when the consumer ends
_PURGED: Final = 5_000  # in one transaction
# What will not go away by trying again.
_FINAL: Final = (KeyMismatch, OutcomeUnknown, PreviousFailure, ConfigurationError)


@dataclass(frozen=True, slots=True)
class Entry:
    """A handler and how it is run. With `once` it is not transactional: it runs through `once.consume`."""

    pattern: str
    handler: Callable[..., Any]
    max_attempts: int = 10
    backoff: tuple[float, float] = (0.5, 60.0)
    once: AsyncSemel | Semel | None = None
    options: dict[str, Any] = field(default_factory=dict)
    business_key: Callable[[Message], str | None] | None = None


@dataclass(slots=True)
class Counts:
    """What a consumer did since it began."""

    received: int = 0
    handled: int = 0
    duplicates: int = 0
    failed: int = 0
    dead: int = 0
    unhandled: int = 0


class Consumer(Closing):
    """Runs the handlers of an inbox on what its source hands out, `concurrency` at a time, one at a time per key. A
    source that is given by URL is opened here, and closed with it."""

    def __init__(
        self,
        inbox: Inbox,
        source: Source | str,
        entries: Sequence[Entry],
        *,
        sessions: Any = None,
        concurrency: int = 16,
        grace: float = 30.0,
        middlewares: Sequence[Middleware] = (),
        emit: Emit,
    ) -> None:
        if not entries:
            raise ConfigurationError(
                'this inbox has no handlers: decorate a function with @inbox.handler("topic")'
            )
        if not 1 <= concurrency <= 10_000:
            raise ConfigurationError(f"concurrency must be 1 to 10000, not {concurrency}")
        self.inbox = inbox
        self._owned = isinstance(source, str)
        self.source = open_source(source, group=inbox.consumer) if isinstance(source, str) else source
        self.counts = Counts()
        self._ended: asyncio.Event | None = None  # of `run`, if it was begun
        self._entries = list(entries)
        self._handling = Handling(inbox, sessions or inbox.database.any_engine, concurrency)
        for entry in entries:
            self._handling.check(entry)
        self._slots = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._grace = grace
        self.patience = grace + 10.0
        """How long a `close` in another thread waits for what is being handled."""
        self._emit = emit
        self._tails: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._away = False
        self._retrying: set[tuple[str, str]] = set()
        self._chain: Next = self._handle
        for middleware in reversed(middlewares):
            self._chain = _wrapped(middleware, self._chain)

    # ---------------------------------------------------------------------------------------------- run
    async def run(self) -> None:
        """Until cancelled, or closed: then no more is received, and what is being handled has `grace` seconds to end."""
        if self._ended is not None:
            raise ConfigurationError(
                "a consumer runs once: make another one with inbox.consuming(…), or inbox.run(…)"
            )
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        others = [asyncio.create_task(self._revive()), asyncio.create_task(self._purge())]
        try:
            while not (is_cancelled() or self._stopping.is_set()):
                await self._receive()
            if is_cancelled():
                raise asyncio.CancelledError
        finally:
            try:
                await asyncio.shield(self._end(others))
            finally:
                self._ended.set()

    async def aclose(self) -> None:
        """End `run`, if it goes on: what is being handled has its `grace`. Then close the source, if it was opened here: what it had
        fetched and nobody has begun goes back to the broker."""
        self._stopping.set()
        if self._ended is not None:
            await self._ended.wait()
        if self._owned:
            await asyncio.shield(self.source.aclose())

    async def _end(self, others: Sequence[asyncio.Task[None]]) -> None:
        self._stopping.set()
        await asyncio.gather(self._leave(others), self._drain())

    @staticmethod
    async def _leave(others: Sequence[asyncio.Task[None]]) -> None:
        """What they have begun with the database ends by itself, if it is quick: asyncpg, cancelled while it connects, leaves a
        future behind whose error nobody reads, and asyncio complains."""
        _, late = await asyncio.wait(others, timeout=_LAST_LOOK)
        for task in late:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _receive(self) -> None:
        free = self._concurrency * 2 - len(self._tasks)
        if free <= 0:  # back-pressure: what cannot be handled soon stays with the broker
            stopping = asyncio.ensure_future(self._stopping.wait())
            try:
                await asyncio.wait({*self._tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
            return
        try:
            deliveries = await self.source.receive(free)
        except StoreUnavailable as error:
            self._emit(Alarm("source", str(error)))
            await asyncio.sleep(random.uniform(0.2, 1.0))  # noqa: S311 - a delay
            return
        for delivery in deliveries:
            self.counts.received += 1
            self._begin(delivery)

    def _begin(self, delivery: Delivery) -> None:
        """Behind the message of its key that came before it, if that is still under way."""
        message = delivery.message
        line = (message.tenant, message.key if message.key is not None else f"\0{message.id}")
        before = self._tails.get(line)
        task = asyncio.create_task(self._after(before, delivery))
        self._tails[line] = task
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if self._tails.get(line) is done:
                del self._tails[line]

        task.add_done_callback(ended)

    async def _after(self, before: asyncio.Task[None] | None, delivery: Delivery) -> None:
        keeper = asyncio.create_task(self._keep(delivery))
        try:
            if before is not None:
                await asyncio.wait([before])
            if self._stopping.is_set():
                await delivery.nack()
                return
            await self._deliver(delivery)
        except Exception as error:  # noqa: BLE001 - the broker or the database is away, or a bug: it comes again
            self._emit(Alarm("consumer", f"message {delivery.message.id} comes again: {said(error)}"))
            with contextlib.suppress(StoreUnavailable):
                await delivery.nack()
        finally:
            keeper.cancel()

    async def _keep(self, delivery: Delivery) -> None:
        """As long as it is waited for or handled, nobody else is to get it."""
        while not is_cancelled():
            await asyncio.sleep(self.source.extends_every)
            with contextlib.suppress(StoreUnavailable):  # the inbox admits it once anyway
                await delivery.extend()

    # ------------------------------------------------------------------------------------------- handle
    async def _deliver(self, delivery: Delivery) -> None:
        message = delivery.message
        entry = self._entry(message.topic)
        problem = message.headers.get(PROBLEM)
        if entry is None or problem is not None:
            self.counts.unhandled += 1
            await self._bury(message, problem or f"no handler knows topic {message.topic!r}")
            await delivery.ack()
            return
        try:
            done = await self._try(entry, message, revived=isinstance(delivery, _Letter))
        except _Stopped:
            done = False
        if done:
            reach("consumer.committed")
            await delivery.ack()
        elif self._stopping.is_set():
            await delivery.nack()
        else:
            await delivery.ack()  # among the dead letters

    async def _try(self, entry: Entry, message: Message, *, revived: bool) -> bool:
        """Until it is done (True), dead (False), or the consumer stops (False). A letter that another consumer is at is that one's
        matter (True)."""
        again = _anew(message)
        while True:
            turn = await self._turn(message, wait=not revived)
            if not turn.is_ours:
                return not turn.dead
            try:
                done = await (self._held(message, turn) if turn.claimed else self._once(message))
            except _Stopped:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a handler raises
                message, revived = again(), False
                if await self._failed(entry, message, error, turn.attempts) or self._stopping.is_set():
                    return False
                continue
            if done and turn.known:
                database = self.inbox.database
                await database.run(letters.forget, database.tables, self.inbox.consumer, message)
            return done

    async def _once(self, message: Message) -> bool:
        """One attempt that counts. False: the consumer stops while somebody else is at it."""
        start = time.monotonic()
        while True:
            try:
                admitted = await self._patiently(message, partial(self._attempt, message), blames=True)
            except InProgress as error:
                if await waited(self._stopping, error.retry_after or _RETRY_POLL):
                    return False
                continue
            self.counts.handled += admitted
            self.counts.duplicates += not admitted
            seconds = time.monotonic() - start
            self._emit(Handled(self.inbox.consumer, message.topic, message.id, admitted, seconds))
            return True

    async def _turn(self, message: Message, *, wait: bool) -> letters.Turn:
        """Of a message that failed before each attempt is one consumer's, whoever asks first when its time has come: their number
        does not make attempts more frequent. _Stopped when the consumer stops meanwhile."""
        while True:
            turn = await self._patiently(message, partial(self._claimed, message))
            if turn.is_ours or turn.dead or not wait:
                return turn
            # Within the time of a hold it may be another consumer that is at it, and done any moment.
            pause = turn.left - _HOLD if turn.left > _HOLD + 1 else min(turn.left, 2 * _RETRY_POLL)
            if await waited(self._stopping, max(pause, _RETRY_POLL / 10)):
                raise _Stopped

    async def _claimed(self, message: Message) -> letters.Turn:
        """Ours, if its time has come and nobody was first."""
        database, consumer = self.inbox.database, self.inbox.consumer
        turn = await database.read(letters.turn_of, database.tables, consumer, message)
        if not turn.has_come:
            return turn
        return await database.run(letters.claim, database.tables, consumer, message, turn, _HOLD)

    async def _held(self, message: Message, turn: letters.Turn) -> bool:
        """As `_once`; as long as it is tried again, no other consumer tries it."""
        keeper = asyncio.create_task(self._hold(message, turn))
        try:
            return await self._once(message)
        finally:
            keeper.cancel()

    async def _hold(self, message: Message, turn: letters.Turn) -> None:
        database = self.inbox.database
        while not is_cancelled():
            await asyncio.sleep(_HOLD / 3)
            with contextlib.suppress(StoreUnavailable, DBAPIError):  # the inbox admits it once anyway
                await database.run(
                    letters.hold, database.tables, self.inbox.consumer, message, turn.attempts, _HOLD
                )

    async def _attempt(self, message: Message) -> bool:
        async with self._slots:  # not while it waits for its next attempt
            return await self._chain(message)

    async def _patiently(
        self, message: Message, work: Callable[[], Awaitable[T]], *, blames: bool = False
    ) -> T:
        """`work`, again and again while the database cannot be had: that is not the message's fault, and counts no attempt. The
        rest of its key waits behind it: one that was handed back would come again after them. _Stopped when the consumer stops.
        `blames`: a statement that is lost `_SPARED` times in a row, by a database that answers right afterwards, is its handler's
        failure: a timeout cuts it each time, or the server cannot bear it."""
        misses = spared = 0
        while True:
            try:
                done = await work()
                self._away = False
                return done
            except Exception as error:
                if not is_away(error):
                    raise
                if blames and self._may_blame(error) and await self._answers():
                    spared += 1
                    if spared >= _SPARED:
                        raise
                misses += 1
                if not self._away:  # one for all messages that meet it
                    self._away = True
                    self._emit(Alarm("database", f"message {message.id} waits: {error}"))
                if await waited(self._stopping, delay(_AWAY, misses)):
                    raise _Stopped from error

    def _may_blame(self, error: Exception) -> bool:
        """Whether the handler's own statement may be why. Not while it connects: that a database takes nobody is no handler's fault,
        whichever one it is. Nor the admission: it may wait for a copy that is being handled."""
        if not isinstance(error, DBAPIError):
            return False
        statement = error.statement or ""
        return f" {self.inbox.table}_inbox " not in statement and bool(
            statement or error.connection_invalidated
        )

    async def _answers(self) -> bool:
        """Whether the database can be had now; SQLite's write lock as well."""
        try:
            await self.inbox.database.run(_asked)
        except (StoreUnavailable, DBAPIError):
            return False
        return True

    async def _failed(self, entry: Entry, message: Message, error: Exception, attempts: int) -> bool:
        """Count it where no rollback reaches; whether it is a dead letter now."""
        self.counts.failed += 1
        final = attempts + 1 >= entry.max_attempts or isinstance(error, _FINAL)
        after = None if final else delay(entry.backoff, attempts + 1)
        database = self.inbox.database
        kind = type(error).__name__
        reason = f"{kind}: {said(error)}"
        count = await self._patiently(
            message,
            lambda: database.run(
                letters.failed, database.tables, self.inbox.consumer, message, reason, after
            ),
        )
        self._emit(HandlerFailed(self.inbox.consumer, message.topic, message.id, count, kind))
        if final:
            self.counts.dead += 1
            self._emit(DeadLettered(self.inbox.consumer, message.topic, message.id, count, reason, kind))
        return final

    async def _bury(self, message: Message, reason: str) -> None:
        database = self.inbox.database
        count = await database.run(
            letters.failed, database.tables, self.inbox.consumer, message, reason, None
        )
        self.counts.dead += 1
        self._emit(DeadLettered(self.inbox.consumer, message.topic, message.id, count, reason, "unhandled"))

    async def _handle(self, message: Message) -> bool:
        """The innermost: admission and handler in one transaction, or through `once`."""
        entry = self._entry(message.topic)
        if entry is None:
            raise ConfigurationError(f"no handler knows topic {message.topic!r}")
        return await self._handling.handle(entry, message)

    def _entry(self, topic: str) -> Entry | None:
        return next((entry for entry in self._entries if fnmatchcase(topic, entry.pattern)), None)

    # ----------------------------------------------------------------------------- revived, and the rest
    async def _revive(self) -> None:
        """Dead letters that somebody asked to try again, and attempts that a consumer died over."""
        database = self.inbox.database
        while not await waited(self._stopping, _RETRY_POLL):
            try:
                due = await database.read(letters.due, database.tables, self.inbox.consumer)
            except (StoreUnavailable, DBAPIError) as error:
                self._emit(Alarm("database", str(error)))
                continue
            if self._stopping.is_set():  # nobody would wait for what is begun now
                return
            for letter in due:
                name = (letter.message.tenant, letter.message.id)
                line = (name[0], letter.message.key if letter.message.key is not None else f"\0{name[1]}")
                if name not in self._retrying and line not in self._tails:
                    self._retrying.add(name)
                    self._begin(_Letter(self, letter.message, name))

    async def _purge(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable, DBAPIError):  # the next one does it
                purged = _PURGED
                while purged >= _PURGED and not self._stopping.is_set():
                    purged = await self.inbox.purge(_PURGED)
            if await waited(self._stopping, _PURGE):
                return

    async def _drain(self) -> None:
        self._stopping.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self._grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._handling.close()


class _Letter:
    """A dead letter that is tried again: the broker knows nothing of it any more."""

    def __init__(self, consumer: Consumer, message: Message, name: tuple[str, str]) -> None:
        self._consumer = consumer
        self._name = name
        self.message = message

    async def ack(self) -> None:
        self._consumer._retrying.discard(self._name)  # noqa: SLF001 - our own

    async def nack(self) -> None:
        self._consumer._retrying.discard(self._name)  # noqa: SLF001 - our own

    async def extend(self) -> None:
        """It is in our own table."""


class _Stopped(Exception):
    """The consumer stops before a message was done: it goes back."""


def _asked(connection: Connection) -> None:
    connection.execute(select(1))


def _anew(message: Message) -> Callable[[], Message]:
    """The message as it came, for its next attempt or its letter: a handler may have changed its body."""
    if not isinstance(message.body, dict | list):
        return lambda: message
    data = message.data
    return lambda: replace(message, body=msgspec.json.decode(data))


def _wrapped(middleware: Middleware, inner: Next) -> Next:
    async def call(message: Message) -> bool:
        return await middleware(message, inner)

    return call
