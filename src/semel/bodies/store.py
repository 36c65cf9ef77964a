"""Where large bodies are kept: four verbs, all of them plain calls. Whoever must not wait calls them in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from semel.errors import ConfigurationError, SemelError
from semel.hosts import scheme_of

__all__ = ["BodyDamaged", "BodyMissing", "BodyStore", "Stored", "open_bodies"]


class BodyMissing(SemelError):
    """A body is not in its store. It was kept for less long than it was wanted, or this is another store."""


class BodyDamaged(SemelError):
    """What a store holds under a reference is not the body that was stored. It is never handed to anybody."""


class Stored(NamedTuple):
    """A body that is there: its name, and since how many seconds by the store's own clock."""

    name: str
    age: float


@runtime_checkable
class BodyStore(Protocol):
    """Bodies by name (`home/name`, both of letters and digits). What cannot be reached raises StoreUnavailable."""

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
        """The bodies of one home, in any order."""
        ...


def open_bodies(given: Any, *, option: str = "claim_check", also: str = "") -> BodyStore:
    """A store as it is, or the one that a URL names: `file:///folder`, `s3://bucket/prefix`.

    `option` and `also` are words for messages: who asks, and what else it takes.
    """
    if not isinstance(given, str):
        if isinstance(given, BodyStore):
            return given
        raise ConfigurationError(
            f"{option}= takes a store with put, get, delete and stored, or a URL, not {type(given).__name__}"
        )
    scheme = scheme_of(given)
    if scheme == "file":
        from semel.bodies.files import FileBodies

        return FileBodies.from_url(given)
    if scheme == "s3":
        from semel.bodies.s3 import S3Bodies

        return S3Bodies.from_url(given)
    raise ConfigurationError(
        f"no store of bodies answers to {given!r}: write file:///folder or s3://bucket/prefix{also}"
    )
