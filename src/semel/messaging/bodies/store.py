"""Where bodies are kept: four verbs, all of them plain calls. Whoever must not wait calls them in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import urlsplit

from semel.errors import ConfigurationError
from semel.messaging.bodies.reference import HEADER, Reference
from semel.messaging.message import Message
from semel.messaging.sink import Row

__all__ = ["BodyStore", "Stored", "fetched", "inlined", "open_bodies"]


class Stored(NamedTuple):
    """A body that is there: its name, and since how many seconds by the store's own clock."""

    name: str
    age: float


@runtime_checkable
class BodyStore(Protocol):
    """Bodies by name (`home/sha256`). What cannot be reached raises StoreUnavailable."""

    def put(self, name: str, data: bytes) -> None:
        """Keep it. When this returns it is durable; whoever reads the name sees all of it or nothing. Twice is once."""
        ...

    def get(self, name: str) -> bytes:
        """The body; BodyMissing if there is none."""
        ...

    def delete(self, name: str) -> None:
        """It is over. One that is not there is no error."""
        ...

    def stored(self, home: str) -> Iterator[Stored]:
        """The bodies of one outbox, in any order."""
        ...


def open_bodies(given: Any) -> BodyStore:
    """A store as it is, or the one that a URL names: `file:///folder`, `s3://bucket/prefix`."""
    if not isinstance(given, str):
        if isinstance(given, BodyStore):
            return given
        raise ConfigurationError(
            f"claim_check= takes a store with put, get, delete and stored, or a URL, not {type(given).__name__}"
        )
    scheme = urlsplit(given).scheme
    if scheme == "file":
        from semel.messaging.bodies.files import FileBodies

        return FileBodies.from_url(given)
    if scheme == "s3":
        from semel.messaging.bodies.s3 import S3Bodies

        return S3Bodies.from_url(given)
    raise ConfigurationError(
        f"no store of bodies answers to {given!r}: write file:///folder, s3://bucket/prefix, or sql for a table beside the "
        "outbox"
    )


def fetched(store: BodyStore | None, message: Message) -> Message:
    """The message with its body. One that carries no reference is given back as it is."""
    reference = Reference.of(message)
    if reference is None:
        return message
    return reference.filled(message, _from(store, message).get(reference.name))


def inlined(store: BodyStore | None, row: Row) -> Row:
    """As `fetched`, for a sink that hands bodies over."""
    reference = Reference.of(row)
    if reference is None:
        return row
    return reference.filled_row(row, _from(store, row).get(reference.name))


def _from(store: BodyStore | None, message: Message | Row) -> BodyStore:
    if store is None:
        raise ConfigurationError(
            f"message {message.id} ({message.topic}) carries a reference to its body, which is kept elsewhere: give the inbox "
            f"or the relay's outbox the store where it is, claim_check=…. The reference is in the header {HEADER!r}"
        )
    return store
