"""Small in-process gauges of a route: whether to ask a store that just failed, how long handlers take, quotas."""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["Breaker", "Latency", "Quota"]

_FAILURES: Final = 3
_PAUSE: Final = 1.0
_MOST: Final = 10_000


class Breaker:
    """After three failures in a row the store is left alone for a second; then one call may try."""

    __slots__ = ("_until", "failures")

    def __init__(self) -> None:
        self.failures = 0
        """In a row: 0 again when the store has answered."""
        self._until = 0.0

    def allows(self, now: float) -> bool:
        if self.failures < _FAILURES:
            return True
        if now < self._until:
            return False
        self._until = now + _PAUSE  # this one tries; the others go on being refused until it knows
        return True

    def failed(self, now: float) -> None:
        self.failures += 1
        self._until = now + _PAUSE


class Latency:
    """How long a route's handlers usually take: a moving average, for Retry-After."""

    def __init__(self) -> None:
        self._average = 1.0

    def add(self, seconds: float) -> None:
        self._average += (seconds - self._average) * 0.1

    def typical(self) -> float:
        return max(1.0, self._average)


class Quota:
    """New keys per second and principal: a bucket for each, of one second's size, at most some thousand buckets."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        self._lock = threading.Lock()

    def spend(self, who: tuple[str, str], now: float) -> bool:
        """Take one, if there is one: before the store is asked, so that callers at the same time cannot share it."""
        with self._lock:
            if len(self._buckets) >= _MOST and who not in self._buckets:
                full = [name for name in self._buckets if self._level(name, now) >= self._size]
                for name in full or list(self._buckets)[: _MOST // 2]:
                    del self._buckets[name]
            level = self._level(who, now)
            if level < 1.0:
                return False
            self._buckets[who] = (level - 1.0, now)
            return True

    def refund(self, who: tuple[str, str]) -> None:
        with self._lock:
            level, since = self._buckets.get(who, (self._size, 0.0))
            self._buckets[who] = (min(self._size, level + 1.0), since)

    @property
    def _size(self) -> float:
        return max(1.0, self._rate)

    def _level(self, who: tuple[str, str], now: float) -> float:
        level, since = self._buckets.get(who, (self._size, now))
        return min(self._size, level + (now - since) * self._rate)
