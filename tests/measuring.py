"""What keeps a measured run from standing still: coverage, greenlet and Python 3.11 together.

When a thread ends, greenlet leaves its remains to a pending call of the main thread. There they are taken out of the weak
dictionary in which coverage keeps what it knows of each greenlet, by a callback in Python. If another thread ends meanwhile, one
more pending call waits, which may not run inside of the first; and Python 3.11, which looks for pending calls before it tells a
tracer that a function begins, looks again and again. A callback that is not written in Python is told to no tracer.
"""

from __future__ import annotations

import weakref
from typing import Any

from greenlet import greenlet

__all__ = ["spare_the_tracer"]


def spare_the_tracer() -> None:
    def setitem(self: Any, key: Any, value: Any) -> None:
        forget = self.data.__delitem__ if type(key) is greenlet else self._remove
        self.data[weakref.ref(key, forget)] = value

    weakref.WeakKeyDictionary.__setitem__ = setitem  # type: ignore[method-assign]  # of everybody's: others are kept as before
