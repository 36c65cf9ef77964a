"""RabbitMQ exchanges and queues: at least once. The broker confirms every message, and remembers none.

`amqp://user:password@host:5672/vhost?exchange=shop&routing_key={topic}` (`amqps://` for TLS). Without an exchange the routing
key is the queue's name. Messages are persistent and mandatory: one that no queue takes comes back and is rejected. Each has
its id as `message_id`, which an `Inbox` behind the queue admits once.

RabbitMQ may refuse any message of a row of them (a full queue with `reject-publish`), so the next message of a key is sent
when the one before it is confirmed. Many keys travel together, a single one waits for a round trip each.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Final, Self
from urllib.parse import quote

from semel.errors import ConfigurationError
from semel.messaging.sink import Guarantee, Rejected, Row, SinkUnavailable
from semel.messaging.sinks.address import Address, needs
from semel.messaging.sinks.closing import Closing
from semel.messaging.sinks.envelope import filled, in_order, to_headers, waves

try:
    import aio_pika
    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange, HeadersType
    from aio_pika.exceptions import AMQPError, AuthenticationError, DeliveryError, ProbableAuthenticationError
    from aiormq.exceptions import ChannelNotFoundEntity
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise needs("aio-pika", "rabbitmq") from missing

__all__ = ["RabbitQueueSink"]

_SHORT: Final = 255  # bytes of what AMQP calls a short string
_NAME: Final = 128
_BROKEN: Final = (AMQPError, OSError, TimeoutError, RuntimeError)  # the connection's fault, not a message's


class RabbitQueueSink(Closing):
    """Publishes to an exchange, which must be there; `timeout` bounds each call."""

    guarantee: Guarantee = "at-least-once"

    def __init__(
        self, url: str, *, exchange: str = "", routing_key: str = "{topic}", timeout: float = 10.0
    ) -> None:
        self._address = Address.of(url, port=5672, options=())
        self._exchange = exchange
        self._routing_key = routing_key
        self._timeout = timeout
        self._connection: AbstractConnection | None = None
        self._door: AbstractExchange | None = None
        self._opening = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `amqp://…/vhost?exchange=NAME&routing_key=TEMPLATE&timeout=10`."""
        address = Address.of(url, port=5672, options=("exchange", "routing_key", "timeout"))
        return cls(
            url.partition("?")[0],
            exchange=address.text("exchange", ""),
            routing_key=address.text("routing_key", "{topic}"),
            timeout=address.number("timeout", 10.0),
        )

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        """Publish the rows and wait for the broker's confirmations. Rejected names those that came back."""
        del part, epoch, batch  # the broker keeps no numbers
        delivered: set[str] = set()
        reasons: dict[str, str] = {}
        final: frozenset[str] = frozenset()
        stopped: set[tuple[str, str]] = set()
        try:
            async with asyncio.timeout(self._timeout):
                door = await self._connected()
                reasons |= self._unfit(rows, stopped)
                final = frozenset(reasons)
                for wave in waves(rows):
                    todo = [row for row in in_order(wave, stopped) if row.id not in reasons]
                    results = await asyncio.gather(
                        *(self._send(door, row) for row in todo), return_exceptions=True
                    )
                    _note(todo, results, delivered, reasons, stopped)
        except (AuthenticationError, ProbableAuthenticationError) as error:
            await self._forget()
            raise self._refused(error) from error
        except (
            AMQPError,
            OSError,
            TimeoutError,
            RuntimeError,
        ) as error:  # RuntimeError: a channel that is closed
            if isinstance(error, TimeoutError):
                self._give_up()
            await self._forget()
            if not delivered and not reasons:
                reason = str(error) or type(error).__name__
                raise SinkUnavailable(
                    f"RabbitMQ at {self._address.name} did not take it: {reason}"
                ) from error
            # What was confirmed is told first, so that it is not sent again; the next call meets the outage.
            raise Rejected(reasons, delivered=delivered, final=final) from error
        if reasons:
            raise Rejected(reasons, delivered=delivered, final=final)
        return None

    def _unfit(self, rows: Sequence[Row], stopped: set[tuple[str, str]]) -> dict[str, str]:
        """What AMQP has no room for; what follows under their keys waits."""
        reasons: dict[str, str] = {}
        for row in rows:
            if row.key is not None and (row.tenant, row.key) in stopped:
                continue
            names = {"id": row.id, "type": row.type or "", "routing key": filled(self._routing_key, row)}
            long = [name for name, value in names.items() if len(value.encode()) > _SHORT]
            long += [f"header {name[:40]!r}" for name in to_headers(row) if len(name.encode()) > _NAME]
            if long:
                reasons[row.id] = (
                    f"too long for AMQP, which takes {_SHORT} bytes ({_NAME} of a header's name): {', '.join(long)}"
                )
                if row.key is not None:
                    stopped.add((row.tenant, row.key))
        return reasons

    async def _send(self, door: AbstractExchange, row: Row) -> None:
        headers: HeadersType = {**to_headers(row)}
        message = aio_pika.Message(
            row.body,
            message_id=row.id,
            type=row.type,
            headers=headers,
            content_type="application/octet-stream" if row.raw else "application/json",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        await door.publish(message, filled(self._routing_key, row), mandatory=True)

    # -------------------------------------------------------------------------------------- connection
    async def _connected(self) -> AbstractExchange:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connection, self._door = loop, None, None
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._door is None or self._connection is None or self._connection.is_closed:
                await self._forget()
                self._door = await self._open()
        return self._door

    async def _open(self) -> AbstractExchange:
        address = self._address
        self._connection = await aio_pika.connect(
            host=address.host,
            port=address.port,
            login=address.user or "guest",
            password=address.password or "guest",
            virtualhost=address.path or "/",
            ssl=address.scheme == "amqps",
            ssl_context=address.tls("amqps"),
            timeout=self._timeout,
            client_properties={"connection_name": "semel"},
        )
        try:
            channel: AbstractChannel = await self._connection.channel(
                publisher_confirms=True, on_return_raises=True
            )
            if not self._exchange:
                return channel.default_exchange
            return await channel.get_exchange(self._exchange, ensure=True)
        except ChannelNotFoundEntity as error:
            await self._forget()
            raise ConfigurationError(
                f"RabbitMQ at {address.name} has no exchange {self._exchange!r} on virtual host {address.path or '/'!r}: "
                "declare it, or correct ?exchange="
            ) from error

    def _refused(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"RabbitMQ at {self._address.name} refused user {self._address.user or 'guest'!r} on virtual host "
            f"{self._address.path or '/'!r} ({type(error).__name__}): correct the user, the password or the rights "
            "(rabbitmqctl set_permissions)"
        )

    def _give_up(self) -> None:
        """No farewell to a broker that has stopped: aiormq would wait three heartbeats for the rest of the batch to be written."""
        transport: Any = self._connection.transport if self._connection is not None else None
        if transport is not None:
            transport.connection._Connection__last_frame_time = -math.inf  # noqa: SLF001  # this is how it knows

    async def _forget(self) -> None:
        connection, self._connection, self._door = self._connection, None, None
        if connection is not None and not connection.is_closed:
            try:
                async with asyncio.timeout(1):
                    await connection.close()
            except (AMQPError, OSError, TimeoutError, RuntimeError):
                return  # it was broken: that is why it is left

    async def aclose(self) -> None:
        """Close the connection."""
        if self._loop is asyncio.get_running_loop():
            await self._forget()


def _note(
    rows: Sequence[Row],
    results: Sequence[Any],
    delivered: set[str],
    reasons: dict[str, str],
    stopped: set[tuple[str, str]],
) -> None:
    """What came of a wave. An error that is not about one message is raised when all is noted."""
    broken: BaseException | None = None
    for row, result in zip(rows, results, strict=True):
        if not isinstance(result, BaseException):
            delivered.add(row.id)
            continue
        if isinstance(result, DeliveryError):
            reasons[row.id] = _why(result)
        elif isinstance(result, _BROKEN) or not isinstance(result, Exception):
            broken = result
            continue
        else:
            reasons[row.id] = f"it cannot be sent: {result!r}"
        if row.key is not None:
            stopped.add((row.tenant, row.key))
    if broken is not None:
        raise broken


def _why(error: DeliveryError) -> str:
    returned: Any = error.message
    key = getattr(getattr(returned, "delivery", None), "routing_key", None) or getattr(
        returned, "routing_key", ""
    )
    kind = type(error.frame).__name__
    if kind == "Nack":
        return "the broker refused it (a full queue, or a broker without memory or disk)"
    return f"unroutable: no queue is bound for routing key {quote(str(key), safe=' .#*-_:/')!r}"
