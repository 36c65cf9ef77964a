"""A TCP proxy that breaks connections at an exact request, for tests of what happens when the network fails.

    from semel.testing.proxy import Proxy

    with Proxy("127.0.0.1", server.port) as proxy:
        rule = proxy.swallow_reply(at=3)          # the third request from now runs, its reply never comes
        ...
        rule.fired.wait(5)

Faults are placed by counting requests, not by time, so a run repeats. A request is one Redis command
(`framing=RESP`, also when pipelined), one publication to a RabbitMQ stream (`framing=STREAMS`; its reply is the broker's
confirmation, everything else passes uncounted), or whatever arrived in one read (`framing=CHUNKS`, the default: any
protocol whose client waits for its reply). A rule may look at the request: `match=lambda request: b"EVALSHA" in request`.
The proxy runs on a thread of its own; every method may be called from any thread.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

__all__ = ["CHUNKS", "RESP", "STREAMS", "Action", "Framing", "Proxy", "Rule"]


class Action(enum.Enum):
    """What happens at the chosen request."""

    RESET_BEFORE = "reset before"  # the server never sees it, the client gets RST
    RESET_LATE = "reset late"  # the client gets RST, and the server sees it all the same, after release()
    SWALLOW_REPLY = "swallow reply"  # it runs, its reply is thrown away, the client gets RST
    STALL = "stall"  # it runs, replies are held back until release()
    BLACKHOLE = "blackhole"  # it and everything after it vanishes in both directions; nothing is closed
    HALF_CLOSE = "half close"  # it runs, then the server's side is told that no more requests come
    DRIP = "drip"  # it runs, replies arrive one byte at a time


class Rule:
    """A fault waiting for its request. `fired` is set when it struck."""

    def __init__(self, action: Action, at: int, match: Callable[[bytes], bool]) -> None:
        self.action = action
        self.at = at
        self.match = match
        self.seen = 0
        self.fired = threading.Event()

    def strikes(self, request: bytes) -> bool:
        if self.fired.is_set() or not self.match(request):
            return False
        self.seen += 1
        return self.seen >= self.at  # later, when another rule had this request


@dataclass(frozen=True, slots=True)
class Framing:
    """How a protocol's bytes become requests and replies."""

    split: Callable[[bytes], list[bytes]]  # the complete requests at the front of what waits
    counter: Callable[[], Callable[[bytes], int]] | None = (
        None  # counts the replies in a stream; None: a read answers all
    )
    carries: Callable[[bytes], bool] = lambda _: True  # what counts as a request; the rest passes


def _resp_commands(waiting: bytes) -> list[bytes]:
    """Complete Redis commands, so that pipelined ones are counted one by one."""
    found = []
    at = 0
    while (end := _command_end(waiting, at)) is not None:
        found.append(waiting[at:end])
        at = end
    return found


def _command_end(data: bytes, start: int) -> int | None:
    at = data.find(b"\r\n", start)
    if at < 0:
        return None
    if data[start : start + 1] != b"*":
        return at + 2  # an inline command
    position = at + 2
    for _ in range(int(data[start + 1 : at])):
        at = data.find(b"\r\n", position)
        if at < 0:
            return None
        position = at + 2 + int(data[position + 1 : at]) + 2
        if position > len(data):
            return None
    return position


def _resp_counter() -> Callable[[bytes], int]:
    import hiredis

    more = object()
    reader = hiredis.Reader(notEnoughData=more)

    def count(data: bytes) -> int:
        reader.feed(data)
        return sum(1 for _ in iter(reader.gets, more))

    return count


def _stream_frames(waiting: bytes) -> list[bytes]:
    """Complete frames of RabbitMQ's stream protocol: each begins with its length, then the number of its command."""
    found = []
    at = 0
    while len(waiting) >= at + 4:
        end = at + 4 + int.from_bytes(waiting[at : at + 4], "big")
        if end > len(waiting):
            break
        found.append(waiting[at:end])
        at = end
    return found


