"""Messages that commit or vanish with the caller's rows."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Never

from semel.errors import CodecError, ConfigurationError, InvalidKey, KeyMismatch, SemelError, StoreUnavailable
from semel.messaging.arguments import emitter, refuse_unknown
from semel.messaging.bodies import BodyStore
from semel.messaging.bodies.keeping import Keeper
from semel.messaging.collecting import collect, is_collectable
from semel.messaging.database import Database
from semel.messaging.events import NotAdded, RelayEvent, log_event
from semel.messaging.message import Message
from semel.messaging.pages import Home, Waiting
from semel.messaging.places import place_of
from semel.messaging.redis import is_redis, open_adder
from semel.messaging.resident import Resident
from semel.messaging.standing import undone
from semel.messaging.writing import Prepared, TooLarge, prepare, write
from semel.options import seconds
from semel.run import Run
from semel.runtime import run_sync
from semel.within import port_of
from semel.within.alchemy import ConnectionPort
from semel.within.ports import Port

if TYPE_CHECKING:
    from semel.messaging.redis.adding import Adder
    from semel.messaging.redis.arriving import Arrivals
    from semel.messaging.redis.bodies import RedisKeeper

_propagate: Any = None
with contextlib.suppress(ModuleNotFoundError):  # tracing is optional
    from opentelemetry import propagate as _propagate

__all__ = ["Outbox"]

_MAX_BODY: Final = 1 << 20
_MAX_APART: Final = 100 << 20  # where large bodies are kept elsewhere
_APART: Final = 1 << 16
_GRACE: Final = 3600.0
_DAY: Final = 86_400.0
_WEEK: Final = 7 * 86_400.0
_SHORTEST: Final = 0.05


class Outbox(Resident):
    """`outbox.add(session, message)`: the message is sent if, and only if, the session's transaction commits.

    `where` is a URL or an SQLAlchemy engine of the database that holds the caller's rows, or the Semel or store that was opened from
    one. `table` is what the tables' names begin with, in Redis the keys'. `parts` is how many ways the messages are divided for relays (64 unless given; fixed from the first message on),
    `retention` how long a delivered id stays known (24 hours; written down, so that `semel relay` knows it too).

    `claim_check` keeps bodies of more than `claim_over` bytes elsewhere and lets a reference travel: a store of
    `semel.messaging.bodies`, its URL (`file:///folder`, `s3://bucket/prefix`), or "sql" for a table beside the outbox. A body
    is kept for `claim_retention` (a week) after its message was delivered.

    `notify` tells relays in other processes of each commit (PostgreSQL's NOTIFY; they listen by themselves once a program said
    so). It costs a lock that all commits of the database cluster with a NOTIFY share: without it a relay looks every 0.25 s at
    the latest.

    `timeout` is how long each answer of a SQL database that is opened from its URL is waited for. Without it a server that was
    stopped in the middle of a statement is waited for until it goes on; a connection is waited for 10 seconds in any case.
    """

    def __init__(
        self,
        where: object,
        *,
        table: str = "semel",
        parts: int | None = None,
        retention: float | timedelta | None = None,
        max_body: int | None = None,
        claim_check: BodyStore | str | None = None,
        claim_over: int = _APART,
        claim_retention: float | timedelta | None = None,
        create: bool = True,
        tenant: str | None = None,
        notify: bool | None = None,
        trace: Callable[[], Mapping[str, str]] | None = None,
        timeout: float | timedelta | None = None,
        hooks: Collection[Callable[[RelayEvent], None]] = (log_event,),
        **unknown: Never,
    ) -> None:
        refuse_unknown(Outbox, unknown)
        where = place_of(where)
        self.table = table
        kept = _seconds("retention", retention)
        longest = _seconds("claim_retention", claim_retention)
        self._emit = emitter(hooks)
        _check_numbers(parts, max_body)
        self._adder: Adder | None = None
        self.home: Home
        if is_redis(where):
            if timeout is not None:
                raise ConfigurationError(
                    "timeout= is for a SQL database that is opened from its URL: Redis has its own"
                )
            self._adder = open_adder(
                where,
                prefix=table,
                create=create,
                parts=parts,
                retention=_DAY if kept is None else kept,
                wake=self.wake,
                refused=self._not_written,
            )
            self.home = self._adder.home
        else:
            told = None if notify is None else float(notify)
            settings = {"retention": kept, "claim_retention": longest, "notify": told}
            self.home = Database(
                where,
                table=table,
                create=create,
                parts=parts,
                divides=True,
                settings=settings,
                timeout=_seconds("timeout", timeout, least=_SHORTEST),
            )
        self._retention = kept
        if notify and (not isinstance(self.home, Database) or self.home.dialect != "postgresql"):
            raise ConfigurationError("notify= is PostgreSQL's NOTIFY: leave it out for other databases")
        self._keeper: Keeper | None = None
        self._claims: Keeper | RedisKeeper | None = None
        if claim_check is not None and self._adder is not None:
            kept = _WEEK if longest is None else longest
            self._claims = self._adder.keep_bodies(claim_check, over=claim_over, kept=kept)
        elif claim_check is not None:
            self._keeper = Keeper(claim_check, self.database, table, over=claim_over, extra=self._kept_on)
            self._claims = self._keeper
        self.max_body = max_body or (_MAX_BODY if self._claims is None else _MAX_APART)
        self._tenant = tenant
        self._trace = trace or _current_trace
        self._wakers: weakref.WeakSet[_Waker] = weakref.WeakSet()
        self._lock = threading.Lock()

    # -------------------------------------------------------------------------------------------- add
    def add(self, target: Any, *messages: Message) -> None:
        """Put messages into the transaction of `target`; ConfigurationError if it has none.

        An SQLAlchemy session or connection of either colour collects them and writes them just before its commit. A sync
        connection of a driver or of Django writes them at once. Inside `once.within(…)`, `current_run()` is a target too.
        For the connection of an async driver, `await outbox.insert(…)`.
        """
        try:
            self._add(target, messages)
        except Exception as error:
            self._refused(error, messages)
            raise

    def _add(self, target: Any, messages: Sequence[Message]) -> None:
        target = _transaction_of(target)
        items = [self._prepare(message) for message in messages]
        if self._adder is not None:
            self._adder.add(target, items)
            return
        if is_redis(target):
            raise ConfigurationError(
                f"this outbox lives in {self.home.where}: a Redis pipeline commits nothing there. Open an outbox in that Redis, "
                "or add the message to a session of this database"
            )
        if is_collectable(target):
            for item in items:
                collect(target, item, self._write, self.wake)
            return
        port = _port_of(target)
        if port.colour == "async":
            raise ConfigurationError(
                f"a {type(target).__module__} connection must be awaited: `await outbox.insert(connection, message)`"
            )
        run_sync(self._insert(port, items))

    async def insert(self, target: Any, *messages: Message) -> int:
        """Write messages at once, in the transaction that is open on a driver's own connection (asyncpg, psycopg,
        sqlite3, PyMySQL, asyncmy), an SQLAlchemy one, or of the run inside `within`; returns how many were new.
        """
        if self._adder is not None:
            raise ConfigurationError(
                "an outbox in Redis queues messages on a pipeline: `outbox.add(pipe, message)`, then `await pipe.execute()`"
            )
        try:
            items = [self._prepare(message) for message in messages]
            return await self._insert(_port_of(_transaction_of(target)), items)
        except Exception as error:
            self._refused(error, messages)
            raise

    async def arrive(self, connection: Any, messages: Sequence[Message]) -> int:
        """As `insert`, for messages of another outbox: they keep their tenant and their headers as they are. For `OutboxSink`, which
        rolls its transaction back when they are refused."""
        port = _port_of(connection)
        await port.prepare()
        await self.database.verify(port)
        return await self._written(port, [self._as_it_is(message) for message in messages])

    async def _insert(self, port: Port, items: Sequence[Prepared]) -> int:
        """All of them, or none: their caller may catch what one of them is refused for, and commit."""
        await port.prepare()
        await self.database.verify(port)
        # One statement undoes itself. Others write an id and then its row, or a row and then the body that is kept apart.
        if port.dialect == "postgresql" and len(items) < 2 and not any(item.apart for item in items):
            return await self._written(port, items)
        if port.dialect == "sqlite" and not port.begun:  # there the release of a savepoint would commit
            await port.run("BEGIN IMMEDIATE")
        point = await port.savepoint("semel_outbox")
        try:
            count = await self._written(port, items)
        except BaseException as error:
            await undone(point, error, awaits=port.colour == "async")
            raise
        await point.release()
        return count

    async def _written(self, port: Port, items: Sequence[Prepared]) -> int:
        count = await write(port, self.table, items, self.parts, self._keeper, self.channel)
        port.after_end(lambda _: self.wake())
        return count

    def _prepare(self, given: Any) -> Prepared:
        message = given
        if not isinstance(message, Message):
            raise ConfigurationError(f"an outbox takes Message(topic, body, …), not {type(message).__name__}")
        # Copies: the caller may add the same message elsewhere, for another tenant.
        if self._tenant is not None and message.tenant == "default":
            message = replace(message, tenant=self._tenant)
        if "traceparent" not in message.headers and (trace := self._trace()):
            message = replace(message, headers={**message.headers, **trace})
        return self._as_it_is(message)

    def _as_it_is(self, message: Message) -> Prepared:
        over = None if self._claims is None else self._claims.over
        return prepare(message, max_body=self.max_body, apart_over=over)

    def _refused(self, error: Exception, messages: Sequence[object]) -> None:
        """For those who watch; the caller has the exception."""
        first = messages[0] if messages else None
        topic = first.topic if isinstance(first, Message) else "?"
        self._emit(NotAdded(topic, _kind(error), str(error)))

    @property
    def database(self) -> Database:
        """The SQL database of the outbox; ConfigurationError for one in Redis."""
        if not isinstance(self.home, Database):
            raise ConfigurationError(
                f"this outbox lives in {self.home.where}, which has no tables: what was asked for needs one in a SQL database"
            )
        return self.home

    def arrivals(self) -> Arrivals | None:
        """Where batches of another outbox's relay arrive, in an outbox in Redis: for `OutboxSink`."""
        return None if self._adder is None else self._adder.arrivals(self._as_it_is)

    def tag(self, key: str, *, tenant: str | None = None) -> str:
        """The hash tag, with its braces, of the slot that keeps the messages of a key: for the names of the Redis keys that
        must commit with them in a Cluster."""
        if self._adder is None:
            raise ConfigurationError("only an outbox in Redis has hash tags")
        return self._adder.tag(tenant or self._tenant or "default", key)

    @property
    def parts(self) -> int:
        """How many ways the messages are divided; read from the database once it was looked at."""
        return self.home.parts

    def _write(self, connection: Any, items: Sequence[Prepared]) -> None:
        try:
            self.database.check(connection)
            run_sync(self._on(ConnectionPort(connection), items))
        except Exception as error:
            self._not_written(error, items)
            raise

    def _not_written(self, error: Exception, items: Sequence[Prepared]) -> None:
        self._emit(NotAdded(items[0].columns["topic"], _kind(error), str(error)))

    async def _on(self, port: ConnectionPort, items: Sequence[Prepared]) -> None:
        await port.prepare()
        await write(port, self.table, items, self.parts, self._keeper, self.channel)

    @property
    def retention(self) -> float:
        """How long a delivered id stays known, in seconds: as given here, or else as the tables say."""
        stored = self.home.settings.get("retention", _DAY) if isinstance(self.home, Database) else _DAY
        return stored if self._retention is None else self._retention

    @property
    def channel(self) -> str | None:
        """Where commits are told (NOTIFY), if they are; known once the database was looked at."""
        home = self.home
        told = isinstance(home, Database) and home.dialect == "postgresql" and home.settings.get("notify")
        return f"semel_{home.identity[:16]}" if told else None

    # ----------------------------------------------------------------------------------------- bodies
    def _kept_on(self) -> float:
        """How long a body outlives the id of its message."""
        return max(0.0, self.database.settings.get("claim_retention", _WEEK) - self.retention)

    @property
    def bodies(self) -> BodyStore | None:
        """Where large bodies are kept, if they are."""
        return None if self._claims is None else self._claims.store

    async def sweep(self, *, grace: float | timedelta = _GRACE) -> int:
        """Remove bodies that are over, and those older than `grace` that no message refers to (their transaction was rolled
        back); returns how many. A relay whose outbox has the store does it by itself.

        A body that is being referred to is never removed, whatever `grace` is.
        """
        if self._claims is None:
            raise ConfigurationError(
                "this outbox keeps no bodies elsewhere: give it claim_check=, as where they are added"
            )
        young = seconds("grace", grace, least=-math.inf)
        return await self._claims.expire() + await self._claims.sweep(young)

    async def tend(self, *, orphans: bool) -> None:
        """What a relay does now and then: bodies that are over, and, with `orphans`, those that never had a message."""
        if self._claims is not None:
            await self._claims.expire()
            if orphans:
                await self._claims.sweep(_GRACE)

    async def waiting(
        self,
        *,
        topic: str | None = None,
        tenant: str | None = None,
        key: str | None = None,
        id: str | None = None,  # noqa: A002 - the word that people use
        limit: int = 100,
    ) -> list[Waiting]:
        """Messages that wait, oldest first: all, or those of a topic, tenant, key or id. For people: it looks at every row."""
        if limit < 1:
            raise ConfigurationError(f"limit must be at least 1, not {limit}")
        given = {"topic": topic, "tenant": tenant, "key": key, "id": id}
        where = {name: value for name, value in given.items() if value is not None}
        return await self.home.ledger("relay").read(lambda page: page.listed(limit, where))

    async def cautions(self) -> list[str]:
        """What in the live settings of an outbox's Redis lets it lose messages that it confirmed, with the remedy. SQL databases
        are not looked at."""
        return [] if self._adder is None else await self._adder.home.cautions()

    # ------------------------------------------------------------------------------------------- wake
    async def listen(self, wake: Callable[[], None]) -> Callable[[], Awaitable[None]] | None:
        """Call `wake`, from any thread, when any process added messages, until what is answered is awaited. None for a SQL
        database: see `notify`."""
        return None if self._adder is None else await self._adder.home.listen(wake)

    def wake(self) -> None:
        """Tell the relays of this process that there may be something to send. They would find it anyway."""
        for waker in list(self._wakers):
            waker.wake()

    def on_wake(self, call: Callable[[], object]) -> _Waker:
        """Call `call` (from any thread) after commits in this process, for as long as the answer is kept."""
        waker = _Waker(call)
        self._wakers.add(waker)
        return waker


