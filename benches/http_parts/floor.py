"""What any middleware of this kind pays, written by hand as lean as it goes: the floor under `./bench http`.

No semel in it: its own connection to Redis, which sends what is asked within one tick of the loop in one write and resumes
whoever waits from where the replies are read. Three floors, each with what the one before it has:

* trips: one command before the handler, one after it (SET NX GET, SET). Any response is kept for any key.
* detached: and the handler runs in a task of its own, which the connection cannot cancel.
* rules: and what the specification asks of everybody: the sender is resolved and part of the name, the request is
  fingerprinted by its meaning and compared where the claim is made, the record is fenced by a nonce and has a lease, the
  response says that its key was honoured. Two short scripts in place of the two commands.

None of them can be used: no waiting for another caller, no renewed leases, no lost replies, no streams, no failures, no
problems, no limits. They say how much of the distance to the bare route is the protocol's own, and how much is semel's.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Generator
from typing import Any, Final
from urllib.parse import urlsplit

import hiredis
import msgspec

__all__ = ["FLOORS", "floored"]

FLOORS: Final = ("trips", "detached", "rules")
_MORE: Final = object()
_LEASE, _RETENTION = b"10000", b"86400000"
# A record: 1 byte of state, 16 of nonce, 32 of fingerprint, the response.
_CLAIM: Final = """
local known = redis.call('GET', KEYS[1])
if not known then
  redis.call('SET', KEYS[1], 'r' .. ARGV[1], 'PX', ARGV[2])
  return 'w'
end
if string.sub(known, 18, 49) ~= string.sub(ARGV[1], 17) then return 'm' end
return known
"""
_SETTLE: Final = """
local known = redis.call('GET', KEYS[1])
if not known or string.sub(known, 2, 17) ~= ARGV[1] then return 'l' end
redis.call('SET', KEYS[1], 'd' .. string.sub(known, 2, 49) .. ARGV[2], 'PX', ARGV[3])
return 'o'
"""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[int, list[tuple[bytes, bytes]], bytes]).decode
_read: Final = msgspec.json.Decoder().decode
_write: Final = msgspec.json.Encoder(order="sorted").encode
_KEPT: Final = frozenset({b"content-type", b"location", b"etag"})
_FIRST: Final = [(b"idempotency-replayed", b"false"), (b"idempotency-retention", b"86400")]
_AGAIN: Final = [
    (b"idempotency-replayed", b"true"),
    (b"cache-control", b"no-store"),
    (b"idempotency-retention", b"86400"),
]


class _Reply:
    """A future as far as one awaiting task needs it; resumed from where its reply is read."""

    __slots__ = ("_asyncio_future_blocking", "_loop", "context", "value", "wakeup")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False
        self.value: Any = _MORE

    def __await__(self) -> Generator[Any, None, Any]:
        if self.value is _MORE:
            self._asyncio_future_blocking = True
            yield self
        return self.value

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, wakeup: Any, *, context: Any) -> None:
        self.wakeup, self.context = wakeup, context

    def result(self) -> Any:
        return self.value


class _Wire(asyncio.Protocol):
    """One connection; replies come in the order of the commands."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: list[bytes] = []
        self._waiting: deque[_Reply] = deque()
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self.gone: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: Any) -> None:
        self._write, self.close = transport.write, transport.close

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set_result(None)

    def ask(self, *words: bytes) -> _Reply:
        if not self._queue:
            self._loop.call_soon(self._flush)
        self._queue.append(hiredis.pack_command(words))  # type: ignore[arg-type]  # typed as a 1-tuple
        reply = _Reply(self._loop)
        self._waiting.append(reply)
        return reply

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        self._write(b"".join(queue))

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        gets, woken = self._reader.gets, []
        while (value := gets()) is not _MORE:
            if isinstance(value, Exception):
                raise value
            reply = self._waiting.popleft()
            reply.value = value
            woken.append(reply)
        for reply in woken:
            reply.context.run(reply.wakeup, reply)