def _confirmations() -> Callable[[bytes], int]:
    waiting = b""

    def count(data: bytes) -> int:
        nonlocal waiting
        frames = _stream_frames(waiting + data)
        waiting = (waiting + data)[sum(map(len, frames)) :]
        return sum(frame[4:6] == b"\x00\x03" for frame in frames)

    return count


CHUNKS: Final = Framing(lambda waiting: [waiting] if waiting else [])
RESP: Final = Framing(_resp_commands, _resp_counter)
STREAMS: Final = Framing(_stream_frames, _confirmations, lambda request: request[4:6] == b"\x00\x02")


class _Pair:
    """A client's connection and the one to the server that stands behind it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.action: Action | None = None
        self.owed = 0  # requests the server has and has not answered
        self.flowing = asyncio.Event()
        self.flowing.set()

    def reset(self) -> None:
        self._reset(self.client, self.server)

    def reset_client(self) -> None:
        self._reset(self.client)

    @staticmethod
    def _reset(*writers: asyncio.StreamWriter) -> None:
        for writer in writers:
            sock: socket.socket | None = writer.get_extra_info("socket")
            if sock is not None and not writer.transport.is_closing():
                # Lingering for 0 s makes the close an RST instead of an orderly end.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Forwards to `host:port` from `proxy.host:proxy.port` and breaks what its rules name."""

    host = "127.0.0.1"

    def __init__(self, host: str, port: int, *, framing: Framing = CHUNKS) -> None:
        self.target = (host, port)
        self.port = 0
        self.requests = 0  # seen since the start, over all connections
        self.connections = 0
        self._framing = framing
        self._rules: list[Rule] = []
        self._refusing = False
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="semel-proxy", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    # -- rules ---------------------------------------------------------------------------------------------------
    def rule(self, action: Action, *, at: int = 1, match: Callable[[bytes], bool] = lambda _: True) -> Rule:
        """Strike the `at`-th matching request from now. Rules strike once; several may wait at a time."""
        new = Rule(action, at, match)
        self._rules.append(new)
        return new

    def reset_before(self, *, at: int = 1, match: Callable[[bytes], bool] = lambda _: True) -> Rule:
        return self.rule(Action.RESET_BEFORE, at=at, match=match)

    def reset_late(self, *, at: int = 1, match: Callable[[bytes], bool] = lambda _: True) -> Rule:
        return self.rule(Action.RESET_LATE, at=at, match=match)

    def swallow_reply(self, *, at: int = 1, match: Callable[[bytes], bool] = lambda _: True) -> Rule:
        return self.rule(Action.SWALLOW_REPLY, at=at, match=match)

    def stall(self, *, at: int = 1, match: Callable[[bytes], bool] = lambda _: True) -> Rule:
        return self.rule(Action.STALL, at=at, match=match)

    def blackhole(self, *, at: int = 1, match: Callable[[bytes], bool] = lambda _: True) -> Rule:
        return self.rule(Action.BLACKHOLE, at=at, match=match)

    def half_close(self, *, at: int = 1, match: Callable[[bytes], bool] = lambda _: True) -> Rule:
        return self.rule(Action.HALF_CLOSE, at=at, match=match)

    def drip(self, *, at: int = 1, match: Callable[[bytes], bool] = lambda _: True) -> Rule:
        return self.rule(Action.DRIP, at=at, match=match)

    def clear(self) -> None:
        """Forget the rules that have not struck."""
        self._rules.clear()

    # -- all connections at once ---------------------------------------------------------------------------------
    def release(self) -> None:
        """Let stalled replies go, and requests of connections that were reset before they were passed on."""
        self._loop.call_soon_threadsafe(self._on_each, lambda pair: pair.flowing.set())

    def cut(self) -> None:
        """RST on every open connection, now."""
        self._loop.call_soon_threadsafe(self._on_each, _Pair.reset)

    def refuse(self, *, refusing: bool = True) -> None:
        """Reset new connections at once, as a dead server behind a live address does."""
        self._refusing = refusing

    @property
    def open_connections(self) -> int:
        return len(self._pairs)

    def close(self) -> None:
        """Reset what is open and end the thread. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()

    # -- on the proxy's own thread ---------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for the start
            self._failure = error
        finally:
            self._ready.set()

    def _on_each(self, act: Callable[[_Pair], None]) -> None:
        for pair in tuple(self._pairs):
            act(pair)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, self.host, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        await asyncio.sleep(0)  # what was accepted a moment ago gets its task
        self._on_each(_Pair.reset)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)  # aborted transports close their sockets in the next turns of the loop

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.connections += 1
        try:
            if self._refusing:
                raise ConnectionRefusedError
            upstream, server = await asyncio.open_connection(*self.target)
        except (OSError, asyncio.CancelledError):
            _Pair(writer, writer).reset()
            return
        await self._bridge(reader, upstream, _Pair(writer, server))

    async def _bridge(
        self, reader: asyncio.StreamReader, upstream: asyncio.StreamReader, pair: _Pair
    ) -> None:
        self._pairs.add(pair)
        both = {
            asyncio.ensure_future(self._upwards(reader, pair)),
            asyncio.ensure_future(self._downwards(upstream, pair)),
        }
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pair.reset()  # close() ends us; the stream server would report the cancellation as an error
        finally:
            pair.client.close()  # before any await: a second cancellation would skip what follows one
            pair.server.close()
            self._pairs.discard(pair)
            for one in both:
                one.cancel()
            await asyncio.wait(both)

    async def _upwards(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        waiting = b""
        while data := await _read(reader):
            waiting += data
            for request in self._framing.split(waiting):
                waiting = waiting[len(request) :]
                if self._framing.carries(request):
                    self.requests += 1
                    await self._request(pair, request)
                elif pair.action is not Action.BLACKHOLE:
                    pair.server.write(request)
                    await _drain(pair.server)
        # The server is not told that the client left: never, or not before what was stalled is let go.
        if pair.action is Action.BLACKHOLE:
            await asyncio.Event().wait()
        if pair.action is Action.STALL:
            await pair.flowing.wait()

    async def _request(self, pair: _Pair, request: bytes) -> None:
        if pair.action is Action.BLACKHOLE:
            return
        striking = [
            rule for rule in tuple(self._rules) if rule.strikes(request)
        ]  # every rule counts every request
        struck = striking[0] if striking else None
        if struck is not None:
            pair.action = struck.action
            with suppress(ValueError):  # cleared meanwhile
                self._rules.remove(struck)
            struck.fired.set()
        match struck.action if struck else None:
            case Action.RESET_BEFORE:
                pair.reset()
                return
            case Action.BLACKHOLE:
                return
            case Action.RESET_LATE:
                pair.flowing.clear()
                pair.reset_client()
                await pair.flowing.wait()
            case Action.STALL:
                pair.flowing.clear()
        pair.owed += 1
        pair.server.write(request)
        await _drain(pair.server)
        if struck is not None and struck.action is Action.HALF_CLOSE:
            pair.server.write_eof()

    async def _downwards(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        count = self._framing.counter() if self._framing.counter else None
        while data := await _read(reader):
            pair.owed = pair.owed - count(data) if count else 0
            await pair.flowing.wait()
            match pair.action:
                case Action.BLACKHOLE:
                    continue
                case Action.SWALLOW_REPLY:
                    if pair.owed <= 0:  # it ran: its reply is among these bytes
                        pair.reset()
                        return
                case Action.DRIP:
                    for place in range(len(data)):
                        pair.client.write(data[place : place + 1])
                        await _drain(pair.client)
                        await asyncio.sleep(0.001)
                case _:
                    pair.client.write(data)
                    await _drain(pair.client)
        if pair.action is Action.BLACKHOLE:
            await asyncio.Event().wait()


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 16)
    except OSError:  # a reset is an end like any other
        return b""


async def _drain(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.drain()
    except OSError:
        writer.transport.abort()
