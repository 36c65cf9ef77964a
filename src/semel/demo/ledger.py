"""Where the demo's effects go: a file that knows nothing of semel. A line that is in it stays in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Effect", "append", "read"]


class Effect(NamedTuple):
    """One line: the key, the receipt that the function returns, who made it, and the key for a receiver that asks."""

    key: str
    receipt: str
    attempt: str
    worker: str
    downstream: str


def append(path: Path, effect: Effect) -> None:
    """One write to a file opened for appending: whole or not at all, and it survives a kill right after it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, (" ".join(effect) + "\n").encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Effect]:
    if not path.exists():
        return []
    return [Effect(*line.split(" ")) for line in path.read_text("utf-8").splitlines()]
