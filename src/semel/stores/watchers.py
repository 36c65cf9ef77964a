"""Who waits in this process for which scope: woken by settles of this very store, whatever else may tell of them."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable

from semel.forks import survive_fork

__all__ = ["Watchers"]


class Watchers:
    """Wake functions by scope hash. Thread-safe; a wake function may be called from any thread."""

    def __init__(self) -> None:
        self._reset()
        survive_fork(self, Watchers._reset)

    def _reset(self) -> None:
        """Also in a forked child: who waits is the parent's, and a thread of his may have held the lock."""
        self._lock = threading.Lock()
        self._waiting: defaultdict[bytes, list[Callable[[], None]]] = defaultdict(list)

    def add(self, scope: bytes, wake: Callable[[], None]) -> None:
        with self._lock:
            self._waiting[scope].append(wake)

    def remove(self, scope: bytes, wake: Callable[[], None]) -> None:
        with self._lock:
            waiting = self._waiting.get(scope, [])
            if wake in waiting:
                waiting.remove(wake)
            if not waiting:
                self._waiting.pop(scope, None)

    def __contains__(self, scope: bytes) -> bool:
        return scope in self._waiting

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def wake(self, scope: bytes) -> None:
        if scope not in self._waiting:  # the common case, on every settle
            return
        with self._lock:
            waiting = tuple(self._waiting.get(scope, ()))
        for wake in waiting:
            wake()

    def wake_hex(self, payload: str) -> None:
        """What a notification says. The channel is open to everybody who may connect: other words are not ours."""
        with contextlib.suppress(ValueError):
            self.wake(bytes.fromhex(payload))

    def wake_all(self) -> None:
        with self._lock:
            everybody = [wake for waiting in self._waiting.values() for wake in waiting]
        for wake in everybody:
            wake()