class _Waker:
    __slots__ = ("__weakref__", "wake")

    def __init__(self, call: Callable[[], object]) -> None:
        self.wake = call


def _check_numbers(parts: int | None, max_body: int | None) -> None:
    if parts is not None and (type(parts) is not int or not 1 <= parts <= 1024):
        raise ConfigurationError(f"parts must be 1 to 1024, not {parts!r}")
    if max_body is not None and (type(max_body) is not int or max_body < 1):
        raise ConfigurationError(
            f"max_body is a number of bytes above 0, not {max_body!r}: leave it out for the usual one"
        )


def _seconds(name: str, given: float | timedelta | None, *, least: float = 0.0) -> float | None:
    return None if given is None else seconds(name, given, least=least)


def _kind(error: Exception) -> str:
    """What is wrong with a message, as `NotAdded` says it."""
    match error:
        case TooLarge():
            return "too-large"
        case CodecError() | InvalidKey():
            return "malformed"
        case KeyMismatch():
            return "conflict"
        case SemelError() if not isinstance(error, StoreUnavailable):
            return "configuration"
        case _:
            return "database"


def _transaction_of(target: Any) -> Any:
    """The session or connection itself, or that of a run inside within()."""
    if not isinstance(target, Run):
        return target
    pipe = getattr(target._engine, "pipe", None)  # noqa: SLF001 - our own run, inside within(pipeline)
    if pipe is not None:
        return pipe
    transaction = getattr(getattr(target._engine, "bound", None), "port", None)  # noqa: SLF001 - our own run
    if transaction is None:
        raise ConfigurationError(
            "this run is not inside within(): it has no transaction that a message could commit with. Use "
            "once.within(session).execute(…), or add the message to a session of yours"
        )
    return getattr(
        transaction, "_target", transaction
    )  # a session or connection of SQLAlchemy, or the port on a driver's


def _port_of(target: Any) -> Port:
    own: Port = target if hasattr(target, "savepoint") and hasattr(target, "dialect") else port_of(target)
    return own


def _current_trace() -> Mapping[str, str]:
    """W3C trace context of the current span, where OpenTelemetry is installed."""
    if _propagate is None:
        return {}
    carrier: dict[str, str] = {}
    _propagate.inject(carrier)
    return {name: value for name, value in carrier.items() if name in {"traceparent", "tracestate"}}
