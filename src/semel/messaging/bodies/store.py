"""Bodies of messages, fetched from where they are kept (`semel.bodies`) and put back into their place."""

from __future__ import annotations

from typing import Any

from semel import bodies
from semel.bodies import BodyStore, Stored
from semel.errors import ConfigurationError
from semel.messaging.bodies.reference import HEADER, Reference
from semel.messaging.message import Message
from semel.messaging.sink import Row

__all__ = ["BodyStore", "Stored", "fetched", "inlined", "open_bodies"]


def open_bodies(given: Any) -> BodyStore:
    """A store as it is, or the one that a URL names: `file:///folder`, `s3://bucket/prefix`."""
    return bodies.open_bodies(given, option="claim_check", also=", or sql for a table beside the outbox")


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
