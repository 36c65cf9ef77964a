"""Histories of real stores: what every caller asked and was told, and when, in a log that survives the caller.

    store = Recorded(open_store(url, Settings(), "sync"), Log(path))      # in each process
    told, histories, undecided = inexplicable(read_logs(paths))           # afterwards, see `history`

Times are the wall clock of this machine, which must be the store's as well: decisions depend on it, so a clock that is set
meanwhile spoils a history (`clock_offset` before and after tells). A call is written
down before it leaves and again when it is answered, each time by one append, so that a process that is killed in between
leaves a call without an answer: it may have taken effect, or not.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from semel.keys import Scope
from semel.layers.layer import Layer
from semel.model import Answer, Ask, Note, Record, Renewal, Settle, Verdict, Won
from semel.store import Store
from semel.testing.simulation.history import Call, Look

__all__ = ["Log", "Recorded", "clock_offset", "read_logs"]

_SIZE = struct.Struct("<I")
_NEAR = 0.002  # seconds by which two clocks of one machine may differ


class _Asked(msgspec.Struct, tag="asked", array_like=True):
    number: int
    verb: str
    item: msgspec.Raw
    at: float


class _Told(msgspec.Struct, tag="told", array_like=True):
    number: int
    answer: msgspec.Raw
    """Empty when there was none: the sender gave up."""
    at: float


_encode = msgspec.msgpack.Encoder().encode
_line = msgspec.msgpack.Decoder(_Asked | _Told).decode
_ITEMS: dict[str, Any] = {"claim": Ask, "settle": Settle, "renew": Renewal, "note": Note, "peek": Look}
_ANSWERS: dict[str, Any] = dict.fromkeys(_ITEMS, Answer) | {
    "claim": Verdict,
    "peek": tuple[Record | None, float],
}


class Log:
    """An append-only file of one process; threads of it may share it."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        self._numbers = itertools.count()

    def asked(self, verb: str, item: Any) -> int:
        number = next(self._numbers)
        self._write(_Asked(number, verb, msgspec.Raw(_encode(item)), time.time()))
        return number

    def told(self, number: int, answer: Any) -> None:
        unheard = isinstance(answer, Exception)
        self._write(_Told(number, msgspec.Raw(_encode(None if unheard else answer)), time.time()))

    def _write(self, line: _Asked | _Told) -> None:
        data = _encode(line)
        os.write(self._handle, _SIZE.pack(len(data)) + data)

    def close(self) -> None:
        os.close(self._handle)


class Recorded(Layer):
    """A store whose claims, settles, renewals, notes and peeks are written down."""

    def __init__(self, inner: Store, log: Log) -> None:
        super().__init__(inner)
        self._log = log

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        return await self._each("claim", asks, self.inner.claim)

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await self._each("settle", ends, self.inner.settle)

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        return await self._each("renew", renewals, self.inner.renew)

    async def note(self, note: Note) -> Answer:
        async def one(notes: Sequence[Note]) -> list[Any]:
            return [await self.inner.note(notes[0])]

        return (await self._each("note", (note,), one))[0]  # type: ignore[no-any-return]  # answers of every verb come through one place

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        async def one(looks: Sequence[Look]) -> list[Any]:
            return [await self.inner.peek(looks[0].scope)]

        return (await self._each("peek", (Look(scope),), one))[0]  # type: ignore[no-any-return]  # answers of every verb come through one place

    async def _each(
        self, verb: str, items: Sequence[Any], send: Callable[[Sequence[Any]], Awaitable[list[Any]]]
    ) -> list[Any]:
        numbers = [self._log.asked(verb, item) for item in items]
        try:
            answers = await send(items)
        except Exception as error:
            for number in numbers:
                self._log.told(number, error)
            raise
        for number, answer in zip(numbers, answers, strict=True):
            self._log.told(number, answer)
        return answers


def clock_offset() -> float:
    """By how much the wall clock is ahead of one that nobody sets. Of many readings the one that was interrupted least."""

    def reading() -> tuple[float, float]:
        before = time.monotonic()
        wall = time.time()
        took = time.monotonic() - before
        return took, wall - before - took / 2

    return min(reading() for _ in range(100))[1]


def read_logs(paths: Iterable[Path], *, broken_at: Sequence[float] = ()) -> list[Call]:
    """Every call of these logs. `broken_at`: when connections broke; adapters send again what was under way then."""
    calls = [call for path in paths for call in _calls(path)]
    for call in calls:
        call.resent = any(call.invoked - _NEAR <= at <= call.done + _NEAR for at in broken_at)
    return calls


def _calls(path: Path) -> list[Call]:
    calls: dict[int, Call] = {}
    for raw in _lines(path.read_bytes()):
        line = _line(raw)
        if isinstance(line, _Asked):
            item = msgspec.msgpack.decode(line.item, type=_ITEMS[line.verb])
            calls[line.number] = Call(line.verb, item, line.at)
            continue
        call = calls[line.number]
        answer = msgspec.msgpack.decode(line.answer, type=_ANSWERS[call.verb] | None)
        if answer is None:
            continue
        call.returned(line.at, answer)
        # These answers say by themselves when the store decided.
        if isinstance(answer, Won):
            call.applied.append(answer.record.updated)
        elif call.verb == "peek":
            call.applied.append(answer[1])
    return list(calls.values())


def _lines(data: bytes) -> Iterator[bytes]:
    """Whole lines; a process that was killed may have left half of one."""
    at = 0
    while at + _SIZE.size <= len(data):
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        if at + size > len(data):
            return
        yield data[at : at + size]
        at += size
