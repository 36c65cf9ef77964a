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
from collections.abc import Mapping, Sequence
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
    from aiormq.exceptions import ChannelNotFoundEntity, ChannelPreconditionFailed
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise needs("aio-pika", "rabbitmq") from missing

__all__ = ["RabbitQueueSink"]

_SHORT: Final = 255  # bytes of what AMQP calls a short string
_NAME: Final = 128
_FULL: Final = "the broker refused it (a full queue, or a broker without memory or disk)"
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
        final: set[str] = set()
        stopped: set[tuple[str, str]] = set()
        try:
            async with asyncio.timeout(self._timeout):
                door = await self._connected()
                reasons |= self._unfit(rows, stopped)
                final.update(reasons)
                for wave in waves(rows):
                    todo = [row for row in in_order(wave, stopped) if row.id not in reasons]
                    results = await asyncio.gather(
                        *(self._send(door, row) for row in todo), return_exceptions=True
                    )
                    suspects = _suspects(todo, results)
                    if suspects:
                        await self._forget()
                        final |= await self._one_by_one(suspects, delivered, reasons, stopped)
                        door = await self._connected()
                    else:
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
            raise Rejected(reasons, delivered=delivered, final=final, later=_full(reasons)) from error
        if reasons:
            raise Rejected(reasons, delivered=delivered, final=final, later=_full(reasons))
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

    async def _one_by_one(
        self,
        suspects: Sequence[tuple[Row, Any]],
        delivered: set[str],
        reasons: dict[str, str],
        stopped: set[tuple[str, str]],
    ) -> set[str]:
        """A message that RabbitMQ cannot read, or finds too large, closes the channel for all that are on it. Who is to blame shows
        on a connection that nobody else has; returns those."""
        guilty: set[str] = set()
        connection, door = None, None
        _note(*_decided(suspects), delivered, reasons, stopped)
        try:
            for row in (row for row, result in suspects if _is_broken(result)):
                if connection is None or door is None:
                    connection, door = await self._open()
                try:
                    await self._send(door, row)
                except ChannelPreconditionFailed as error:
                    guilty.add(row.id)
                    reasons[row.id] = f"RabbitMQ cannot take it: {error}"
                    if row.key is not None:
                        stopped.add((row.tenant, row.key))
                    await _shut(connection)
                    connection = None
                except DeliveryError as error:
                    _note([row], [error], delivered, reasons, stopped)
                else:
                    delivered.add(row.id)
        finally:
            if connection is not None:
                await _shut(connection)
        return guilty

    # -------------------------------------------------------------------------------------- connection
    async def _connected(self) -> AbstractExchange:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connection, self._door = loop, None, None
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._door is None or self._connection is None or self._connection.is_closed:
                await self._forget()
                self._connection, self._door = await self._open()
        return self._door

    async def _open(self) -> tuple[AbstractConnection, AbstractExchange]:
        address = self._address
        connection = await aio_pika.connect(
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
            channel: AbstractChannel = await connection.channel(
                publisher_confirms=True, on_return_raises=True
            )
            if not self._exchange:
                return connection, channel.default_exchange
            return connection, await channel.get_exchange(self._exchange, ensure=True)
        except ChannelNotFoundEntity as error:
            await _shut(connection)
            raise ConfigurationError(
                f"RabbitMQ at {address.name} has no exchange {self._exchange!r} on virtual host {address.path or '/'!r}: "
                "declare it, or correct ?exchange="
            ) from error
        except BaseException:
            await _shut(connection)
            raise

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
        if connection is not None:
            await _shut(connection)

    async def aclose(self) -> None:
        """Close the connection."""
        if self._loop is asyncio.get_running_loop():
            await self._forget()


async def _shut(connection: AbstractConnection) -> None:
    if connection.is_closed:
        return
    try:
        async with asyncio.timeout(1):
            await connection.close()
    except (AMQPError, OSError, TimeoutError, RuntimeError):
        return  # it was broken: that is why it is left


def _is_broken(result: Any) -> bool:
    return isinstance(result, _BROKEN) and not isinstance(result, DeliveryError)


def _suspects(rows: Sequence[Row], results: Sequence[Any]) -> list[tuple[Row, Any]]:
    """All of a wave, if the broker closed the channel over one of its messages."""
    closed = any(isinstance(result, ChannelPreconditionFailed) for result in results)
    return list(zip(rows, results, strict=True)) if closed else []


def _decided(suspects: Sequence[tuple[Row, Any]]) -> tuple[list[Row], list[Any]]:
    """What the broker had said of a wave before it closed the channel."""
    known = [(row, result) for row, result in suspects if not _is_broken(result)]
    return [row for row, _ in known], [result for _, result in known]


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
        elif _is_broken(result) or not isinstance(result, Exception):
            broken = result
            continue
        else:
            reasons[row.id] = f"it cannot be sent: {result!r}"
        if row.key is not None:
            stopped.add((row.tenant, row.key))
    if broken is not None:
        raise broken


def _full(reasons: Mapping[str, str]) -> set[str]:
    """Those that are refused for no fault of theirs: they wait until there is room."""
    return {identity for identity, reason in reasons.items() if reason == _FULL}


def _why(error: DeliveryError) -> str:
    returned: Any = error.message
    key = getattr(getattr(returned, "delivery", None), "routing_key", None) or getattr(
        returned, "routing_key", ""
    )
    kind = type(error.frame).__name__
    if kind == "Nack":
        return _FULL
    return f"unroutable: no queue is bound for routing key {quote(str(key), safe=' .#*-_:/')!r}"
