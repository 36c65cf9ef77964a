"""What happened, in append-only files outside of the system under test: one write per line, so a kill tears nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from semel.keys import Scope

__all__ = ["Answer", "Effect", "Kept", "Ledger", "Owner", "Story"]

_Line = TypeVar("_Line")


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
    attempt: int = 0


class Owner(msgspec.Struct, frozen=True):
    """Who was inside of the function, with the nonce and the number of its attempt."""

    by: str
    at: float
    nonce: str
    attempt: int


class Kept(msgspec.Struct, frozen=True):
    """A record, as it was in the store when all was over."""

    state: str
    nonce: str
    attempts: int


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was written down about one schedule."""

    effects: list[Effect] = []
    answers: list[Answer] = []
    faults: list[Answer] = []
    owners: list[Owner] = []
    woken: list[Answer] = []
    """When one that had been stopped went on."""
    warned: list[Answer] = []
    """Who heard inside of its function, from its own heartbeat, that it was overtaken."""
    noted: list[Answer] = []
    """Whose step's note was taken after it had been stopped."""
    records: list[Kept] = []
    survived: list[Answer] = []
    """How many rows of a caller's transaction (`attempt`) were there after the store's misfortune, before anybody called again."""


class Ledger:
    """The files of one schedule. Times are of the machine's monotonic clock, the same in all its processes."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._place = folder

    def effect(self, what: str, by: str, peer: str = "") -> None:
        self._append("effects", Effect(what, by, time.monotonic(), peer))

    def answer(self, by: str, value: Any, *, replayed: bool, attempt: int = 0) -> None:
        self._append("answers", Answer(by, time.monotonic(), value, replayed, attempt=attempt))

    def error(self, by: str, error: str, text: str = "") -> None:
        # A driver's text may hold half a surrogate pair, which JSON cannot carry.
        spelled = text[-2000:].encode("utf-8", "backslashreplace").decode()
        self._append("answers", Answer(by, time.monotonic(), error=error, text=spelled))

    def struck(self, by: str) -> None:
        self._append("faults", Answer(by, time.monotonic(), error="fault"))

    def entered(self, by: str, nonce: bytes, attempt: int) -> None:
        self._append("owners", Owner(by, time.monotonic(), nonce.hex(), attempt))

    def woke(self, by: str) -> None:
        self._append("woken", Answer(by, time.monotonic()))

    def warn(self, by: str) -> None:
        self._append("warned", Answer(by, time.monotonic()))

    def note(self, by: str) -> None:
        self._append("noted", Answer(by, time.monotonic()))

    def place(self, scope: Scope) -> None:
        """Under which name an edge keeps the record of this schedule."""
        self._append("scopes", scope)

    def scope(self) -> Scope | None:
        return next(iter(self._read("scopes", Scope)), None)

    def keep(self, state: str, nonce: bytes, attempts: int) -> None:
        self._append("records", Kept(state, nonce.hex(), attempts))

    def survive(self, rows: int) -> None:
        self._append("survived", Answer("store", time.monotonic(), attempt=rows))

    def effects(self) -> list[Effect]:
        return self._read("effects", Effect)

    def answers(self) -> list[Answer]:
        return self._read("answers", Answer)

    def faults(self) -> list[Answer]:
        return self._read("faults", Answer)

    def owners(self) -> list[Owner]:
        return self._read("owners", Owner)

    def story(self) -> Story:
        return Story(
            effects=self.effects(),
            answers=self.answers(),
            faults=self.faults(),
            owners=self.owners(),
            woken=self._read("woken", Answer),
            warned=self._read("warned", Answer),
            noted=self._read("noted", Answer),
            records=self._read("records", Kept),
            survived=self._read("survived", Answer),
        )

    def _append(self, name: str, line: msgspec.Struct) -> None:
        handle = os.open(f"{self._place}/{name}", os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            os.write(handle, msgspec.json.encode(line) + b"\n")
        finally:
            os.close(handle)

    def _read(self, name: str, kind: type[_Line]) -> list[_Line]:
        try:
            with open(f"{self._place}/{name}", "rb") as file:  # noqa: PTH123  # asked every few milliseconds
                return [msgspec.json.decode(line, type=kind) for line in file]
        except FileNotFoundError:
            return []
