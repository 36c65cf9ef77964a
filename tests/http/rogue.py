"""A real server on a loopback port that honours idempotency keys and misbehaves exactly when it is told to."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROBLEM = "application/problem+json"


@dataclass(frozen=True)
class Say:
    """Answer with this and do nothing."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def problem(name: str, status: int, *, retryable: bool | None = None, **headers: str) -> Say:
    members: dict[str, Any] = {"type": f"https://pay.example/problems/{name}", "status": status}
    if retryable is not None:
        members["retryable"] = retryable
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return Say(status, {"Content-Type": PROBLEM, **named}, json.dumps(members).encode())


BUSY = problem("in-progress", 409, retryable=True, Retry_After="0")


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    key: str | None
    body: bytes
    headers: Mapping[str, str]


class Rogue:
    """`script` says what happens to the requests that come, one word each; then all is well.

    "drop": hang up without doing it · "lose": do it, hang up · "cut": do it, hang up in the middle of the reply ·
    "hang": do it, answer when `release` is set · a `Say`: answer that, do nothing.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.script: list[str | Say] = []
        self.seen: list[Seen] = []
        self.effects: list[tuple[str | None, bytes]] = []
        self.arrived = threading.Semaphore(0)
        self.release = threading.Event()
        self.retention: str | None = None
        self._replies: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.rogue = self
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self.server.server_address[1]}"

    @property
    def keys(self) -> list[str | None]:
        return [one.key for one in self.seen]

    def receive(self, one: Seen) -> str | Say:
        with self._lock:
            self.seen.append(one)
            return self.script.pop(0) if self.script else "ok"

    def act(self, one: Seen) -> tuple[bytes, bool]:
        """The reply and whether it is a replay; the effect happens once a key."""
        with self._lock:
            if one.key is not None and one.key in self._replies:
                return self._replies[one.key], True
            self.effects.append((one.key, one.body))
            reply = json.dumps({"effect": len(self.effects)}).encode()
            if one.key is not None:
                self._replies[one.key] = reply
            return reply, False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    rogue: Rogue


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: no waiting for a delayed acknowledgement
    server: _Server

    def _serve(self) -> None:
        rogue = self.server.rogue
        one = Seen(
            self.command,
            self.path,
            self.headers.get("Idempotency-Key"),
            self._body(),
            {name.lower(): value for name, value in self.headers.items()},
        )
        word = rogue.receive(one)
        if isinstance(word, Say):
            rogue.arrived.release()
            return self._answer(word)
        if word == "drop":
            rogue.arrived.release()
            return self._hang_up()
        reply, replayed = rogue.act(one)
        rogue.arrived.release()
        if word == "lose":
            return self._hang_up()
        if word == "hang":
            rogue.release.wait(30)
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Replayed": "true" if replayed else "false",
        }
        if rogue.retention is not None:
            headers["Idempotency-Retention"] = rogue.retention
        return self._answer(Say(201, headers, reply), cut=word == "cut")

    do_GET = do_POST = do_PATCH = do_PUT = _serve

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, say: Say, *, cut: bool = False) -> None:
        try:
            self.send_response(say.status)
            for name, value in say.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(say.body)))
            self.end_headers()
            self.wfile.write(say.body[: len(say.body) // 2] if cut else say.body)
        except OSError:
            self.close_connection = True  # the client has gone, as some tests want it
            return
        if cut:
            self._hang_up()

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args: object) -> None:
        """The tests read `seen` instead."""


@contextmanager
def rogue(context: ssl.SSLContext | None = None) -> Iterator[Rogue]:
    one = Rogue(context)
    thread = threading.Thread(target=one.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        one.release.set()
        one.server.shutdown()
        one.server.server_close()
        thread.join()
