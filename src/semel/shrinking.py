"""What is told of an outcome that the store does not take as it is: less and less, but always that it happened (R23)."""

from __future__ import annotations

from typing import Final

import msgspec

from semel.errors import ConfigurationError, StoreUnavailable
from semel.model import Settle

__all__ = ["LARGE", "TOO_LARGE", "TOO_LARGE_FOR_STORE", "refuses_the_value", "shrunk"]

TOO_LARGE: Final = "too large"
"""Over `max_result`. Until there was the other one, also what the store has not taken."""
TOO_LARGE_FOR_STORE: Final = "too large for the store"
"""Refused by it, or never arrived; `max_result` would have let it pass."""
LARGE: Final = 1 << 16  # bytes of a result from which on its size may be why it does not arrive


def refuses_the_value(answer: object) -> bool:
    """Whether the store has looked at it and cannot hold it. No answer, or rights that are missing, say nothing of a value."""
    return isinstance(answer, Exception) and not isinstance(answer, StoreUnavailable | ConfigurationError)


def shrunk(end: Settle) -> Settle:
    """The same outcome without its result; one that has none, without the steps that it brings along, and then its ref."""
    if end.result:
        return msgspec.structs.replace(end, result=b"", marker=TOO_LARGE_FOR_STORE)
    if end.steps:
        return msgspec.structs.replace(end, steps=None)
    return msgspec.structs.replace(end, ref=None)
