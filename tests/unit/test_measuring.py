"""The weak dictionary that a measured run uses forgets what it should, greenlets and others."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import weakref
from greenlet import greenlet
from tests.measuring import spare_the_tracer

class Thing: ...

spare_the_tracer()
kept = weakref.WeakKeyDictionary()
green, thing = greenlet(print), Thing()
kept[green], kept[thing] = 1, 2
assert (kept[green], kept[thing], len(kept)) == (1, 2, 2)
callbacks = [type(each.__callback__).__name__ for each in kept.data]
assert callbacks == ["method-wrapper", "function"], callbacks
del green
assert list(kept.values()) == [2]
del thing
assert not kept
"""


def test_greenlets_are_forgotten_without_python_code() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
