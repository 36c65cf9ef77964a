"""A request's body: in memory while it is small; else in an unnamed file, and hashed while it arrives (H25)."""

from __future__ import annotations

import hashlib
import io
import mmap
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, Final, Self

import msgspec

__all__ = ["SPOOL_OVER", "Body", "TooLarge", "feed_parts"]

SPOOL_OVER: Final = 1 << 20
_CHUNK: Final = 1 << 16


class TooLarge(Exception):
    """The body is longer than the route accepts."""


class Body(msgspec.Struct, eq=False, gc=False):
    """Fed chunk by chunk; then read as often as one likes. Close it when the handler has ended.

    `Body(limit, whole, len(whole))` came in one piece, no longer than `SPOOL_OVER` and the limit. The garbage collector does not
    look at it: one waits with every keyed request, and nothing in it can lead back to it.
    """

    _limit: int
    in_one: bytes | None = None
    """All of it, where it came or was made whole; `whole` makes it."""
    size: int = 0
    parsed: bool = False
    """It holds the parts of a form that a framework has parsed, not the form's own bytes."""
    _chunks: list[bytes] | None = None
    """As they came; None of one that came whole."""
    _file: IO[bytes] | None = None
    # Only of what leaves memory: a small body is usually compared by its meaning, not by its bytes.
    _hash: Any = None

    def __repr__(self) -> str:
        return f"<Body of {self.size} bytes>"  # never what is in it: whoever reports errors shows locals, too

    def feed(self, chunk: bytes) -> None:
        if not chunk:
            return
        self.size += len(chunk)
        if self.size > self._limit:
            self.close()
            raise TooLarge
        pieces, self.in_one = self._pieces, None
        if self._file is not None and self._hash is not None:
            self._hash.update(chunk)
            self._file.write(chunk)
            return
        self._chunks = pieces
        pieces.append(chunk)
        if self.size > SPOOL_OVER:
            self._hash = self._hashed()
            self._file = tempfile.TemporaryFile(prefix="semel-body-")  # noqa: SIM115 - closed by close()
            self._file.writelines(pieces)
            self._chunks = []

    @property
    def _pieces(self) -> list[bytes]:
        if self._chunks is not None:
            return self._chunks
        return [self.in_one] if self.in_one else []

    def _hashed(self) -> hashlib._Hash:
        digest = hashlib.sha256()
        for chunk in self._pieces:
            digest.update(chunk)
        return digest

    @property
    def digest(self) -> bytes:
        """SHA-256 of the bytes as they came."""
        return (self._hash or self._hashed()).digest()

    @property
    def whole(self) -> bytes | None:
        """All of it, when it is in memory."""
        if self._file is not None:
            return None
        if self.in_one is None:
            self.in_one = b"".join(self._pieces)  # of one piece: that very piece
        return self.in_one

    def view(self) -> bytes | mmap.mmap:
        """All of it to look at, also from the file, without reading it into memory."""
        if self._file is None:
            return self.whole or b""
        self._file.flush()
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def chunks(self) -> Iterator[bytes]:
        if self._file is None:
            yield from self._pieces
            return
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK):
            yield chunk

    def file(self) -> IO[bytes]:
        """From its beginning, as a file."""
        if self._file is None:
            return io.BytesIO(self.whole or b"")
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        if self._chunks:
            self._chunks = []
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def feed_parts(body: Body, *parts: str) -> None:
    """Parts of a form that a framework has parsed, with their number and lengths: no two forms look the same."""
    body.parsed = True
    body.feed(b"%d;" % len(parts))
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        body.feed(b"%d:" % len(raw) + raw)
