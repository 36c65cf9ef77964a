"""Named places where a fault may strike. Free when nobody listens; tests and the crash matrix listen.

A listener gets the name and may raise, kill its own process, or stop it: the code around a point must be right
whatever happens there.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["POINTS", "listen", "reach"]

POINTS = (
    "claim.sent",  # before a claim leaves
    "claim.won",  # the key is ours, the function has not started
    "run.started",  # just before the function
    "run.returned",  # the effect happened, nothing is recorded
    "settle.sent",  # before the outcome leaves
    "settle.stored",  # the outcome is recorded, the caller does not know
    "step.started",  # before a step's function
    "step.returned",  # the step's effect happened, its note is not written
    "step.stored",  # the note is written
    "renew.sent",  # before a heartbeat leaves
    "wait.parked",  # a waiter is about to sleep
    "http.admitted",  # a request's key is ours, its handler's task does not exist yet
    "http.responding",  # it is noted that a streamed response begins, its first byte has not left
    "http.sent",  # the server has the whole response
    "outbox.written",  # messages are rows of the caller's transaction, which has not committed
    "relay.chosen",  # what was delivered is deleted and what is next is written down, in a transaction that has not committed
    "relay.planned",  # it has committed, nothing is sent
    "relay.published",  # the sinks have what was sent, it is not written down
    "inbox.admitted",  # a message, or those of a batch, are rows of the inbox, uncommitted; the handler has not started
    "consumer.handled",  # the handler has returned, its transaction has not committed
    "consumer.committed",  # it has committed, the broker does not know
)

_listener: Callable[[str], None] | None = None


def listen(listener: Callable[[str], None] | None) -> None:
    """Install the one listener of this process (None removes it)."""
    global _listener  # noqa: PLW0603 - one process, one nemesis
    _listener = listener


def reach(name: str) -> None:
    if _listener is not None:
        _listener(name)
