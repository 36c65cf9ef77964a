"""Messages that are admitted once: the admission commits with what the handler did."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

import msgspec

from semel.errors import ConfigurationError
from semel.messaging import letters
from semel.messaging.admitting import admit, admit_many, compare, hash_of, is_known, remember
from semel.messaging.bodies import HEADER, BodyMissing, BodyStore, fetched, open_bodies
from semel.messaging.bodies.sql import SqlBodies
from semel.messaging.consumer import Consumer, Entry, Middleware
from semel.messaging.database import Database, Resident
from semel.messaging.events import Handled, HandlerFailed, RelayEvent, log_event, teller
from semel.messaging.letters import Admitted, DeadLetter
from semel.messaging.message import Message
from semel.messaging.quick import admit_quickly, connection_of
from semel.messaging.sources import Source, open_source
from semel.messaging.standing import IN_TRANSACTION, Undone, aabandon, abandon, ended, is_sound, root_of
from semel.messaging.windows import Windows, check_windows
from semel.runtime import run_sync
from semel.within import port_of
from semel.within.ports import Port

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

    from semel.once import AsyncSemel, Semel

__all__ = ["Inbox"]

Handler = Callable[..., Any]
H = TypeVar("H", bound=Callable[..., Any])
T = TypeVar("T")
_WEEK: Final = 7 * 86_400


class Inbox(Resident):
    """`inbox.process(session, message, handler)`: the handler runs once per message, in the session's transaction.

    `where` is a URL or an SQLAlchemy engine of the database that the handlers write to; `consumer` names who consumes: each
    consumer admits a message once. `retention` is how long an admission is remembered; it is compared to how late a
    copy may come (`windows=`, or what a relay with its default options does), and refused if it is too short. `claim_check` is the store of bodies that travel as references, as the
    outbox has it: a store, its URL, or "sql" where the outbox is in this database.
    """

    def __init__(
        self,
        where: object,
        *,
        consumer: str,
        table: str = "semel",
        retention: float | timedelta = _WEEK,
        windows: Windows | None = None,
        claim_check: BodyStore | str | None = None,
        create: bool = True,
        hooks: Collection[Callable[[RelayEvent], None]] = (log_event,),
    ) -> None:
        if not consumer or len(consumer) > 120 or not consumer.isprintable():
            raise ConfigurationError(f"consumer must be 1 to 120 printable characters, not {consumer!r}")
        self.home = self.database = Database(where, table=table, create=create)
        self.consumer = consumer
        self.table = table
        self.retention = retention.total_seconds() if isinstance(retention, timedelta) else float(retention)
        if not self.retention > 0:
            raise ConfigurationError(
                f"retention must be above 0 seconds, not {retention}: every copy would be handled"
            )
        check_windows(self.retention, windows)
        self.bodies: BodyStore | None = None
        if claim_check is not None:
            self.bodies = SqlBodies(self.database) if claim_check == "sql" else open_bodies(claim_check)
        self._entries: list[Entry] = []
        self._middlewares: list[Middleware] = []
        self._emit = teller(tuple(hooks))

    # ------------------------------------------------------------------------------------------ process
    @overload
    def process(
        self,
        session: AsyncSession | AsyncConnection,
        message: Message,
        handler: Handler,
        *,
        business_key: str | None = None,
        own_transaction: bool = False,
    ) -> Awaitable[bool]: ...

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
        message alone and is rolled back on an error: then there is no savepoint, which costs more than the admission.
        """
        start = time.monotonic()
        try:
            done = self._process(session, message, handler, business_key, own_transaction)
        except Exception as error:
            self._tell_failed(message, error)
            if own_transaction:
                abandon(session)
            raise
        if inspect.isawaitable(done):
            return self._awaited_told(done, session, message, start, own=own_transaction)
        self._tell(message, done, start)
        return done

    async def _awaited_told(
        self, work: Awaitable[bool], session: Any, message: Message, start: float, *, own: bool
    ) -> bool:
        try:
            done = await work
        except Exception as error:
            self._tell_failed(message, error)
            if own:
                await aabandon(session)
            raise
        self._tell(message, done, start)
        return done

    def _tell(self, message: Message, admitted: bool, start: float) -> None:
        self._emit(Handled(self.consumer, message.topic, message.id, admitted, time.monotonic() - start))

    def _tell_failed(self, message: Message, error: Exception) -> None:
        """How often it failed before is known to whoever hands it out."""
        self._emit(
            HandlerFailed(self.consumer, message.topic, message.id, message.delivery, type(error).__name__)
        )

    def _process(
        self,
        session: Any,
        message: Message,
        handler: Handler,
        business_key: str | None,
        own_transaction: bool,
    ) -> Any:
        """As `process`, for a consumer, which does the telling."""
        if own_transaction and (link := connection_of(session)) is not None and self.database.ready:
            done = self._quickly(link, session, message, handler, business_key)
            if done is not None:
                return done
        port = port_of(session)
        work = self._admitted(port, session, message, handler, business_key, own=own_transaction)
        body = work if own_transaction else self._saved(port, work)
        return body if port.colour == "async" else run_sync(body)

    async def _saved(self, port: Port, work: Coroutine[Any, Any, T]) -> T:
        """In a savepoint: an error undoes it and leaves the transaction usable."""
        try:
            await self._ready(port)
            point = await port.savepoint("semel_inbox")
        except BaseException:
            work.close()
            raise
        try:
            done = await work
            await point.flush()
        except BaseException:
            await point.rollback()
            raise
        await point.release()
        return done

    async def _admitted(
        self,
        port: Port,
        session: Any,
        message: Message,
        handler: Handler,
        business_key: str | None,
        *,
        own: bool,
    ) -> bool:
        missing: BodyMissing | None = None
        try:
            message = await self._body_of(port, message)  # before the transaction holds anything
        except BodyMissing as error:
            missing = error
        await self._ready(port)
        if missing is not None:
            if await is_known(port, self.table, self.consumer, message):
                return False  # a late copy of what was handled: its body is over
            raise missing
        if not await admit(port, self.table, self.consumer, message, business_key):
            return False
        begun = root_of(session) if own else None
        try:
            result = await _call(handler, session, message, port.colour == "async")
        except Exception as error:
            if (
                own and root_of(session) is not begun
            ):  # then its admission may be committed, and it would seem done
                raise ended(message) from error
            raise
        if own:  # a savepoint would tell
            await self._check(port, session, message, begun)
        if result is not None:
            await remember(port, self.table, self.consumer, message, _shown(result), business_key)
        return True

    async def _check(self, port: Port, session: Any, message: Message, begun: Any) -> None:
        """The transaction is the one that admitted the message, and can be committed."""
        if root_of(session) is not begun:
            raise ended(message)
        sound = is_sound(session)
        if sound is None:
            sound = await is_known(port, self.table, self.consumer, message)
        if not sound:
            raise Undone(message)

    def _quickly(
        self, link: Any, session: Any, message: Message, handler: Handler, business_key: str | None
    ) -> bool | None:
        """As `_admitted`, the admission made the short way; None where that is not open."""
        if HEADER in message.headers:
            return None
        digest = hash_of(message)
        said = (self.consumer, message.id, message.tenant, digest, message.topic, business_key)
        fresh = admit_quickly(link, self.table, said)
        if fresh is None:
            return None
        result = None
        if fresh:
            begun = root_of(session)
            try:
                result = handler(session, message) if _takes_two(handler) else handler(message)
            except Exception as error:
                if root_of(session) is not begun:
                    raise ended(message) from error
                raise
            if root_of(session) is not begun:
                raise ended(message)
            if link.pgconn.transaction_status != IN_TRANSACTION:
                raise Undone(message)
            if result is None:
                return True
        return run_sync(self._after(session, message, result, business_key, digest, fresh=fresh))

    async def _after(
        self,
        session: Any,
        message: Message,
        result: Any,
        business_key: str | None,
        digest: bytes,
        *,
        fresh: bool,
    ) -> bool:
        port = port_of(session)
        await port.prepare()
        if not fresh:
            await compare(port, self.table, self.consumer, message, digest)
            return False
        result = await _awaited(result, awaits=False)
        if result is not None:
            await remember(port, self.table, self.consumer, message, _shown(result), business_key)
        return True

    @overload
    def process_batch(
        self, session: AsyncSession | AsyncConnection, messages: Sequence[Message], handler: Handler
    ) -> Awaitable[int]: ...

    @overload
    def process_batch(self, session: Any, messages: Sequence[Message], handler: Handler) -> Any: ...

    def process_batch(self, session: Any, messages: Sequence[Message], handler: Handler) -> Any:
        """Admit a batch and run `handler(messages)` or `handler(session, messages)` with those that are new.

        Returns how many were. All or nothing: an error undoes the whole batch.
        """
        port = port_of(session)
        body = self._saved(port, self._admitted_batch(port, session, messages, handler))
        return body if port.colour == "async" else run_sync(body)

    async def _admitted_batch(
        self, port: Port, session: Any, messages: Sequence[Message], handler: Handler
    ) -> int:
        start = time.monotonic()
        try:
            whole = [await self._body_of(port, message) for message in messages]
            fresh = await admit_many(port, self.table, self.consumer, whole)
            if fresh:
                await _call(handler, session, fresh, port.colour == "async")
        except Exception as error:
            for message in messages:
                self._tell_failed(message, error)
            raise
        new = {(message.id, message.tenant) for message in fresh}
        for message in messages:
            self._tell(message, (message.id, message.tenant) in new, start)
            new.discard((message.id, message.tenant))  # a copy in the same batch is a duplicate
        return len(fresh)

    async def _body_of(self, port: Port, message: Message) -> Message:
        """The message with its body, where that is kept elsewhere; checked against its hash."""
        if HEADER not in message.headers:
            return message
        if port.colour == "sync":
            return fetched(self.bodies, message)
        return await asyncio.to_thread(fetched, self.bodies, message)

    async def _ready(self, port: Port) -> None:
        await port.prepare()
        await self.database.look(port)
        if port.dialect == "sqlite" and not port.begun:
            await port.run("BEGIN IMMEDIATE")

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
        if max_attempts < 1:
            raise ConfigurationError(f"max_attempts must be at least 1, not {max_attempts}")
        if not 0 < backoff[0] <= backoff[1]:
            raise ConfigurationError(f"backoff is (first, longest) in seconds, not {backoff}")
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
        """The consumer that `run` runs, to watch its `counts`."""
        opened = open_source(source, group=self.consumer) if isinstance(source, str) else source
        return Consumer(
            self, opened, self._entries, middlewares=self._middlewares, emit=self._emit, **options
        )

    async def run(self, source: Source | str, **options: Any) -> None:
        """Consume until cancelled: `source` is a URL (`redis://…?stream=orders`, `amqp://…?queue=…`, `nats://…?stream=…`).

        Options: `concurrency` (16), `grace` (30 s to end what is under way), `sessions` (a sessionmaker; by default sessions on
        the inbox's own engine).
        """
        consumer = self.consuming(source, **options)
        try:
            await consumer.run()
        finally:
            if isinstance(source, str):
                await asyncio.shield(consumer.source.aclose())

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


async def _call(handler: Handler, session: Any, what: Any, awaits: bool) -> Any:
    return await _awaited(handler(session, what) if _takes_two(handler) else handler(what), awaits=awaits)


async def _awaited(result: Any, *, awaits: bool) -> Any:
    if inspect.isawaitable(result):
        if not awaits:
            if inspect.iscoroutine(result):
                result.close()
            raise ConfigurationError(
                "a coroutine function cannot run in a sync session: use an async session, or a plain function"
            )
        return await result
    return result


@lru_cache(maxsize=1024)
def _takes_two(handler: Handler) -> bool:
    """Whether the handler wants the session too."""
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return False
    places = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    needed = [p for p in places if p.default is p.empty]
    return len(needed) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _shown(result: Any) -> str | None:
    """What the handler returned, for the consume log; what JSON cannot say is left out."""
    try:
        return msgspec.json.encode(result).decode()[:10_000]
    except (TypeError, ValueError, msgspec.MsgspecError):
        return None
