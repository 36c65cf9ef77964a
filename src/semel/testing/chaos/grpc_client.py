"""The process that calls the gRPC servers of the matrix, told by its driver when to begin and when to leave."""

from __future__ import annotations

import ctypes
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

import grpc
import msgspec
from google.rpc.error_details_pb2 import ErrorInfo  # type: ignore[import-untyped]  # ships no types
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # ships no types

from semel.http.problem import PROBLEMS
from semel.testing.chaos.driver import PATIENCE
from semel.testing.chaos.frames import receive, send
from semel.testing.chaos.grpc_orders import Asked
from semel.testing.chaos.http_orders import Answered

__all__ = ["run"]

_DETAILS: Final = "grpc-status-details-bin"
_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own: a port may have been another server's
    ("grpc.enable_retries", 0),
)


def run(line: socket.socket) -> None:
    """Until the driver ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    calls = _Calls(line)
    while (text := receive(line)) is not None:
        asked = msgspec.json.decode(text, type=Asked)
        if asked.port:
            calls.begin(asked)
        else:
            calls.leave(asked.number)


class _Calls:
    """Those that are under way, each with its channel."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._telling = threading.Lock()
        self._open: dict[int, tuple[Any, grpc.Channel]] = {}

    def begin(self, asked: Asked) -> None:
        for number in [each for each, (call, _) in self._open.items() if call.done()]:
            self._open.pop(number)[1].close()
        channel = grpc.insecure_channel(f"127.0.0.1:{asked.port}", options=_OPTIONS)
        method: Any = channel.unary_unary(asked.method)
        call = method.future(b"tea", metadata=asked.metadata, timeout=PATIENCE)
        self._open[asked.number] = (call, channel)
        call.add_done_callback(lambda done: self._tell(asked.number, done))

    def leave(self, number: int) -> None:
        _, channel = self._open.pop(number)
        channel.close()  # with what is under way on it

    def _tell(self, number: int, call: Any) -> None:
        text = msgspec.json.encode((number, _answered(call)))
        with self._telling:
            send(self._line, text)


def _answered(call: Any) -> Answered:
    """In the words of HTTP: both edges have one vocabulary."""
    code = call.code().name
    if code == "OK":
        marks = dict(call.initial_metadata() or ())
        replayed = marks.get("idempotency-replayed") == "true"
        return Answered(status=201, body=call.result().decode(), replayed=replayed)
    name = _reason(call.trailing_metadata() or ()).lower().replace("_", "-")
    kind = PROBLEMS.get(name)
    status = 409 if code == "ABORTED" else kind.status if kind else 0
    return Answered(status=status, body=call.details() or "", problem=name or code)


def _reason(metadata: Sequence[tuple[str, Any]]) -> str:
    """Of the layer's own refusals; empty for what gRPC itself says."""
    details = next((value for name, value in metadata if name == _DETAILS), b"")
    info = ErrorInfo()
    return next((str(info.reason) for each in Status.FromString(details).details if each.Unpack(info)), "")
