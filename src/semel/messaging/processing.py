"""One message, or a batch, in a caller's transaction: admitted first, then handed to its handler; both commit or neither."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from semel.messaging.admitting import admit, admit_many, compare, is_known, remember
from semel.messaging.belonging import refuse_elsewhere
from semel.messaging.bodies import HEADER, BodyMissing, BodyStore, fetched
from semel.messaging.calling import Handler, awaited, call, shown, takes_two
from semel.messaging.database import Database
from semel.messaging.message import Message
from semel.messaging.quick import admit_quickly, connection_of
from semel.messaging.sameness import hash_of
from semel.messaging.standing import (
    IN_TRANSACTION,
    Undone,
    ended,
    is_abandonable,
    is_sound,
    plain,
    root_of,
    undone,
)
from semel.points import reach
from semel.runtime import run_sync
from semel.within import port_of
from semel.within.ports import Port

__all__ = ["Processing"]

T = TypeVar("T")


class Processing:
    """What a consumer admits, in the tables of `database`. `bodies` is where large bodies are, if they are elsewhere."""

    def __init__(self, database: Database, consumer: str, bodies: BodyStore | None) -> None:
        self._database = database
        self._table = database.table
        self._consumer = consumer
        self._bodies = bodies

    def one(
        self, session: Any, message: Message, handler: Handler, business_key: str | None, *, own: bool
    ) -> Any:
        """Whether the message was new, and handled; awaited where the session is async. `own` says that the transaction is for
        this message alone, and is rolled back on an error: otherwise, and where that cannot be done, it is done in a savepoint."""
        own = own and is_abandonable(session)
        if own and (link := connection_of(session)) is not None and self._database.ready:
            done = self._quickly(link, session, message, handler, business_key)
            if done is not None:
                return done
        port = port_of(session)
        work = self._admitted(port, session, message, handler, business_key, own=own)
        body = work if own else self._saved(port, work)
        return body if port.colour == "async" else run_sync(body)

    async def many(
        self, port: Port, session: Any, messages: Sequence[Message], handler: Handler
    ) -> list[Message]:
        """Those of a batch that were new, and handled together, in a savepoint."""
        return await self._saved(port, self._admitted_batch(port, session, messages, handler))

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
        except BaseException as error:
            await undone(point, error, awaits=port.colour == "async")
            raise
        await point.release()
        return done

    async def _ready(self, port: Port) -> None:
        await port.prepare()
        await self._database.look(port)
        if port.dialect == "sqlite" and not port.begun:
            await port.run("BEGIN IMMEDIATE")

    # ---------------------------------------------------------------------------------------- one message
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
            if await is_known(port, self._table, self._consumer, message):
                return False  # a late copy of what was handled: its body is over
            raise missing
        try:
            fresh = await admit(port, self._table, self._consumer, message, business_key)
        except Exception as error:
            refuse_elsewhere(error, port, self._table, self._database.where)
            raise
        if not fresh:
            return False
        reach("inbox.admitted")
        begun = root_of(session) if own else None
        try:
            result = await call(handler, session, message, port.colour == "async")
        except Exception as error:
            if (
                own and root_of(session) is not begun
            ):  # then its admission may be committed, and it would seem done
                raise ended(message) from error
            raise
        if own:  # a savepoint would tell
            await self._check(port, session, message, begun)
        if result is not None:
            await remember(port, self._table, self._consumer, message, shown(result), business_key)
        return True

    async def _check(self, port: Port, session: Any, message: Message, begun: Any) -> None:
        """The transaction is the one that admitted the message, and can be committed."""
        if root_of(session) is not begun:
            raise ended(message)
        sound = is_sound(session)
        if sound is None:
            sound = await is_known(port, self._table, self._consumer, message)
        if not sound:
            raise Undone(message)

    async def _body_of(self, port: Port, message: Message) -> Message:
        """The message with its body, where that is kept elsewhere; checked against its hash."""
        if HEADER not in message.headers:
            return message
        if port.colour == "sync":
            return fetched(self._bodies, message)
        return await asyncio.to_thread(fetched, self._bodies, message)

    # ---------------------------------------------------------------------------------------- the short way
    def _quickly(
        self, link: Any, session: Any, message: Message, handler: Handler, business_key: str | None
    ) -> bool | None:
        """As `_admitted`, the admission made the short way; None where that is not open."""
        if HEADER in message.headers:
            return None
        digest = hash_of(message)
        said = (self._consumer, message.id, message.tenant, digest, message.topic, business_key)
        fresh = admit_quickly(link, self._table, said)
        if fresh is None:
            return None
        result = None
        if fresh:
            reach("inbox.admitted")
            held = plain(session)
            begun = held.get_transaction()
            try:
                result = handler(session, message) if takes_two(handler) else handler(message)
            except Exception as error:
                if held.get_transaction() is not begun:
                    raise ended(message) from error
                raise
            if held.get_transaction() is not begun:
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
            await compare(port, self._table, self._consumer, message, digest)
            return False
        result = await awaited(result, awaits=False)
        if result is not None:
            await remember(port, self._table, self._consumer, message, shown(result), business_key)
        return True

    # ------------------------------------------------------------------------------------------- a batch
    async def _admitted_batch(
        self, port: Port, session: Any, messages: Sequence[Message], handler: Handler
    ) -> list[Message]:
        whole = [each for message in messages if (each := await self._whole(port, message)) is not None]
        try:
            fresh = await admit_many(port, self._table, self._consumer, whole)
        except Exception as error:
            refuse_elsewhere(error, port, self._table, self._database.where)
            raise
        if fresh:
            reach("inbox.admitted")
            await call(handler, session, fresh, port.colour == "async")
        return fresh

    async def _whole(self, port: Port, message: Message) -> Message | None:
        """The message with its body; None for a late copy of what was handled, whose body is over."""
        try:
            return await self._body_of(port, message)
        except BodyMissing:
            if await is_known(port, self._table, self._consumer, message):
                return None
            raise
