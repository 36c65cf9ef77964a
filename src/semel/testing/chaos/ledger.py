"""What happened, in append-only files outside of the system under test: one write per line, so a kill tears nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Answer", "Effect", "Ledger"]


class Effect(msgspec.Struct, frozen=True):
    """One effect: `what` it is of this key's effects, `by` whom, `peer` the key that a keyed peer got."""

    what: str
    by: str
    at: float
    peer: str = ""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one caller was told, or that a fault struck (`error` is then "fault")."""

    by: str
    at: float
    value: Any = None
    replayed: bool = False
    error: str = ""
    text: str = ""


class Ledger:
    """The files of one schedule. Times are of the machine's monotonic clock, the same in all its processes."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def effect(self, what: str, by: str, peer: str = "") -> None:
        self._append("effects", Effect(what, by, time.monotonic(), peer))

    def answer(self, by: str, value: Any, *, replayed: bool) -> None:
        self._append("answers", Answer(by, time.monotonic(), value, replayed))

    def error(self, by: str, error: str, text: str = "") -> None:
        self._append("answers", Answer(by, time.monotonic(), error=error, text=text[:2000]))

    def struck(self, by: str) -> None:
        self._append("faults", Answer(by, time.monotonic(), error="fault"))

    def effects(self) -> list[Effect]:
        return [msgspec.json.decode(line, type=Effect) for line in self._lines("effects")]

    def answers(self) -> list[Answer]:
        return [msgspec.json.decode(line, type=Answer) for line in self._lines("answers")]

    def faults(self) -> list[Answer]:
        return [msgspec.json.decode(line, type=Answer) for line in self._lines("faults")]

    def _append(self, name: str, line: Effect | Answer) -> None:
        handle = os.open(self.folder / name, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            os.write(handle, msgspec.json.encode(line) + b"\n")
        finally:
            os.close(handle)

    def _lines(self, name: str) -> list[bytes]:
        path = self.folder / name
        return path.read_bytes().splitlines() if path.exists() else []
