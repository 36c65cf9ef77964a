"""Durable steps as bytes: an append-only list of entries in the record; the last entry of a name counts, and done stays done.

Appending keeps `note` one small atomic write in every store. A note that was sent twice is harmless: same name,
same content, whenever the copy arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from semel.errors import CodecError

__all__ = [
    "HOLD",
    "MAX_BYTES",
    "MAX_STEPS",
    "PROBE",
    "Step",
    "add",
    "are_readable",
    "decode",
    "encode",
    "finished",
    "summarize",
    "taken_back",
]

MAX_STEPS = 256
MAX_BYTES = 1 << 20
HOLD = "hold"
PROBE = "probe"
_TAKEN_BACK = "taken back"


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One entry. `started` is written before steps that may not be repeated blindly (hold, probe)."""

    name: str
    phase: Literal["started", "done", "id"]
    at: float
    value: bytes = b""
    fingerprint: str = ""
    marker: str = ""
    """Why the value of a step that is done was not kept; under which policy one was started: HOLD or PROBE."""

    @property
    def is_taken_back(self) -> bool:
        """It was started, and nothing of it has run."""
        return self.marker == _TAKEN_BACK


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Step).decode


def encode(step: Step) -> bytes:
    body = _encode(step)
    return len(body).to_bytes(4, "big") + body


def decode(data: bytes) -> dict[str, Step]:
    """Steps by name, ids under `id:<kind>`. Raises CodecError on bytes that were never written here."""
    steps: dict[str, Step] = {}
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        try:
            step = _decode(data[at + 4 : at + 4 + size])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CodecError(
                f"the stored steps are unreadable: {error}; they were damaged, encrypted, or written by a newer version of semel"
            ) from error
        add(steps, step)
        at += 4 + size
    return steps


def add(steps: dict[str, Step], step: Step) -> None:
    """The last entry of a name counts; one that takes a mark back leaves none.

    But what is done stays done: a mark that comes after it is a late copy of one whose answer was lost.
    """
    known = steps.get(step.name)
    if known is not None and known.phase == "done" and step.phase == "started":
        return
    if step.is_taken_back:
        steps.pop(step.name, None)
    else:
        steps[step.name] = step


def taken_back(name: str, at: float) -> Step:
    """For a step that was started and of which nothing has run. Who does not know the marker takes it for one that was started."""
    return Step(name, "started", at, marker=_TAKEN_BACK)


def are_readable(data: bytes) -> bool:
    try:
        decode(data)
    except CodecError:
        return False
    return True


def finished(data: bytes) -> bytes | None:
    """The same without steps that were only started; None when there are none of those."""
    steps = decode(data).values()
    kept = [step for step in steps if step.phase != "started"]
    return None if len(kept) == len(steps) else b"".join(map(encode, kept))


def summarize(steps: Mapping[str, Step]) -> bytes:
    """After the settle names and times stay, values go; an id is itself a name for what was made, and stays."""
    known = tuple(steps.values())  # a copy: a step that its run has left behind may be remembered meanwhile
    kept = (step if step.phase == "id" else Step(step.name, step.phase, step.at) for step in known)
    return b"".join(map(encode, kept))
