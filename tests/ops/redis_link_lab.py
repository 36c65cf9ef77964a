"""What the tests of the Redis link share: both colours behind one call, scripts, and a proxy per server."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Self, TypeVar

import uvloop

from semel.stores.redis.link import Link, Script, open_link
from semel.testing import services
from semel.testing.proxy import RESP, Proxy

T = TypeVar("T")
Face = Literal["sync", "async", "uvloop"]
FACES: list[Face] = ["sync", "async", "uvloop"]
COLOURS: list[Face] = ["sync", "async"]

ECHO = Script("echo", "return {KEYS[1], ARGV[1]}")
# Idempotent per nonce: a call that runs twice counts once.
ONCE = Script(
    "once",
    "if redis.call('SADD', KEYS[1], ARGV[1]) == 1 then redis.call('INCR', KEYS[2]) end "
    "return {ARGV[1], redis.call('GET', KEYS[2])}",
)
# Not idempotent: shows how often it really ran.
COUNT = Script("count", "return redis.call('INCR', KEYS[1])")
PUBLISH = Script("publish", "return redis.call('SPUBLISH', KEYS[1], 'x')")

_numbers = itertools.count()


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, as the sync face does."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise AssertionError("the sync link suspended")


def run(face: Face, coroutine: Coroutine[Any, Any, T]) -> T:
    if face == "sync":
        return drive(coroutine)
    if face == "uvloop":
        return uvloop.run(coroutine)
    return asyncio.run(coroutine)


def open_face(source: Any, face: Face, **options: Any) -> Link:
    given = {"timeout": 20.0} | options  # a busy machine is no broken server
    return open_link(source, colour="sync" if face == "sync" else "async", **given)


def fresh(name: str = "k") -> bytes:
    """A key nobody used, with a hash tag so that relatives share its slot."""
    return f"{{{name}:{os.getpid()}:{next(_numbers)}}}".encode()


def once_keys(key: bytes) -> list[bytes]:
    return [key + b":nonces", key + b":count"]


def proxied(server: services.RedisServer) -> Proxy:
    return Proxy(server.host, server.port, framing=RESP)


def url_of(proxy: Proxy) -> str:
    return f"redis://{proxy.host}:{proxy.port}/0"


def is_script(request: bytes) -> bool:
    return b"EVAL" in request


class Scripted:
    """A server that answers each Redis command by a function: for answers that no real server gives on demand."""

    host = "127.0.0.1"

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self._listener = socket.create_server((self.host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        waiting = b""
        try:
            while data := connection.recv(1 << 16):
                waiting += data
                for command in RESP.split(waiting):
                    waiting = waiting[len(command) :]
                    connection.sendall(self._answer(command))
        except OSError:
            return
        finally:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._open:
            connection.close()
