"""RabbitMQ queues, with acknowledgements: `amqp://user:password@host:5672/vhost?queue=orders`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

from semel.errors import ConfigurationError, InvalidKey, StoreUnavailable
from semel.messaging.message import Message, new_id
from semel.messaging.sinks.address import Address, needs
from semel.messaging.sinks.closing import Closing
from semel.messaging.sinks.envelope import PREFIX
from semel.messaging.sources import malformed, message_of

try:
    import aio_pika
    from aio_pika.abc import AbstractConnection, AbstractIncomingMessage
    from aio_pika.exceptions import AMQPError, ChannelNotFoundEntity
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise needs("aio-pika", "rabbitmq") from missing

__all__ = ["RabbitSource"]

_WAIT: Final = 1.0
_GONE: Final = (AMQPError, OSError, TimeoutError, asyncio.CancelledError, RuntimeError)


class _Incoming:
    __slots__ = ("_raw", "message")

    def __init__(self, raw: AbstractIncomingMessage, message: Message) -> None:
        self._raw = raw
        self.message = message

    async def ack(self) -> None:
        try:
            await self._raw.ack()
        except (AMQPError, OSError, RuntimeError) as error:
            raise StoreUnavailable(f"RabbitMQ did not take an acknowledgement: {error}") from error

    async def nack(self) -> None:
        try:
            await self._raw.nack(requeue=True)
        except (AMQPError, OSError, RuntimeError) as error:
            raise StoreUnavailable(f"RabbitMQ did not take a message back: {error}") from error

    async def extend(self) -> None:
        """RabbitMQ hands out again what a connection that ended had, not what takes long."""


class RabbitSource(Closing):
    """A durable queue, made when it is not there (`create=no` leaves that to you); `prefetch` messages at a time."""

    extends_every = 3600.0

    def __init__(
        self, url: str, queue: str, *, prefetch: int = 100, create: bool = True, timeout: float = 10.0
    ) -> None:
        if not queue:
            raise ConfigurationError("a RabbitMQ source needs ?queue=NAME")
        self._address = Address.of(url, port=5672, options=())
        self._queue = queue
        self._prefetch = prefetch
        self._create = create
        self._timeout = timeout
        self._url = url
        self._connection: AbstractConnection | None = None
        self._is_consuming: Callable[[], bool] = lambda: True
        self._waiting: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()

    @classmethod
    def from_url(cls, url: str, *, group: str) -> Self:
        """From `amqp://…/vhost?queue=NAME&prefetch=100&create=yes`; the queue's name is the group's unless given."""
        address = Address.of(url, port=5672, options=("queue", "prefetch", "create", "timeout"))
        return cls(
            url.partition("?")[0],
            address.text("queue", group),
            prefetch=int(address.number("prefetch", 100)),
            create=address.text("create", "yes") != "no",
            timeout=address.number("timeout", 10.0),
        )

    async def receive(self, limit: int) -> Sequence[_Incoming]:
        """What the broker pushed, after at most a second."""
        await self._check()
        try:
            await self._connected()
        except ChannelNotFoundEntity as error:
            raise ConfigurationError(
                f"RabbitMQ has no queue {self._queue!r}: make it, or leave create=yes"
            ) from error
        except (AMQPError, OSError, TimeoutError) as error:
            await self._forget()
            raise StoreUnavailable(f"RabbitMQ at {self._address.name} did not answer: {error}") from error
        try:
            first = await asyncio.wait_for(self._waiting.get(), _WAIT)
        except TimeoutError:
            if self._connection is None or self._connection.is_closed:
                await self._forget()
            return []
        found = [first]
        while len(found) < limit and not self._waiting.empty():
            found.append(self._waiting.get_nowait())
        return [_Incoming(raw, _message(raw, self._queue)) for raw in found]

    async def _check(self) -> None:
        """StoreUnavailable if the broker pushes nothing any more although the connection stands: it closes the channel of whoever
        keeps a message for longer than its `consumer_timeout`, and ends the consumption of a queue that is deleted."""
        if self._connection is None or self._connection.is_closed or self._is_consuming():
            return
        await self._forget()
        raise StoreUnavailable(
            f"RabbitMQ at {self._address.name} has ended the consumption of queue {self._queue!r}, which begins anew: was it deleted, "
            "or a message kept for longer than the server's consumer_timeout?"
        )

    async def _connected(self) -> None:
        if self._connection is not None and not self._connection.is_closed:
            return
        self._waiting = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout):
            connection = await aio_pika.connect(self._url)
            try:
                await self._consume(connection)
            except BaseException:  # half open is not open: the next look begins anew
                await _closed(connection)
                raise
        self._connection = connection

    async def _consume(self, connection: AbstractConnection) -> None:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=self._prefetch)
        queue = (
            await channel.declare_queue(self._queue, durable=True)
            if self._create
            else await channel.get_queue(self._queue, ensure=True)
        )
        below: Any = await channel.get_underlay_channel()
        tag = await queue.consume(self._waiting.put)
        self._is_consuming = lambda: not channel.is_closed and tag in below.consumers

    async def _forget(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _closed(connection)

    async def aclose(self) -> None:
        """Close the connection: what was not acknowledged goes to somebody else."""
        await self._forget()


async def _closed(connection: AbstractConnection) -> None:
    try:
        await connection.close()
    except _GONE:
        return  # it is gone already


def _message(raw: AbstractIncomingMessage, queue: str) -> Message:
    given: dict[str, Any] = dict(raw.headers or {})
    said = {name: str(value) for name, value in given.items()}
    fields = {name.removeprefix(PREFIX): value for name, value in said.items() if name.startswith(PREFIX)}
    headers = {name: value for name, value in said.items() if not name.startswith(PREFIX)}
    identity = raw.message_id or ""
    delivery = 2 if raw.redelivered else 1
    topic = fields.get("topic") or raw.routing_key or queue
    try:
        return message_of(
            raw.body, identity=identity, topic=topic, fields=fields, headers=headers, delivery=delivery
        )
    except (InvalidKey, ConfigurationError) as error:
        why = f"{error} (message_id {identity!r}: the sender must give each message an id of its own)"
        # The broker has no name for it. One that came before is told by its content; another one may have the same.
        entry = "" if raw.redelivered else new_id()
        return malformed(raw.body, topic=queue, problem=why, entry=entry)
