"""Where an outbox or inbox lives, when it is told by a face or a store."""

from __future__ import annotations

from typing import Any

from semel.errors import ConfigurationError
from semel.face import Face
from semel.store import Store, origin_of

__all__ = ["place_of"]


def place_of(where: Any) -> Any:
    """The URL, engine or client that a Semel, an AsyncSemel or a store was opened from; anything else as it is."""
    store = where._store if isinstance(where, Face) else where  # noqa: SLF001 - our own face
    if not isinstance(store, Store):
        return where
    origin = origin_of(store)
    if origin is None:
        raise ConfigurationError(
            f"an outbox or inbox cannot use a {type(store).__name__}, which was not opened from a URL: give it the URL or the "
            "SQLAlchemy engine of its database"
        )
    return origin
