"""Where the messages of the matrix go: the sink's URL, its place, and what has arrived there, in order.

Brokers are read when all is over. An endpoint and a function keep no messages: they write what they get into the ledger
at once, outside of everything that is broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any, Final, NoReturn

import msgspec

from semel.messaging.sink import Fenced, SinkUnavailable
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.signals import GO

__all__ = [
    "ARRIVED",
    "BROKERS",
    "LOOSE",
    "SINKS",
    "Endpoint",
    "Insisting",
    "OnTheWire",
    "Standing",
    "arrived",
    "body_of",
    "make",
    "nothing_left",
    "sink_url",
    "source_url",
]

SINKS: Final = ("redis", "rabbit-stream", "nats", "rabbit-queue", "webhook", "handler")
LOOSE: Final = frozenset({"rabbit-queue", "webhook", "handler"})
"""At least once: a batch that is sent again is there again. The rest (NATS) knows it for a while."""
BROKERS: Final = {"redis": "redis", "rabbit-stream": "rabbitmq", "rabbit-queue": "rabbitmq", "nats": "nats"}
"""The server that a sink needs."""
ARRIVED: Final = "sink"
"""By whom the ledger says an arrival was."""


def sink_url(kind: str, base: str, place: str) -> str:
    """`base` is the server's URL; for streams of RabbitMQ that of its stream port."""
    return {
        "redis": f"{base}?stream={place}",
        "rabbit-stream": f"{base}?stream={place}",
        "rabbit-queue": f"{base}?routing_key={place}",
        "nats": f"{base}?stream={place}&subject={place}.{{topic}}",
        "webhook": f"{base}/{place}",
        "handler": "",
    }[kind]


def source_url(kind: str, base: str, place: str, idle: float) -> str:
    """As a consumer reads it; what nobody acknowledged for `idle` seconds is handed out again."""
    return {
        "redis": f"{base}?stream={place}&idle={idle}&block=0.05",
        "rabbit-queue": f"{base}?queue={place}",
        "nats": f"{base}?stream={place}&subject={place}.>&idle={idle}",
    }[kind]


async def make(kind: str, base: str, place: str) -> None:
    """A queue must be there before messages are sent to it; everything else is made by its sink."""
    if kind == "rabbit-queue":
        pika: Any = import_module("aio_pika")
        async with await pika.connect(base) as connection:
            channel = await connection.channel()
            await channel.declare_queue(place, durable=True)


async def nothing_left(base: str, stream: str, group: str, *, unless: asyncio.Event) -> None:
    """Until every entry was handed out to this group and acknowledged by somebody: what was not handled will not come any more.

    Or until nobody asks any more. It is told so instead of being cancelled, which got lost inside of redis-py now and then.
    """
    client = import_module("redis.asyncio").Redis.from_url(base)
    try:
        while not unless.is_set():
            last = (await client.xinfo_stream(stream))["last-generated-id"]
            groups = {each["name"]: each for each in await client.xinfo_groups(stream)}
            mine = groups.get(group.encode())
            if mine is not None and not mine["pending"] and mine["last-delivered-id"] == last:
                return
            await asyncio.sleep(0.05)  # nobody says that a group has come to its end
    finally:
        await client.aclose()


async def arrived(kind: str, base: str, place: str) -> list[tuple[str, bytes]]:
    """(id, body) of every message, in the order of its arrival. `base` speaks AMQP for streams of RabbitMQ, too."""
    read = _READERS[kind]
    async with asyncio.timeout(20):
        return await read(base, place)


async def _redis(base: str, place: str) -> list[tuple[str, bytes]]:
    client = import_module("redis.asyncio").Redis.from_url(base)
    try:
        return [(fields[b"id"].decode(), fields[b"data"]) for _, fields in await client.xrange(place)]
    finally:
        await client.aclose()


async def _queue(base: str, place: str) -> list[tuple[str, bytes]]:
    pika: Any = import_module("aio_pika")
    found = []
    async with await pika.connect(base) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(place)
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            found.append((str(message.message_id), bytes(message.body)))
    return found


