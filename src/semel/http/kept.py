"""What is kept of a response while it is sent: all of it up to the cap (H26), and the piece that is held back (H19)."""

from __future__ import annotations

__all__ = ["Kept"]


class Kept:
    """Pieces are pushed as they come; the one before may leave, so that the last one leaves after the outcome is stored."""

    __slots__ = ("_limit", "_pieces", "_size", "last")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: list[bytes] | None = []
        self._size = 0
        self.last: bytes | None = None

    def push(self, piece: bytes) -> bytes | None:
        """Keep a piece; the one before it, which may leave now."""
        self._size += len(piece)
        if self._size > self._limit:
            self._pieces = None
        elif self._pieces is not None and piece:
            self._pieces.append(piece)
        last, self.last = self.last, piece
        return last

    @property
    def whole(self) -> bytes | None:
        """The body; None when it is too long to be kept."""
        return None if self._pieces is None else b"".join(self._pieces)
