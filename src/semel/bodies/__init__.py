"""Bodies that are too large for a record or a message, kept in a store of their own: a folder, a bucket, a table."""

from __future__ import annotations

from semel.bodies.store import BodyDamaged, BodyMissing, BodyStore, Stored, open_bodies

__all__ = ["BodyDamaged", "BodyMissing", "BodyStore", "Stored", "open_bodies"]