async def _stream(base: str, place: str) -> list[tuple[str, bytes]]:
    """AMQP has no end of a stream: it is read until a message comes that is sent now, behind them all."""
    pika: Any = import_module("aio_pika")
    found: list[tuple[str, bytes]] = []
    done = asyncio.Event()
    end = f"the end {secrets.token_hex(4)}"

    async def take(message: Any) -> None:
        await message.ack()
        if message.message_id == end:
            done.set()
        elif not str(message.message_id).startswith("the end"):
            found.append((str(message.message_id), bytes(message.body)))

    async with await pika.connect(base) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=1000)
        await channel.default_exchange.publish(pika.Message(b"", message_id=end), place)
        queue = await channel.get_queue(place, ensure=False)
        await queue.consume(take, arguments={"x-stream-offset": "first"})
        await done.wait()
    return found


async def _nats(base: str, place: str) -> list[tuple[str, bytes]]:
    client = await import_module("nats").connect(base)
    try:
        stream = client.jetstream()
        info = await stream.stream_info(place, subjects_filter=f"{place}.>")
        count = sum((info.state.subjects or {}).values())
        subscription = await stream.subscribe(f"{place}.>", ordered_consumer=True)
        messages = [await subscription.next_msg(timeout=10) for _ in range(count)]
        return [(message.headers["semel-id"], message.data) for message in messages]
    finally:
        await client.close()


_READERS: Final[dict[str, Callable[[str, str], Awaitable[list[tuple[str, bytes]]]]]] = {
    "redis": _redis,
    "rabbit-stream": _stream,
    "rabbit-queue": _queue,
    "nats": _nats,
}


class OnTheWire:
    """A sink whose batch goes out although nobody waits for it any more: what was written to a socket cannot be taken back.

    A relay that learns of its heir stops what it can. Whether that is in time is luck; here it never is.
    """

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._going: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    async def publish(self, part: int, epoch: int, batch: int, rows: Any) -> Any:
        task = asyncio.ensure_future(self._out(part, epoch, batch, rows))
        self._going.add(task)
        return await asyncio.shield(task)

    async def _out(self, part: int, epoch: int, batch: int, rows: Any) -> Any:
        return await self._sink.publish(part, epoch, batch, rows)

    async def aclose(self) -> None:
        """When all of it is out."""
        await asyncio.gather(*self._going, return_exceptions=True)
        await self._sink.aclose()


class Insisting(OnTheWire):
    """As that, and its connections have ended meanwhile: it sends until the sink has answered, which is written down."""

    def __init__(self, sink: Any, ledger: Ledger, by: str) -> None:
        super().__init__(sink)
        self._ledger = ledger
        self._by = by

    async def _out(self, part: int, epoch: int, batch: int, rows: Any) -> Any:
        while True:
            try:
                found = await self._sink.publish(part, epoch, batch, rows)
            except SinkUnavailable:
                continue
            except Fenced:
                self._ledger.entered(self._by, str(part).encode(), batch)
                raise
            self._ledger.entered(self._by, str(part).encode(), batch)
            return found


class Standing:
    """A sink whose relay stands still when what the sink had lost is there again, before its own batch: until a file is there."""

    def __init__(self, sink: Any, ledger: Ledger, by: str) -> None:
        self._sink = sink
        self._ledger = ledger
        self._by = by
        self._tried: dict[int, int] = {}
        self._again: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    async def publish(self, part: int, epoch: int, batch: int, rows: Any) -> Any:
        if batch < self._tried.setdefault(part, batch):  # a kept one, after the sink has said what it holds
            self._again.add(part)
        elif part in self._again:
            self._again.discard(part)
            self._ledger.entered(self._by, str(part).encode(), batch)
            while not (self._ledger.folder / GO).exists():  # noqa: ASYNC110 - the sign is a file, made by another process
                await asyncio.sleep(0.004)
        return await self._sink.publish(part, epoch, batch, rows)

    async def aclose(self) -> None:
        await self._sink.aclose()


class Endpoint:
    """A webhook's receiver in a process of its own. The path names the schedule's folder, whose ledger gets what comes."""

    def __init__(self, folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
            self.pid = os.fork()
            if self.pid == 0:
                _serve(listener, folder)
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections are reset on purpose."""


def _serve(listener: socket.socket, folder: str) -> NoReturn:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            Ledger(f"{folder}{self.path}").effect(self.headers["webhook-id"], ARRIVED)
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name upstream
            """What it gets is in the ledger."""

    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        server = _Server(("127.0.0.1", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = listener
        server.serve_forever()
    finally:
        os._exit(0)


def body_of(number: int) -> bytes:
    """What a message with this number carries."""
    return msgspec.json.encode({"n": number})
