"""The reference that travels instead of a body: whose it is, its hash and size, and whether it is JSON or bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from semel.bodies import BodyDamaged, BodyMissing
from semel.messaging.message import Message
from semel.messaging.sink import Row

__all__ = ["HEADER", "BodyDamaged", "BodyMissing", "Reference"]

HEADER: Final = "claim-check"
_FORM: Final = re.compile(
    r"([0-9a-z]{1,32})/([0-9a-f]{64})([0-9a-f]{16})?; size=(\d{1,18}); content=(json|raw)"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """A claim check. `home` is the outbox whose body it is: outboxes that share a store do not share its bodies. `mark` tells
    bodies with the same content apart, where each message has a body of its own (an outbox in Redis)."""

    home: str
    sha256: str
    size: int
    content: Literal["json", "raw"]
    mark: str = ""

    @classmethod
    def to(cls, data: bytes, *, home: str, raw: bool, mark: str = "") -> Reference:
        return cls(home, hashlib.sha256(data).hexdigest(), len(data), "raw" if raw else "json", mark)

    @classmethod
    def of(cls, message: Message | Row) -> Reference | None:
        """The reference that a message carries, if it does. BodyDamaged if it cannot be read."""
        said = message.headers.get(HEADER)
        if said is None:
            return None
        found = _FORM.fullmatch(said)
        if found is None:
            raise BodyDamaged(
                f"message {message.id} ({message.topic}) has a {HEADER} header that is no reference to a body: {said[:100]!r}"
            )
        return cls(found[1], found[2], int(found[4]), "raw" if found[5] == "raw" else "json", found[3] or "")

    @property
    def name(self) -> str:
        """What the body is called in its store."""
        return f"{self.home}/{self.digest}"

    @property
    def digest(self) -> str:
        """The same, without whose it is."""
        return self.sha256 + self.mark

    @property
    def header(self) -> str:
        """As the message's header says it."""
        return f"{self.name}; size={self.size}; content={self.content}"

    @property
    def body(self) -> bytes:
        """What travels in the body's place, for readers that know nothing of headers."""
        said = {"name": self.name, "sha256": self.sha256, "size": self.size, "content": self.content}
        return msgspec.json.encode({HEADER: said})

    def check(self, data: bytes) -> None:
        """BodyDamaged unless it is what was sent."""
        if len(data) != self.size or hashlib.sha256(data).hexdigest() != self.sha256:
            raise BodyDamaged(
                f"the store holds {len(data)} bytes under {self.name}, which are not the {self.size} bytes that were sent"
            )

    def filled(self, message: Message, data: bytes) -> Message:
        """The message as it was added, with its body."""
        self.check(data)
        body = data if self.content == "raw" else msgspec.json.decode(data)
        return replace(message, body=body, headers=_without(message.headers))

    def filled_row(self, row: Row, data: bytes) -> Row:
        """The same for a row on its way out."""
        self.check(data)
        replaced: Row = msgspec.structs.replace(
            row, body=data, raw=self.content == "raw", headers=_without(row.headers)
        )
        return replaced


def _without(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != HEADER}
