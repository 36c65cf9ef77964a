"""The fault proxy in a process of its own: a driver may have no threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from types import TracebackType
from typing import NoReturn, Self

from semel.testing.proxy import CHUNKS, RESP, Action, Proxy

__all__ = ["Wire"]

_ACTIONS = {"reset-before": Action.RESET_BEFORE, "reset-after": Action.SWALLOW_REPLY, "stall": Action.STALL}


class Wire:
    """A proxy to `host:port` that breaks the first request after `arm()`."""

    def __init__(self, host: str, port: int, fault: str, *, resp: bool) -> None:
        self._line, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            _serve(theirs, host, port, fault, resp=resp)
        theirs.close()
        self._line.settimeout(10)
        self.port = int.from_bytes(self._line.recv(2), "big")

    def arm(self) -> None:
        self._line.sendall(b"a")
        self._line.recv(1)

    def fired(self) -> bool:
        self._line.sendall(b"f")
        return self._line.recv(1) == b"1"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _serve(line: socket.socket, host: str, port: int, fault: str, *, resp: bool) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        proxy = Proxy(host, port, framing=RESP if resp else CHUNKS)
        line.sendall(proxy.port.to_bytes(2, "big"))
        rule = None
        while word := line.recv(1):
            if word == b"a":
                rule = proxy.rule(_ACTIONS[fault])
                line.sendall(b"k")
            else:
                line.sendall(b"1" if rule is not None and rule.fired.is_set() else b"0")
    finally:
        os._exit(0)
