"""RabbitMQ Streams: exact. The broker itself keeps, per producer name, the highest publishing id that it took.

`rabbitmq+stream://user:password@host:5552/vhost?stream=orders` (`rabbitmq+streams://` for TLS); `{topic}` and `{tenant}` in
the stream's name are filled in. A part of an outbox is a producer, a batch is one entry of the stream (several when it is
larger than a frame), and its publishing id is made from its number, so that the broker drops what comes twice, however late
and from whomever. A batch that is in one entry is there whole or not at all; a cut one is completed when it is sent again.

The epoch is kept as a stored offset of the producer's name. It is not written in one step with the batch, and need not be:
whatever an overtaken relay still sends was written down before it was overtaken, has the same number and the same content,
and is dropped. The stored epoch makes it stop.

A stream remembers 255 producers, the latest ones: parts × outboxes that write to one stream must not be more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, Self, TypeVar

from semel.errors import ConfigurationError
from semel.messaging.pauses import unless
from semel.messaging.sink import Fenced, Guarantee, Rejected, Row, SinkUnavailable
from semel.messaging.sinks.address import Address, needs
from semel.messaging.sinks.closing import Closing, parted
from semel.messaging.sinks.envelope import filled, shortened, to_headers

try:
    from rstream import AMQPMessage, exceptions, schema
    from rstream._pyamqp import message as amqp  # rstream exports the message without its properties
    from rstream.client import Addr, Client
    from rstream.connection import ConnectionClosed
    from rstream.utils import OnClosedErrorInfo
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise needs("rstream", "rabbitmq") from missing

__all__ = ["RabbitStreamSink"]

logging.getLogger("rstream").addHandler(logging.NullHandler())  # what it reports is raised here as well

T = TypeVar("T")
_Properties: Final[Any] = vars(amqp)["Properties"]  # a module that asks type checkers to look away
_BITS: Final = 20  # of a publishing id: which entry of the batch; the rest is the batch's number
_OVERHEAD: Final = 64  # of a frame and its one entry, at most
_PRODUCERS: Final = 255
_NAME: Final = 255  # bytes of a stream's name
_NO_BODY: Final = b"\x00\x53\x75\xa0\x00"  # AMQP 1.0: a section of data, of no bytes
_FAILURES: Final = (
    OSError,
    TimeoutError,
    EOFError,
    ConnectionClosed,
    exceptions.ServerError,
    exceptions.ClientError,
)
_REFUSALS: Final = (
    exceptions.AuthenticationFailure,
    exceptions.SASLAuthenticationFailureLoopback,
    exceptions.VirtualHostAccessFailure,
    exceptions.AccessRefused,
)


class RabbitStreamSink(Closing):
    """Appends to a stream, which is made when it is not there (`create=no` leaves that to you).

    `timeout` bounds each call. `max_age` (such as "7D") and `max_bytes` are the retention of a stream that is made here.
    """

    guarantee: Guarantee = "exact"

    def __init__(
        self,
        url: str,
        stream: str = "{topic}",
        *,
        timeout: float = 5.0,
        create: bool = True,
        max_age: str | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._address = Address.of(url, port=5552, options=())
        self.stream = stream
        self._timeout = timeout
        self._create = create
        self._arguments = {
            name: value for name, value in (("max-age", max_age), ("max-length-bytes", max_bytes)) if value
        }
        self._source = "semel"
        self._links: list[_Link] = []
        self._places: dict[tuple[str, int], tuple[_Link, int]] = {}
        self._opening = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `rabbitmq+stream://…/vhost?stream=NAME&timeout=5&create=no&max_age=7D&max_bytes=N`."""
        names = ("stream", "timeout", "create", "max_age", "max_bytes")
        address = Address.of(url, port=5552, options=names)
        return cls(
            url.partition("?")[0],
            address.text("stream", "{topic}"),
            timeout=address.number("timeout", 5.0),
            create=address.flag("create", default=True),
            max_age=address.options.get("max_age"),
            max_bytes=int(address.number("max_bytes", 0)) or None,
        )

    def bind(self, source: str) -> None:
        """Who publishes: two outboxes that write to one stream are different producers."""
        self._source = shortened(source, 240)  # of the 255 that a producer's name may have

    def lane(self, row: Row) -> str:
        """One frontier per stream, in it."""
        return filled(self.stream, row) if "{" in self.stream else ""

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        """Append the rows under their number; the number that was there."""
        stream = filled(self.stream, rows[0])
        if len(stream.encode()) > _NAME:
            why = f"a stream's name has at most {_NAME} bytes, and theirs has {len(stream.encode())}: {stream[:60]!r}…"
            raise Rejected({row.id: why for row in rows}, final={row.id for row in rows})
        try:
            async with asyncio.timeout(self._timeout):
                link, publisher = await self._place(stream, part)
                found = await link.unless_gone(self._check(link, stream, part, epoch))
                if found == batch - 1:
                    # Raises Rejected before anything is written, and never what is in.
                    entries = _entries(rows, link.room, batch)
                    await link.unless_gone(link.write(publisher, entries))
                return found
        except _REFUSALS as error:
            self._forget()
            raise self._refused(error) from error
        except _FAILURES as error:
            self._forget()
            reason = str(error) or type(error).__name__
            raise SinkUnavailable(
                f"RabbitMQ at {self._address.name} did not take the batch: {reason}"
            ) from error

    async def _check(self, link: _Link, stream: str, part: int, epoch: int) -> int:
        """The frontier; raises Fenced if a later owner was here, and leaves word that this one is."""
        name = self._producer(part)
        known, last = await asyncio.gather(link.epoch(stream, name), link.last(stream, name))
        if known > epoch:
            raise Fenced(f"part {part} of stream {stream!r} has epoch {known}, this relay {epoch}")
        if known < epoch:
            await link.client.store_offset(stream, name, epoch)
        return (last + 1) >> _BITS

    def _producer(self, part: int) -> str:
        return f"{self._source}-{part}"

    # -------------------------------------------------------------------------------------- connections
    async def _place(self, stream: str, part: int) -> tuple[_Link, int]:
        """A connection to the stream's leader on which this part is declared as a producer."""
        if part >= _PRODUCERS:
            raise ConfigurationError(
                f"a RabbitMQ stream remembers {_PRODUCERS} producers and this is part {part}: use fewer parts"
            )
        self._settle_in()
        known = self._places.get((stream, part))
        if known is not None and known[0].alive:
            return known
        async with self._opening:
            link = await self._leader(stream)
            publisher = link.next_publisher()
            await link.client.declare_publisher(stream, self._producer(part), publisher)
            self._places[stream, part] = link, publisher
            return link, publisher

    async def _leader(self, stream: str) -> _Link:
        first = await self._link(Addr(self._address.host, self._address.port))
        try:
            leader, _ = await first.client.query_leader_and_replicas(stream)
        except exceptions.StreamDoesNotExist:
            if not self._create:
                raise ConfigurationError(
                    f"RabbitMQ at {self._address.name} has no stream {stream!r}; declare it, or leave create=no out"
                ) from None
            await _made(first.client, stream, self._arguments)
            leader, _ = await first.client.query_leader_and_replicas(stream)
        return await self._link(Addr(leader.host, leader.port))

    async def _link(self, where: Addr) -> _Link:
        self._close_aside([link for link in self._links if not link.alive])
        self._links = [link for link in self._links if link.alive]
        for link in self._links:
            if link.where == where and link.has_room:
                return link
        address = self._address
        link = _Link(where, tls=address.tls("rabbitmq+streams"))
        try:
            await link.client.start()
            await link.client.authenticate(
                address.path or "/", address.user or "guest", address.password or "guest"
            )
        except BaseException:
            await link.close()
            raise
        self._links.append(link)
        return link

    def _refused(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"RabbitMQ at {self._address.name} refused user {self._address.user or 'guest'!r} on virtual host "
            f"{self._address.path or '/'!r} ({type(error).__name__}): correct the user, the password or the rights "
            "(rabbitmqctl set_permissions)"
        )

    def _settle_in(self) -> None:
        """Connections belong to a loop, and end with it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._opening = loop, asyncio.Lock()
            self._links, self._places, self._closing = [], {}, set()

    def _forget(self) -> None:
        """After a failure every connection is new: whatever was under way on the old one is over."""
        links, self._links = self._links, []
        self._places.clear()
        self._close_aside(links)

    def _close_aside(self, links: Sequence[_Link]) -> None:
        """Not here: rstream waits for a broker's farewell, and this one may be dead."""
        for link in links:
            task = asyncio.create_task(link.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._loop is asyncio.get_running_loop():
            self._forget()
            await asyncio.gather(*self._closing, return_exceptions=True)


class _Link:
    """One connection, with the confirmations that are awaited on it."""

    def __init__(self, where: Addr, *, tls: Any) -> None:
        self.where = where
        self.client = Client(
            where.host,
            where.port,
            ssl_context=tls,
            frame_max=1 << 20,
            heartbeat=60,
            connection_name="semel",
            connection_closed_handler=self._closed,
        )
        self.client.add_stream("semel")  # without one, rstream tells nobody that the connection is gone
        self.client.add_handler(schema.PublishConfirm, self._confirmed, "semel")
        self.client.add_handler(schema.PublishError, self._failed, "semel")
        self._requests = itertools.count(1 << 30)  # beside rstream's own numbers, which begin at 1
        self._publishers = 0
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited: dict[tuple[int, int], asyncio.Future[None]] = {}

    @property
    def alive(self) -> bool:
        return self.client.is_connection_alive()

    @property
    def has_room(self) -> bool:
        return self._publishers < _PRODUCERS

    @property
    def room(self) -> int:
        """Bytes that an entry may have."""
        return self.client.frame_max - _OVERHEAD

    def next_publisher(self) -> int:
        self._publishers += 1
        return self._publishers

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, given up when the connection ends."""
        return await unless(self._gone, work)

    async def epoch(self, stream: str, name: str) -> int:
        try:
            return await self.client.query_offset(stream, name)
        except exceptions.OffsetNotFound:
            return 0

    async def last(self, stream: str, name: str) -> int:
        # rstream's own method takes an error for 0, which would look like a lost tail.
        request = schema.QueryPublisherSequence(next(self._requests), publisher_ref=name, stream=stream)
        answer = await self.client.sync_request(request, schema.QueryPublisherSequenceResponse)
        return int(answer.sequence)

    async def write(self, publisher: int, entries: Sequence[tuple[int, int, bytes]]) -> None:
        """Send the entries in order and wait until the broker has confirmed each."""
        loop = asyncio.get_running_loop()
        awaited = {(publisher, number): loop.create_future() for number, _, _ in entries}
        self._awaited |= awaited
        try:
            for number, count, data in entries:
                await self.client.send_frame(
                    schema.PublishSubBatching(
                        publisher_id=publisher,
                        number_of_root_messages=1,
                        publishing_id=number,
                        compress_type=0x80,  # an entry of several messages, not compressed
                        subbatching_message_count=count,
                        uncompressed_data_size=len(data),
                        compressed_data_size=len(data),
                        messages=data,
                    )
                )
                if not self.alive:  # rstream drops what it cannot send
                    raise ConnectionResetError("the connection was closed")
            await asyncio.gather(*awaited.values())
        finally:
            for key, future in awaited.items():
                self._awaited.pop(key, None)
                future.cancel()

    def _confirmed(self, frame: schema.PublishConfirm) -> None:
        for number in frame.publishing_ids:
            future = self._awaited.get((frame.publisher_id, number))
            if future is not None and not future.done():
                future.set_result(None)

    def _failed(self, frame: schema.PublishError) -> None:
        for error in frame.errors:
            future = self._awaited.get((frame.publisher_id, error.publishing_id))
            if future is not None and not future.done():
                future.set_exception(exceptions.ServerError.from_code(error.response_code)())

    def _closed(self, _: OnClosedErrorInfo) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    async def close(self) -> None:
        self._closed(OnClosedErrorInfo("closed here", []))
        connection = self.client._conn  # noqa: SLF001  # rstream leaves a broken one open
        writer = connection._writer if connection is not None else None  # noqa: SLF001 - its own close waits
        try:
            await parted(self.client.close(), writer)
        finally:  # whatever its farewell came to
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()


async def _made(client: Client, stream: str, arguments: dict[str, Any]) -> None:
    try:
        await client.create_stream(stream, arguments)
    except exceptions.StreamAlreadyExists:
        return  # another relay was first


def _entries(rows: Sequence[Row], room: int, batch: int) -> list[tuple[int, int, bytes]]:
    """(publishing id, messages, bytes) of each entry. The last id of a batch is the one before the next batch's first."""
    too_large: dict[str, str] = {}
    parcels: list[tuple[int, bytearray]] = []
    for row in rows:
        data = _encoded(row)
        if len(data) + 4 > room:
            too_large[row.id] = (
                f"{len(data)} bytes do not fit into a frame of {room} (stream.frame_max of the broker)"
            )
            continue
        if not parcels or len(parcels[-1][1]) + len(data) + 4 > room or parcels[-1][0] == 0xFFFF:
            parcels.append((0, bytearray()))
        count, parcel = parcels[-1]
        parcel += len(data).to_bytes(4, "big")
        parcel += data
        parcels[-1] = count + 1, parcel
    if too_large:
        raise Rejected(too_large, final=too_large.keys())
    return list(_numbered(parcels, batch))


def _numbered(parcels: Sequence[tuple[int, bytearray]], batch: int) -> Iterator[tuple[int, int, bytes]]:
    start, end = (batch - 1) << _BITS, batch << _BITS
    for place, (count, data) in enumerate(parcels, start=1):
        number = end - 1 if place == len(parcels) else start + place
        yield number, count, bytes(data)


def _encoded(row: Row) -> bytes:
    message = AMQPMessage(
        properties=_Properties(message_id=row.id),
        application_properties={**to_headers(row)},
        body=row.body,
    )
    # rstream leaves an empty body out altogether, and RabbitMQ cannot read a message without one.
    return bytes(message) if row.body else bytes(message) + _NO_BODY
