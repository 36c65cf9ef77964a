"""Window algebra: an admission must be remembered for as long as a copy of its message may still come."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigurationError
from semel.options import seconds

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

    def __post_init__(self) -> None:
        for name in ("retries", "redelivery", "replay"):
            seconds(name, getattr(self, name))

    @classmethod
    def of(
        cls,
        relay: Relay,
        *,
        redelivery: float | timedelta,
        replay: float | timedelta = 0.0,
        outage: float | timedelta = 0.0,
    ) -> Windows:
        """With the retry horizon of a relay: every attempt at its longest delay, and the batches it keeps. `outage` is for how
        long its sink, its database or all relays may be away with a batch half sent; only an exact sink needs none."""
        return cls(relay.horizon + _seconds(outage), redelivery, replay)

    @property
    def total(self) -> float:
        """Everything together, in seconds."""
        return _seconds(self.retries) + _seconds(self.redelivery) + _seconds(self.replay)


_USUAL: Final = (
    521.0  # the horizon of a relay with its default options: the least that an inbox has to live with
)


def check_windows(retention: float, windows: Windows | None) -> None:
    """ConfigurationError if an admission would be forgotten while a copy may still come. Without windows a relay with its
    default options is assumed, and a broker that hands nothing out again."""
    given: Any = windows
    if given is not None and not isinstance(given, Windows):
        raise ConfigurationError(f"windows is Windows(retries=…, redelivery=…), not {given!r}")
    if windows is None and retention < _USUAL:
        raise ConfigurationError(
            f"the inbox remembers an admission for {retention:g} s, and a relay with its default options may send a message "
            f"again for {_USUAL:g} s: it would be handled twice. Raise Inbox(retention=…), or say how late copies come: "
            "Inbox(windows=Windows(retries=…, redelivery=…))"
        )
    if windows is None or retention >= windows.total:
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
