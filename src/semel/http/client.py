"""Clients that are safe to retry, and retry: transports for httpx, an adapter for requests, keys that survive a crash.

    httpx.Client(transport=IdempotentTransport())               one key per request, kept over all attempts
    httpx.AsyncClient(transport=AsyncIdempotentTransport())
    session.mount("https://", IdempotentAdapter())              requests

With `keys="sqlite:///keys.db"` a request that names its business action has the same key after a restart:
`client.post(url, json=…, extensions={"semel": {"action": "charge order 7"}})`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

# what is told and answered
from semel.http.clients.delivery import Delivered

# errors
from semel.http.clients.errors import BodyNotRepeatable, RetentionOver

# keys that outlive the process
from semel.http.clients.keys import DurableKeys, KeyState
from semel.http.clients.options import ClientOptions, RequestOptions, Retrying, new_key, sending

if TYPE_CHECKING:
    from semel.http.clients.adapter import IdempotentAdapter
    from semel.http.clients.transports import AsyncIdempotentTransport, IdempotentTransport

__all__ = [
    "AsyncIdempotentTransport",
    "BodyNotRepeatable",
    "ClientOptions",
    "Delivered",
    "DurableKeys",
    "IdempotentAdapter",
    "IdempotentTransport",
    "KeyState",
    "RequestOptions",
    "RetentionOver",
    "Retrying",
    "delivered",
    "new_key",
    "sending",
]

# Imported when they are asked for: whoever uses one library need not have the other.
_PLACES: Final = {
    "AsyncIdempotentTransport": "semel.http.clients.transports",
    "IdempotentAdapter": "semel.http.clients.adapter",
    "IdempotentTransport": "semel.http.clients.transports",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def delivered(response: Any) -> Delivered | None:
    """How this response of httpx or requests came: key, attempts, replayed, honoured. None if it was sent without a key."""
    report = getattr(response, "semel", None) or getattr(response, "extensions", {}).get("semel")
    return report if isinstance(report, Delivered) else None
