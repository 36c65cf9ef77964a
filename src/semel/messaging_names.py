"""Messaging's tables by name, for those who look at them without SQLAlchemy, which messaging itself needs."""

from __future__ import annotations

from typing import Final

__all__ = ["SUFFIXES", "VERSION"]

SUFFIXES: Final = (
    "_outbox",
    "_outbox_ids",
    "_outbox_sent",
    "_outbox_parts",
    "_outbox_lines",
    "_outbox_relays",
    "_inbox",
    "_inbox_dead",
    "_outbox_bodies",
    "_messaging",
)
"""The last one has the version."""
VERSION: Final = 1
