"""The sync colour's watcher: one background daemon thread per process, started by the first `watch`."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from semel.bell import Bell
from semel.errors import SemelError, StoreUnavailable
from semel.stores.redis.address import Endpoint
from semel.stores.redis.calls import Unwatch
from semel.stores.redis.topology import Topology
from semel.stores.redis.watch import Line, Ticket, Watcher

__all__ = ["ThreadWatcher"]


class _ThreadLine(Line):
    def __init__(self, node: Endpoint, made: Any, watcher: ThreadWatcher) -> None:
        super().__init__(node, time.monotonic())
        self._made = made
        self._watcher = watcher
        self.sock: socket.socket = made._sock  # noqa: SLF001 - as in redis_threads
        self.sock.settimeout(0)

    def write(self, data: bytes) -> None:
        self.sock.settimeout(self._watcher.patience)
        self.sock.sendall(data)
        self.sock.settimeout(0)

    def drain(self) -> bytes:
        """What has arrived; raises `ConnectionError` at the end of the stream."""
        chunks = []
        # TLS may hold bytes that select() does not see, so read until there is nothing.
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            while chunk := self.sock.recv(1 << 16):
                chunks.append(chunk)
            if not chunks:
                raise ConnectionResetError("the server closed the connection")
        return b"".join(chunks)

    def close(self) -> None:
        self._watcher.unlisten(self)
        self._made.disconnect()


class ThreadWatcher(Watcher):
    """Started by its maker; ends with `close` or with the process."""

    def __init__(
        self,
        topology: Topology,
        dial: Callable[[Endpoint], Any],
        look_up: Callable[[], Any],
        *,
        timeout: float,
        ping_every: float,
    ) -> None:
        super().__init__(topology, timeout=timeout, ping_every=ping_every)
        self.patience = timeout
        self.pid = os.getpid()
        self._dial = dial
        self._ask_around = look_up
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="semel-redis-watch", daemon=True)
        self._thread.start()

    def watch(self, channel: bytes, wake: Callable[[], None], timeout: float) -> Unwatch:
        settled = Bell()
        outcome: list[SemelError | None] = []

        def settle(error: SemelError | None) -> None:
            outcome.append(error)
            settled.ring()

        ticket = Ticket(channel, wake, settle)
        self.add(ticket)
        try:
            if not settled.heard(timeout):
                raise StoreUnavailable(f"Redis did not confirm the subscription within {timeout:g} s")
            if outcome[0] is not None:
                raise outcome[0]
        except BaseException:
            self.remove(ticket)
            raise

        async def unwatch() -> None:
            self.remove(ticket)

        return unwatch

    def _now(self) -> float:
        return time.monotonic()

    def _nudge(self) -> None:
        with contextlib.suppress(
            BlockingIOError, OSError
        ):  # full or closed: the thread will look anyway, or is gone
            self._rope.send(b"\0")

    async def _open(self, node: Endpoint) -> Line:
        line = _ThreadLine(node, self._dial(node), self)
        self._selector.register(line.sock, selectors.EVENT_READ, line)
        return line

    def unlisten(self, line: _ThreadLine) -> None:
        with contextlib.suppress(KeyError, ValueError):  # already closed
            self._selector.unregister(line.sock)

    async def _look_up(self) -> None:
        await self._ask_around()

    def _serve(self) -> None:
        try:
            while not self._ending:
                wait = self._turn_now() - self._now()
                for key, _ in self._selector.select(None if wait == math.inf else max(0.0, wait)):
                    self._ready(key.data)
        finally:
            self.shut()
            self._selector.close()
            self._bell.close()
            self._rope.close()

    def _turn_now(self) -> float:
        turn = self.turn()
        try:
            turn.send(None)
        except StopIteration as end:
            return float(end.value)
        turn.close()
        raise AssertionError("the thread watcher must not suspend")

    def _ready(self, line: _ThreadLine | None) -> None:
        if line is None:
            with contextlib.suppress(BlockingIOError):
                while self._bell.recv(4096):
                    pass
            return
        try:
            data = line.drain()
        except OSError as error:
            self.lost(line, error)
            return
        self.received(line, data)

    def close(self) -> None:
        """End the thread and wait for it, unless it is the thread itself that asks."""
        self._ending = True
        self._nudge()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=self.patience * 2)
