"""Messages that are admitted once: the admission commits with what the handler did."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Never, TypeVar, overload

from semel.errors import ConfigurationError
from semel.messaging import letters
from semel.messaging.admitting import check_business_key
from semel.messaging.arguments import emitter, pauses, refuse_unknown
from semel.messaging.bodies import BodyStore, open_bodies
from semel.messaging.bodies.sql import SqlBodies
from semel.messaging.calling import Handler
from semel.messaging.consumer import Consumer, Entry, Middleware
from semel.messaging.database import Database
from semel.messaging.events import Handled, HandlerFailed, RelayEvent, is_logged, log_event
from semel.messaging.letters import Admitted, DeadLetter
from semel.messaging.message import Message
from semel.messaging.places import place_of
from semel.messaging.processing import Processing
from semel.messaging.resident import Resident
from semel.messaging.standing import aabandon, abandon
from semel.messaging.windows import Windows, check_windows
from semel.options import seconds
from semel.points import reach
from semel.runtime import run_sync
from semel.within import port_of

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from semel.messaging.sources import Source
    from semel.once import AsyncSemel, Semel

__all__ = ["Inbox"]

H = TypeVar("H", bound=Callable[..., Any])
_WEEK: Final = 7 * 86_400
_SHORTEST: Final = 0.05
_RUN: Final = ("sessions", "concurrency", "grace")


class Inbox(Resident):
    """`inbox.process(session, message, handler)`: the handler runs once per message, in the session's transaction.

    `where` is a URL or an SQLAlchemy engine of the database that the handlers write to, or the Semel or store that was opened from
    one. `table` is what the tables' names begin with. `consumer` names who consumes: each
    consumer admits a message once. `retention` is how long an admission is remembered; it is compared to how late a copy may come
    (`windows=`, or what a relay with its default options does), and refused if it is too short. `claim_check` is the store of
    bodies that travel as references, as the outbox has it: a store, its URL, or "sql" where the outbox is in this database.
    `timeout` is how long each answer of a database that is opened from its URL is waited for, those to a handler's statements
    included; without it they may take as long as they like. A connection is waited for 10 seconds in any case.
    """

    def __init__(
        self,
        where: object,
        *,
        consumer: str = "",
        table: str = "semel",
        retention: float | timedelta = _WEEK,
        windows: Windows | None = None,
        claim_check: BodyStore | str | None = None,
        create: bool = True,
        timeout: float | timedelta | None = None,
        hooks: Collection[Callable[[RelayEvent], None]] = (log_event,),
        **unknown: Never,
    ) -> None:
        refuse_unknown(Inbox, unknown)
        given: Any = consumer
        if not isinstance(given, str) or not given or len(given) > 120 or not given.isprintable():
            raise ConfigurationError(
                f"consumer= names who consumes, in 1 to 120 printable characters, not {given!r}"
            )
        bound = None if timeout is None else seconds("timeout", timeout, least=_SHORTEST)
        self._emit = emitter(hooks)
        self._only_logs = tuple(hooks) == (log_event,)
        self.home = self.database = Database(place_of(where), table=table, create=create, timeout=bound)
        self.consumer = consumer
        self.table = table
        self.retention = seconds("retention", retention)
        if not self.retention > 0:
            raise ConfigurationError(
                f"retention must be above 0 seconds, not {retention}: every copy would be handled"
            )
        check_windows(self.retention, windows)
        self.bodies: BodyStore | None = None
        if claim_check is not None:
            self.bodies = SqlBodies(self.database) if claim_check == "sql" else open_bodies(claim_check)
        self._processing = Processing(self.database, consumer, self.bodies)
        self._entries: list[Entry] = []
        self._middlewares: list[Middleware] = []

    # ------------------------------------------------------------------------------------------ process
    @overload
    def process(
        self,
        session: AsyncSession | async_scoped_session[Any] | AsyncConnection,
        message: Message,
        handler: Handler,
        *,
        business_key: str | None = None,
        own_transaction: bool = False,
    ) -> Awaitable[bool]: ...

    @overload
    def process(
        self,
        session: Session | scoped_session[Session] | Connection,
        message: Message,
        handler: Handler,
        *,
        business_key: str | None = None,
        own_transaction: bool = False,
    ) -> bool: ...

    @overload
    def process(
        self,
        session: Any,
        message: Message,
        handler: Handler,
        *,
        business_key: str | None = None,
        own_transaction: bool = False,
    ) -> Any: ...

    def process(
        self,
        session: Any,
        message: Message,
        handler: Handler,
        *,
        business_key: str | None = None,
        own_transaction: bool = False,
    ) -> Any:
        """Admit the message and run `handler(message)` or `handler(session, message)` in the session's transaction.

        True if it ran, False for a duplicate. With an async session it is awaited. The handler's error undoes its work and
        the admission (a savepoint), and is raised; the transaction stays usable, and commit is the caller's. What the handler
        returns is kept in the consume log if JSON can say it. `own_transaction=True` says that the transaction is for this
        message alone. Then one of SQLAlchemy is rolled back on an error, a timeout included, and there is no savepoint, which
        costs more than the admission; on a driver's own connection, or Django's, the savepoint stays.
        """
        start = time.monotonic()
        check_business_key(business_key)
        try:
            done = self._processing.one(session, message, handler, business_key, own=own_transaction)
        except BaseException as error:  # SystemExit too: its caller may catch it, and commit
            if own_transaction:
                abandon(session, error)
            self._tell_failed(message, error)
            raise
        if not isinstance(done, bool):
            return self._awaited_told(done, session, message, start, own=own_transaction)
        reach("consumer.handled")
        self._tell(message, done, start)
        return done

    async def _awaited_told(
        self, work: Awaitable[bool], session: Any, message: Message, start: float, *, own: bool
    ) -> bool:
        try:
            done = await work
        except BaseException as error:  # a timeout cancels, and its caller may commit
            if own:
                await aabandon(session, error)
            self._tell_failed(message, error)
            raise
        reach("consumer.handled")
        self._tell(message, done, start)
        return done

    def _tell(self, message: Message, admitted: bool, start: float) -> None:
        if self._only_logs and not is_logged(Handled):
            return
        self._emit(Handled(self.consumer, message.topic, message.id, admitted, time.monotonic() - start))

    def _tell_failed(self, message: Message, error: BaseException) -> None:
        """How often it failed before is known to whoever hands it out. A cancellation is nobody's failure."""
        if not isinstance(error, Exception):
            return
        if not isinstance(message, Message):  # whatever it did to us: this is why
            raise ConfigurationError(f"an inbox takes a Message, not {type(message).__name__}") from error
        self._emit(
            HandlerFailed(self.consumer, message.topic, message.id, message.delivery, type(error).__name__)
        )

    @overload
    def process_batch(
        self,
        session: AsyncSession | async_scoped_session[Any] | AsyncConnection,
        messages: Sequence[Message],
        handler: Handler,
    ) -> Awaitable[int]: ...

    @overload
    def process_batch(
        self,
        session: Session | scoped_session[Session] | Connection,
        messages: Sequence[Message],
        handler: Handler,
    ) -> int: ...

    @overload
    def process_batch(self, session: Any, messages: Sequence[Message], handler: Handler) -> Any: ...

    def process_batch(self, session: Any, messages: Sequence[Message], handler: Handler) -> Any:
        """Admit a batch and run `handler(messages)` or `handler(session, messages)` with those that are new.

        Returns how many were. All or nothing: an error undoes the whole batch.
        """
        port = port_of(session)
        body = self._batch_told(self._processing.many(port, session, messages, handler), messages)
        return body if port.colour == "async" else run_sync(body)

    async def _batch_told(self, work: Awaitable[list[Message]], messages: Sequence[Message]) -> int:
        start = time.monotonic()
        try:
            fresh = await work
        except Exception as error:
            for message in messages:
                self._tell_failed(message, error)
            raise
        reach("consumer.handled")
        new = {(message.id, message.tenant) for message in fresh}
        for message in messages:
            self._tell(message, (message.id, message.tenant) in new, start)
            new.discard((message.id, message.tenant))  # a copy in the same batch is a duplicate
        return len(fresh)

    # -------------------------------------------------------------------------------------------- run
    def handler(
        self,
        topic: str,
        *,
        max_attempts: int = 10,
        backoff: tuple[float, float] = (0.5, 60.0),
        once: AsyncSemel | Semel | None = None,
        business_key: Callable[[Message], str | None] | None = None,
        **options: Any,
    ) -> Callable[[H], H]:
        """Register a handler for a topic (or a pattern, as `orders.*`), for `run`.

        It gets `message`, or `(session, message)`: what it writes in that session commits with the admission. With `once=` it
        is for effects outside of the database: it runs through `once.consume`, and options such as `on_unknown="hold"` and
        `lease=` are passed on. A failure is tried again after a while, `max_attempts` times, and is then a dead letter.
        """
        if type(max_attempts) is not int or max_attempts < 1:
            raise ConfigurationError(f"max_attempts must be at least 1, not {max_attempts!r}")
        backoff = pauses("backoff", backoff)
        if options and once is None:
            raise ConfigurationError(
                f"{', '.join(sorted(options))}: only a handler with once= takes these options"
            )

        hidden = next((entry for entry in self._entries if fnmatchcase(topic, entry.pattern)), None)
        if hidden is not None:
            raise ConfigurationError(
                f"the handler for {hidden.pattern!r} has {topic!r} already, and a message has one handler: register the narrower "
                "one first, or use another Inbox(consumer=…)"
            )

        def register(fn: H) -> H:
            self._entries.append(Entry(topic, fn, max_attempts, backoff, once, options, business_key))
            return fn

        return register

    def use(self, middleware: Middleware) -> Middleware:
        """Put `async def middleware(message, call_next)` around every handler, the first one outermost."""
        self._middlewares.append(middleware)
        return middleware

    def consuming(self, source: Source | str, **options: Any) -> Consumer:
        """The consumer that `run` runs, to watch its `counts`. Close it (`async with`): it opens the source that a URL names."""
        refuse_unknown(Consumer, options.keys() - _RUN, _RUN)
        return Consumer(
            self, source, self._entries, middlewares=self._middlewares, emit=self._emit, **options
        )

    async def run(self, source: Source | str, **options: Any) -> None:
        """Consume until cancelled: `source` is a URL (`redis://…?stream=orders`, `amqp://…?queue=…`, `nats://…?stream=…`).

        Options: `concurrency` (16), `grace` (30 s to end what is under way), `sessions` (a sessionmaker; by default sessions on
        the inbox's own engine).
        """
        async with self.consuming(source, **options) as consumer:
            await consumer.run()

    # ----------------------------------------------------------------------------------- for operators
    async def dead_letters(self, limit: int = 1000) -> list[DeadLetter]:
        """Messages that their handler could not do, oldest first."""
        return await self.database.read(letters.dead, self.database.tables, self.consumer, limit)

    async def replay(self, ids: Iterable[str] | None = None, *, tenant: str | None = None) -> int:
        """Try dead letters again: all, or those with these message ids, or of one tenant (two tenants may have the same id);
        returns how many. A running consumer does it."""
        chosen = None if ids is None else list(ids)
        return await self.database.run(letters.revive, self.database.tables, self.consumer, chosen, tenant)

    async def delete(self, ids: Iterable[str] | None = None, *, tenant: str | None = None) -> int:
        """Give dead letters up: all, or those with these message ids, or of one tenant."""
        chosen = None if ids is None else list(ids)
        return await self.database.run(letters.remove, self.database.tables, self.consumer, chosen, tenant)

    async def log(
        self, *, message: str | None = None, business_key: str | None = None, limit: int = 100
    ) -> list[Admitted]:
        """The consume log: what was admitted when, with its result, newest first."""
        return await self.database.read(
            letters.log,
            self.database.tables,
            self.consumer,
            message=message,
            business_key=business_key,
            limit=limit,
        )

    async def purge(self, limit: int = 10_000) -> int:
        """Forget admissions older than the retention; returns how many."""
        return await self.database.run(
            letters.purge, self.database.tables, self.consumer, self.retention, limit
        )
