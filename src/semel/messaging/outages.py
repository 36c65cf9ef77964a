"""A database that is away: told once, now and then while it lasts, and when it is back."""

from __future__ import annotations

import time
from typing import Final

from semel.messaging.events import Alarm, DatabaseBack, Emit

__all__ = ["Outage"]

_AGAIN: Final = 60.0  # seconds between alarms of one outage


class Outage:
    """What the loops of a relay meet together. `quiet` is for how long nobody must have missed it before it is back."""

    def __init__(self, emit: Emit, *, quiet: float) -> None:
        self._emit = emit
        self._quiet = quiet
        self._since: float | None = None
        self._last = self._told = float("-inf")

    def missed(self, error: Exception) -> None:
        """Somebody asked it in vain."""
        self._last = time.monotonic()
        if self._since is None:
            self._since, self._told = self._last, float("-inf")
        if self._last - self._told > _AGAIN:
            self._told = self._last
            self._emit(Alarm("database", str(error)))

    def answered(self) -> None:
        """It has answered somebody."""
        now = time.monotonic()
        if self._since is not None and now - self._last >= self._quiet:
            self._emit(DatabaseBack(now - self._since))
            self._since = None
