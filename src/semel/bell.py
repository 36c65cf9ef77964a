"""A bell: any thread rings it, one thread waits for it."""

from __future__ import annotations

import threading

__all__ = ["Bell"]


class Bell:
    """As an event that is cleared by whoever has waited for it; rung twice, it is heard once.

    It is a lock, let go by who rings and taken by who hears: each is one call into C. An event waits in Python, under a
    lock that a signal's handler which raises there leaves behind, and whoever rings waits for that lock for ever.
    """

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        try:
            self._silent.release()
        except RuntimeError:
            return  # rung already

    def heard(self, timeout: float) -> bool:
        """Wait for it; False when so many seconds have passed without it."""
        return self._silent.acquire(timeout=min(max(0.0, timeout), threading.TIMEOUT_MAX))
