"""How a gRPC server of the matrix is started, and how it is called; what happens then is in `http_orders`.

A driver may have no threads, and gRPC has some: its client is a process of its own, one per driver.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable
from importlib import import_module
from itertools import count
from typing import Any, Final, NoReturn

import msgspec

from semel.testing.chaos.driver import PATIENCE, Stage, Worker
from semel.testing.chaos.frames import receive, send
from semel.testing.chaos.http_orders import EDGES, ORDERS, Answered, Edge
from semel.testing.chaos.http_sites import FOLDER, SCHEDULE

__all__ = ["ORDERS", "SERVICE", "Asked"]

SERVICE: Final = "chaos.Orders"


class Asked(msgspec.Struct):
    """A call; without a port: its client leaves."""

    number: int
    port: int = 0
    method: str = ""
    metadata: tuple[tuple[str, str], ...] = ()


def _served(stage: Stage, start: Callable[[dict[str, Any]], Worker]) -> tuple[int, Worker]:
    """It tells its port when it serves."""
    del stage
    ours, theirs = os.pipe()
    try:
        try:
            worker = start({"line": theirs})
        finally:
            os.close(theirs)
        ready, _, _ = select.select([ours], [], [], PATIENCE)
        if not ready:
            raise TimeoutError(f"a server did not serve within {PATIENCE:g} s")
        if not (port := os.read(ours, 2)):
            raise RuntimeError("a server has died before it served")
        return int.from_bytes(port, "big"), worker
    finally:
        os.close(ours)


class _Client:
    """A process that calls; `begin` does not wait for the answer."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        self._numbers = count()
        self._answers: dict[int, Answered] = {}
        self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            _run(theirs)
        theirs.close()
        self._line.settimeout(2 * PATIENCE)

    def begin(self, port: int, method: str, metadata: tuple[tuple[str, str], ...]) -> int:
        number = next(self._numbers)
        send(self._line, msgspec.json.encode(Asked(number, port, method, metadata)))
        return number

    def leave(self, number: int) -> None:
        send(self._line, msgspec.json.encode(Asked(number)))
        self.answer(number)  # it has left

    def answer(self, number: int) -> Answered:
        while number not in self._answers:
            text = receive(self._line)
            if text is None:
                raise RuntimeError("the client has died")
            told, answered = msgspec.json.decode(text, type=tuple[int, Answered])
            self._answers[told] = answered
        return self._answers.pop(number)

    def close(self) -> None:
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _run(line: socket.socket) -> NoReturn:
    try:
        import_module("semel.testing.chaos.grpc_client").run(line)  # needs an extra
    finally:
        os._exit(1)


class _Visit:
    """One call on a connection of its own."""

    def __init__(self, stage: Stage, port: int, *, path: str, key: str, user: str) -> None:
        self._client: _Client = stage.places.hold("grpc client", _Client)
        metadata = [("x-user", user), (SCHEDULE, stage.key), (FOLDER, str(stage.folder))]
        if key:
            metadata.append(("idempotency-key", key))
        self._number = self._client.begin(port, f"/{SERVICE}/{path}", tuple(metadata))

    def read(self) -> Answered:
        return self._client.answer(self._number)

    def abort(self) -> None:
        self._client.leave(self._number)


EDGES["grpc"] = Edge(_served, _Visit)
