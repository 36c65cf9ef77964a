"""SQLite's stall: a process of its own holds the file's write lock. A driver may have no connection open when it forks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sqlite3
from typing import NoReturn

__all__ = ["Lock"]


class Lock:
    """As a `Wire` that is silent: nobody else writes the file between `silence()` and `speak()`. Who reads does not notice."""

    def __init__(self, file: str) -> None:
        self._line, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            _serve(theirs, file)
        theirs.close()
        self._line.settimeout(20)
        self._held = False

    def silence(self) -> None:
        self._held = self._tell(b"s")

    def speak(self) -> None:
        self._tell(b"e")

    def fired(self) -> bool:
        """Whether the last `silence()` has got the lock."""
        return self._held

    struck = fired

    def _tell(self, word: bytes) -> bool:
        self._line.sendall(word)
        return self._line.recv(1) == b"k"

    def close(self) -> None:
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _serve(line: socket.socket, file: str) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        held: sqlite3.Connection | None = None
        while word := line.recv(1):
            if held is not None:
                held.close()  # rolls back
            held = _locked(file) if word == b"s" else None
            line.sendall(b"k" if word == b"e" or held is not None else b"n")
    finally:
        os._exit(0)


def _locked(file: str) -> sqlite3.Connection | None:
    connection = sqlite3.connect(file, timeout=10, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        connection.close()
        return None
    return connection
