"""Bodies that are too large to travel: kept in a store, named by their hash. The message carries a reference (a claim check).

`Outbox(…, claim_check="file:///srv/bodies", claim_over=65_536)` stores what is larger; an inbox that is given the same store
puts the body back, and checks it, before the handler sees it.
"""

from __future__ import annotations

# what a body is called, and what may be wrong with it
from semel.messaging.bodies.reference import HEADER, BodyDamaged, BodyMissing, Reference

# where bodies are kept
from semel.messaging.bodies.store import BodyStore, Stored, fetched, inlined, open_bodies

__all__ = [
    "HEADER",
    "BodyDamaged",
    "BodyMissing",
    "BodyStore",
    "Reference",
    "Stored",
    "fetched",
    "inlined",
    "open_bodies",
]
