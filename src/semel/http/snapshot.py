"""A response as it is stored: status, the headers that a replay gives again, and the very bytes of the body."""

from __future__ import annotations

from typing import Final

import msgspec

from semel.errors import CodecError

__all__ = ["Snapshot", "Spilled"]

_FORMAT: Final = 1


class Spilled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a body is that was too long for its record, and how to tell that it is the same."""

    name: str
    sha256: bytes
    size: int


class Snapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A replay is a historical snapshot: never refreshed, identical bytes."""

    status: int
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    kept: bool = True
    """False: the response was too large or was cut off, and only its status and headers are known."""
    format: int = _FORMAT
    left: float | None = None
    """Of one that is read: for how many more seconds it can be had."""
    spilled: Spilled | None = None
    """The body is elsewhere. Until it is fetched the response counts as not kept, also for versions that know no better."""

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        try:
            found = _decode(data)
        except msgspec.MsgspecError as error:
            raise CodecError(f"the stored response cannot be read: {error}") from error
        if found.format != _FORMAT:
            raise CodecError(f"the stored response has format {found.format}; a newer version wrote it")
        return found

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for known, value in self.headers if known == name), None)


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Snapshot).decode
