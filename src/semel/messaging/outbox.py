"""Messages that commit or vanish with the caller's rows."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from semel.errors import ConfigurationError
from semel.messaging.collecting import collect, is_collectable
from semel.messaging.database import Database, Resident
from semel.messaging.message import Message
from semel.messaging.writing import Prepared, prepare, write
from semel.run import Run
from semel.runtime import run_sync
from semel.within import port_of
from semel.within.alchemy import ConnectionPort
from semel.within.ports import Port

_propagate: Any = None
with contextlib.suppress(ModuleNotFoundError):  # tracing is optional
    from opentelemetry import propagate as _propagate

__all__ = ["Outbox"]

_MAX_BODY: Final = 1 << 20


class Outbox(Resident):
    """`outbox.add(session, message)`: the message is sent if, and only if, the session's transaction commits.

    `where` is a URL or an SQLAlchemy engine of the database that holds the caller's rows. `parts` is how many ways the
    messages are divided for relays (64 unless given; fixed from the first message on), `retention` how long a delivered id stays known.
    """

    def __init__(
        self,
        where: object,
        *,
        table: str = "semel",
        parts: int | None = None,
        retention: float | timedelta = 86_400,
        max_body: int = _MAX_BODY,
        create: bool = True,
        tenant: str | None = None,
        trace: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        if parts is not None and not 1 <= parts <= 1024:
            raise ConfigurationError(f"parts must be 1 to 1024, not {parts}")
        self.database = Database(where, table=table, create=create, parts=parts)
        self.table = table
        self.retention = retention.total_seconds() if isinstance(retention, timedelta) else float(retention)
        self.max_body = max_body
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
        target = _transaction_of(target)
        items = [self._prepare(message) for message in messages]
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
        items = [self._prepare(message) for message in messages]
        return await self._insert(_port_of(_transaction_of(target)), items)

    async def _insert(self, port: Port, items: Sequence[Prepared]) -> int:
        await port.prepare()
        await self.database.look(port)
        count = await write(port, self.table, items, self.parts)
        port.after_end(self.wake)
        return count

    def _prepare(self, given: Any) -> Prepared:
        message = given
        if not isinstance(message, Message):
            raise ConfigurationError(f"an outbox takes Message(topic, body, …), not {type(message).__name__}")
        if self._tenant is not None and message.tenant == "default":
            object.__setattr__(message, "tenant", self._tenant)
        if "traceparent" not in message.headers and (trace := self._trace()):
            object.__setattr__(message, "headers", {**message.headers, **trace})
        return prepare(message, max_body=self.max_body)

    @property
    def parts(self) -> int:
        """How many ways the messages are divided; read from the database once it was looked at."""
        return self.database.parts

    def _write(self, connection: Any, items: Sequence[Prepared]) -> None:
        self.database.check(connection)
        run_sync(self._on(ConnectionPort(connection), items))

    async def _on(self, port: ConnectionPort, items: Sequence[Prepared]) -> None:
        await port.prepare()
        await write(port, self.table, items, self.parts)

    # ------------------------------------------------------------------------------------------- wake
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


def _transaction_of(target: Any) -> Any:
    """The session or connection itself, or that of a run inside within()."""
    if not isinstance(target, Run):
        return target
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
