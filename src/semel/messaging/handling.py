"""One attempt at a message: its handler with the admission in a session of its own, or through `once`.

What blocks runs in threads of the consumer's own, as many as it handles messages at a time: asyncio's common ones are a few more
than there are cores, and whoever else uses them would wait for handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import sessionmaker

from semel.errors import ConfigurationError, SemelError
from semel.messaging.admitting import check_business_key
from semel.messaging.bodies import HEADER, fetched
from semel.messaging.failures import translating
from semel.messaging.message import Message
from semel.points import reach
from semel.shown import shown

if TYPE_CHECKING:
    from semel.messaging.consumer import Entry
    from semel.messaging.inbox import Inbox
    from semel.messaging.sink import Row

__all__ = ["Handling", "Quit", "is_cancelled"]

T = TypeVar("T")


class Quit(SemelError):
    """A handler, or a function of a route, raised SystemExit, or cancelled itself: its message failed. The consumer or relay, which
    has others, goes on."""

    def __init__(self, message: Message | Row, error: BaseException, what: str = "handler") -> None:
        super().__init__(
            f"the {what} of message {message.id} ({message.topic}) raised {shown(error)}, which would have ended more than its message: "
            "let it raise an Exception"
        )


class Handling:
    """Runs handlers, `concurrency` at a time. `sessions` is an engine or a sessionmaker."""

    def __init__(self, inbox: Inbox, sessions: Any, concurrency: int) -> None:
        self._inbox = inbox
        self._sessions = _Sessions(sessions)
        self._concurrency = concurrency
        self._threads: ThreadPoolExecutor | None = None

    def check(self, entry: Entry) -> None:
        """A coroutine needs an async session; told when the consumer is made, not at the first message."""
        if entry.once is None and inspect.iscoroutinefunction(entry.handler) and not self._sessions.is_async:
            raise ConfigurationError(
                f"the handler for {entry.pattern!r} is a coroutine function and the sessions are sync: give the inbox an "
                "AsyncEngine, or sessions=async_sessionmaker(…); or once=AsyncSemel(…) if it writes to no database"
            )

    async def handle(self, entry: Entry, message: Message) -> bool:
        """Whether it was admitted. Quit for what must not end the consumer."""
        try:
            return await (self._transacted if entry.once is None else self._consumed)(entry, message)
        except SystemExit as error:
            raise Quit(message, error) from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise Quit(message, error) from error

    async def _transacted(self, entry: Entry, message: Message) -> bool:
        """Admission and handler in one transaction."""
        key = entry.business_key(message) if entry.business_key is not None else None
        check_business_key(key)
        async with self._session() as session:
            answer = partial(self._inbox._processing.one, business_key=key, own=True)  # noqa: SLF001 - our own
            if isinstance(session, AsyncSession):
                async with session.begin():
                    with translating():
                        _ = await session.connection()  # the handler's errors are its own
                    done = bool(await answer(session, message, entry.handler))
                    reach("consumer.handled")
                return done

            def blocking() -> bool:
                with session.begin():
                    found = bool(answer(session, message, entry.handler))
                    reach("consumer.handled")
                    return found

            return await self._aside(blocking)

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        """A new session, closed afterwards."""
        session = self._sessions.make()
        try:
            yield session
        finally:
            if isinstance(session, AsyncSession):
                await session.close()
            else:
                await self._aside(session.close)

    async def _consumed(self, entry: Entry, message: Message) -> bool:
        """Outside effects: a lease, and `on_unknown` for what is lost in the middle."""
        if HEADER in message.headers:
            message = await self._aside(partial(fetched, self._inbox.bodies, message))
        once: Any = entry.once
        options: dict[str, Any] = {
            "operation": f"{self._inbox.consumer}/{message.topic}"[:255],
            "tenant": message.tenant,
            "request": [message.topic, message.type, message.schema, message.body],
            "retention": self._inbox.retention,
            **entry.options,
        }
        answer = partial(once.consume, message.id, entry.handler, message, **options)
        if inspect.iscoroutinefunction(once.consume):
            return bool(await answer())
        return bool(await self._aside(answer))

    async def _aside(self, work: Callable[[], T]) -> T:
        """In a thread of our own, with the context of here."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="semel-handler")
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(context.run, work))

    def close(self) -> None:
        """Let the threads go; a handler that is still in one is not waited for."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)


class _Sessions:
    """Makes a session for each message, of the colour that the handler has."""

    def __init__(self, given: Any) -> None:
        self.make: Callable[[], Any]
        if isinstance(given, AsyncEngine):
            self.make, self.is_async = async_sessionmaker(given), True
        elif isinstance(given, Engine):
            self.make, self.is_async = sessionmaker(given), False
        elif isinstance(given, async_sessionmaker):
            self.make, self.is_async = given, True
        elif isinstance(given, sessionmaker):
            self.make, self.is_async = given, False
        else:
            raise ConfigurationError(
                f"sessions= takes an engine or a sessionmaker of SQLAlchemy, not {type(given).__name__}"
            )


def is_cancelled() -> bool:
    """Whether this task was told to end and did not hear it: until Python 3.12 `wait_for`, which redis-py has around each
    command, swallows a cancellation that comes in the moment when it is done."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
