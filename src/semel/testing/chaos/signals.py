"""A line between a worker that waits at its point and the driver that breaks something meanwhile: two named pipes."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

__all__ = ["GO", "HOLD", "Line"]

GO = "go"
"""A file of the schedule's folder: an heir that waits inside of its function goes on when it is there."""
HOLD = "hold"
"""A file of the schedule's folder: an heir shall wait inside of its handler."""


class Line:
    """`ask()` in the worker returns when the driver has called `reply()`; the driver waits with `asked()`."""

    def __init__(self, folder: Path) -> None:
        self._question = folder / "question"
        self._reply = folder / "reply"

    @classmethod
    def of(cls, folder: str) -> Line:
        return cls(Path(folder))

    def make(self) -> Line:
        os.mkfifo(self._question)
        os.mkfifo(self._reply)
        return self

    def ask(self) -> None:
        with self._question.open("wb") as pipe:
            pipe.write(b"?")
        with self._reply.open("rb") as pipe:
            pipe.read()

    def asked(self, ended: int, *, timeout: float) -> bool:
        """Wait for the worker's question; False when it ended without one: then `ended`, which is closed here, can be read."""
        handle = os.open(self._question, os.O_RDONLY | os.O_NONBLOCK)
        until = time.monotonic() + timeout
        try:
            while (left := until - time.monotonic()) > 0:
                ready, _, _ = select.select([handle, ended], [], [], left)
                if handle in ready and os.read(handle, 1):
                    return True
                if ended in ready:
                    return False
            return False
        finally:
            os.close(handle)
            os.close(ended)

    def reply(self) -> None:
        with self._reply.open("wb"):
            pass
