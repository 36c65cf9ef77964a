"""Window algebra: an admission must be remembered for as long as a copy of its message may still come."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.messaging.relay import Relay

__all__ = ["Windows", "check_windows"]


@dataclass(frozen=True, slots=True)
class Windows:
    """How late a copy of a message may come, in seconds (or timedeltas).

    `retries`: how long the outbox may send a message again; `redelivery`: how long the broker may hand it out again (its
    retention); `replay`: how long after its death a letter may still be replayed.
    """

    retries: float | timedelta
    redelivery: float | timedelta
    replay: float | timedelta = 0.0

    @classmethod
    def of(cls, relay: Relay, *, redelivery: float | timedelta, replay: float | timedelta = 0.0) -> Windows:
        """With the retry horizon of a relay: every attempt at its longest delay, and the batches it keeps."""
        return cls(relay.horizon, redelivery, replay)

    @property
    def total(self) -> float:
        """Everything together, in seconds."""
        return _seconds(self.retries) + _seconds(self.redelivery) + _seconds(self.replay)


def check_windows(retention: float, windows: Windows) -> None:
    """ConfigurationError if an admission would be forgotten while a copy may still come."""
    if retention >= windows.total:
        return
    terms = (
        f"outbox retries {_seconds(windows.retries):g} s + broker redelivery {_seconds(windows.redelivery):g} s + "
        f"dead-letter replay {_seconds(windows.replay):g} s = {windows.total:g} s"
    )
    named = {
        "retries": _seconds(windows.retries),
        "redelivery": _seconds(windows.redelivery),
        "replay": _seconds(windows.replay),
    }
    largest = max(named, key=lambda name: named[name])
    raise ConfigurationError(
        f"the inbox remembers an admission for {retention:g} s, and a copy may come after {terms}: it would be handled twice. "
        f"Raise Inbox(retention=…) to at least {windows.total:g}, or shorten {largest} (Windows({largest}=…)), the longest of "
        "the three"
    )


def _seconds(value: float | timedelta) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)
