"""Durable steps as bytes: an append-only list of entries in the record; the last entry of a name counts.

Appending keeps `note` one small atomic write in every store. A note that was sent twice is harmless: same name,
same content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

__all__ = ["MAX_BYTES", "MAX_STEPS", "Step", "decode", "encode", "summarize"]

MAX_STEPS = 256
MAX_BYTES = 1 << 20


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One entry. `started` is written before steps that may not be repeated blindly (hold, probe)."""

    name: str
    phase: Literal["started", "done", "id"]
    at: float
    value: bytes = b""
    fingerprint: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Step).decode


def encode(step: Step) -> bytes:
    body = _encode(step)
    return len(body).to_bytes(4, "big") + body


def decode(data: bytes) -> dict[str, Step]:
    """Steps by name, ids under `id:<kind>`. Raises msgspec.DecodeError on bytes that were never written here."""
    steps: dict[str, Step] = {}
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        step = _decode(data[at + 4 : at + 4 + size])
        steps[step.name] = step
        at += 4 + size
    return steps


def summarize(steps: Mapping[str, Step]) -> bytes:
    """After the settle names and times stay, values go; an id is itself a name for what was made, and stays."""
    kept = (step if step.phase == "id" else Step(step.name, step.phase, step.at) for step in steps.values())
    return b"".join(map(encode, kept))
