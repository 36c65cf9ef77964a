"""Messages on a stream socket: four bytes of length, then JSON."""

from __future__ import annotations

import socket

__all__ = ["receive", "send"]


def send(line: socket.socket, text: bytes) -> None:
    line.sendall(len(text).to_bytes(4, "big") + text)


def receive(line: socket.socket) -> bytes | None:
    """The next message; None when the other side has closed."""
    head = _exactly(line, 4)
    return None if head is None else _exactly(line, int.from_bytes(head, "big"))


def _exactly(line: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        try:
            more = line.recv(size - len(data))
        except ConnectionError:
            return None
        if not more:
            return None
        data += more
    return data