class _Answer:
    """Keeps what the application says until it is stored."""

    __slots__ = ("_floor", "_message", "_name", "_nonce", "_send", "_start")

    def __init__(self, floor: _Floor, name: bytes, nonce: bytes, send: Any, message: Any) -> None:
        self._floor, self._name, self._nonce, self._send, self._message = floor, name, nonce, send, message

    async def receive(self) -> Any:
        return self._message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        start = self._start
        kept = [pair for pair in start["headers"] if pair[0] in _KEPT]
        response = _encode((start["status"], kept, message["body"]))
        if self._nonce:
            reply = await self._floor.wire.ask(
                b"EVALSHA", self._floor.settle, b"1", self._name, self._nonce, response, _RETENTION
            )
            if reply != b"o":
                raise RuntimeError("the key belongs to somebody else")
            start = {**start, "headers": start["headers"] + _FIRST}
        else:
            await self._floor.wire.ask(b"SET", self._name, response, b"PX", _RETENTION)
        await self._send(start)
        await self._send(message)


class _Floor:
    """One of `FLOORS` around an application."""

    def __init__(self, app: Any, url: str, level: str) -> None:
        self._app, self._url, self._level = app, url, FLOORS.index(level)
        self.wire: Any = None
        self._connecting: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        key = headers.get(b"idempotency-key")
        if key is None:
            await self._app(scope, receive, send)
            return
        wire = self.wire or await self._connected()
        if self._level < 2:
            message = await receive()
            name, nonce = b"floor:" + key, b""
            known = await wire.ask(b"SET", name, b"", b"NX", b"GET", b"PX", _LEASE)
        else:
            name, nonce, known, message = await self._claimed(scope, receive, key)
        if known is not None:
            await _replay(send, known, _AGAIN if nonce else [])
            return
        answer = _Answer(self, name, nonce, send, message)
        if not self._level:
            await self._app(scope, answer.receive, answer.send)
            return
        ended = self._loop.create_future()
        self._running.add(self._loop.create_task(self._run(scope, answer, ended)))
        await ended

    async def _claimed(self, scope: Any, receive: Any, key: bytes) -> tuple[bytes, bytes, bytes | None, Any]:
        from starlette.requests import Request

        sender = Request(scope).headers["authorization"]
        message = await receive()
        meaning = _write(_read(message["body"]))
        told = b"%s\0%s\0%s\0%s" % (
            scope["method"].encode(),
            scope["path"].encode(),
            scope["query_string"],
            meaning,
        )
        fingerprint = hashlib.sha256(told).digest()
        name = b"floor:" + hashlib.sha256(b"%s %s" % (key, sender.encode())).digest()
        nonce = os.urandom(16)
        reply = await self.wire.ask(b"EVALSHA", self._claim, b"1", name, nonce + fingerprint, _LEASE)
        if reply == b"w":
            return name, nonce, None, message
        if reply == b"m":
            raise RuntimeError("the key was used for another request")
        return name, nonce, reply[49:], message

    async def _run(self, scope: Any, answer: _Answer, ended: asyncio.Future[None]) -> None:
        try:
            await self._app(scope, answer.receive, answer.send)
        finally:
            self._running.discard(asyncio.current_task(self._loop))
            ended.set_result(None)

    async def _connected(self) -> Any:
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._connect())
        await self._connecting
        return self.wire

    async def _connect(self) -> None:
        self._loop = asyncio.get_running_loop()
        where = urlsplit(self._url)
        _, wire = await self._loop.create_connection(
            lambda: _Wire(self._loop), str(where.hostname), where.port or 6379
        )
        self._claim = await wire.ask(b"SCRIPT", b"LOAD", _CLAIM.encode())
        self.settle = await wire.ask(b"SCRIPT", b"LOAD", _SETTLE.encode())
        self.wire = wire

    async def aclose(self) -> None:
        if self.wire is not None:
            self.wire.close()
            await self.wire.gone


async def _replay(send: Any, known: bytes, more: list[tuple[bytes, bytes]]) -> None:
    status, headers, body = _decode(known)
    headers += more
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def floored(app: Any, url: str, level: str) -> Any:
    """`app` behind one of `FLOORS`."""
    return _Floor(app, url, level)
