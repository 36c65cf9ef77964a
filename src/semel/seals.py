"""How a sealed record is told from a plain one by whoever has no keys (see `semel.layers.encrypt`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from semel.errors import OutcomeUnknown

if TYPE_CHECKING:
    from semel.model import Record

__all__ = ["LABEL", "MARK", "Sealed", "has_sealed_steps", "is_sealed", "key_name"]

MARK: Final = b"\xe1"
"""The first byte of what is sealed: no result and no step begins with it."""
LABEL: Final = "semel.sealed"
"""A label of records whose program seals: a run that has ended without an outcome holds nothing else to tell it by."""


class Sealed(OutcomeUnknown):
    """The keys that are here do not open it. `record` is all that can be seen of it: whoever needs no body goes on with that."""

    def __init__(self, message: str, record: Record | None = None, now: float = 0.0) -> None:
        super().__init__(message, unreadable=True, nonce=b"" if record is None else record.nonce)
        self.record = record
        self.now = now


def key_name(sealed: bytes | bytearray | memoryview) -> str:
    """Of the key that sealed it."""
    size = sealed[1] if len(sealed) > 1 else 0
    return bytes(sealed[2 : 2 + size]).decode("utf-8", "replace")


def is_sealed(record: Record) -> bool:
    """Whether a program with encrypt= wrote it. Never so for who has read it with the keys: they break the seals."""
    return LABEL in (record.labels or {}) or record.result[:1] == MARK or has_sealed_steps(record)


def has_sealed_steps(record: Record) -> bool:
    return record.steps[4:5] == MARK  # behind the length of the first one
