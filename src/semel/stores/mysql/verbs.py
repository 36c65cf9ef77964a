"""Claim, settle, renew and note for distinct scopes in scope order: quick where a statement can decide, else by the model.

A batch is tried as one statement. When that fails (somebody was faster, a row is locked, one value is bad) its items
are tried one by one, so that each fails or succeeds alone.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from semel import model
from semel.errors import CodecError, OutcomeUnknown, StoreUnavailable
from semel.model import Answer, Ask, Busy, Kind, Note, Policy, Record, Renewal, Settle, Unknown, Verdict
from semel.stores.mysql.errors import Duplicate, Locked
from semel.stores.mysql.rows import Found, placeholder, renew_values, row_of, settle_values
from semel.stores.mysql.table import Table, Witness

__all__ = ["LOCK_WAIT", "Patience", "claim", "note", "renew", "settle", "unreadable"]

LOCK_WAIT: Final = 0.05
_PACKET: Final = 4 << 20  # bytes of outcomes that travel together at most
Tried = bool | Exception


def unreadable(nonce: bytes) -> OutcomeUnknown:
    return OutcomeUnknown(
        "the stored record cannot be read (damaged, or written by something else): look up what happened, then "
        "`resolve` or `forget` the key",
        unreadable=True,
        nonce=nonce,
    )


class Patience:
    """How long to ask again for rows that somebody else has locked: short pauses that double, then no more."""

    def __init__(self, pause: Callable[[float], Awaitable[None]], limit: float) -> None:
        self._pause = pause
        self._limit = limit
        self._until: float | None = None
        self._step = 0.001

    async def ended(self) -> bool:
        """Pause; True when the time is over. It runs from the first locked row on."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._limit
        if now >= self._until:
            return True
        await self._pause(min(self._step, self._until - now))
        self._step = min(2 * self._step, 0.016)
        return False


async def _tried(write: Awaitable[bool]) -> Tried:
    """Whether a write held, or why it was refused."""
    try:
        return await write
    except (Locked, Duplicate, CodecError) as error:
        return error


# ------------------------------------------------------------------------------------------------- claim


class _Claims:
    """The claims of one batch that are still open."""

    def __init__(self, table: Table, asks: Sequence[Ask]) -> None:
        self.table = table
        self.asks = asks
        self.answers: dict[int, Verdict | Exception] = {}
        self.locked: set[int] = set()
        self._alone = False

    async def round(self, still: Sequence[int]) -> None:
        """Read, decide and write once; what somebody else changed in between stays open."""
        now, found = await self.table.read([self.asks[at].scope.hash for at in still])
        self.locked.clear()
        fresh: dict[int, tuple[Verdict, list[Any]]] = {}
        for at in still:
            ask = self.asks[at]
            row = found.get(ask.scope.hash)
            if row is not None and row.record is None:
                self.answers[at] = Unknown(None, Policy.HOLD, unreadable=True)
                continue
            verdict, changed = model.claim(None if row is None else row.record, ask, now)
            if changed is None:
                self.answers[at] = verdict
            elif row is not None:
                self._take(at, verdict, await _tried(self.table.replace(row, changed)))
            else:
                self._prepare(fresh, at, verdict, changed)
        await self._insert(fresh)

    def _prepare(
        self, fresh: dict[int, tuple[Verdict, list[Any]]], at: int, verdict: Verdict, record: Record
    ) -> None:
        try:
            fresh[at] = verdict, row_of(record)
        except CodecError as error:
            self.answers[at] = error

    async def _insert(self, fresh: dict[int, tuple[Verdict, list[Any]]]) -> None:
        if len(fresh) > 1 and not self._alone:
            if await _tried(self.table.insert([row for _, row in fresh.values()])) is True:
                self.answers.update({at: verdict for at, (verdict, _) in fresh.items()})
                return
            self._alone = True
        for at, (verdict, row) in fresh.items():
            self._take(at, verdict, await _tried(self.table.insert([row])))

    def _take(self, at: int, verdict: Verdict, tried: Tried) -> None:
        if tried is True:
            self.answers[at] = verdict
        elif isinstance(tried, CodecError):
            self.answers[at] = tried
        elif isinstance(tried, Locked):
            self.locked.add(at)


async def claim(table: Table, asks: Sequence[Ask], patience: Patience) -> list[Verdict | Exception]:
    claims = _Claims(table, asks)
    still: Sequence[int] = range(len(asks))
    while still:
        await claims.round(still)
        if claims.locked and await patience.ended():
            claims.answers.update(dict.fromkeys(claims.locked, Busy(LOCK_WAIT, 0)))
        still = [at for at in still if at not in claims.answers]
    return [claims.answers[at] for at in range(len(asks))]


# --------------------------------------------------------------------------------- settle, renew, note


async def settle(table: Table, ends: Sequence[Settle], patience: Patience) -> list[Answer | Exception]:
    answers: dict[int, Answer | Exception] = {}
    quick: dict[int, dict[str, Any]] = {}
    for at, end in enumerate(ends):
        try:
            values = settle_values(end)
        except CodecError as error:
            answers[at] = error
            continue
        if values is not None:
            quick[at] = values
    for chunk in _chunks(quick, table.session.limit):
        held = await _changed(table, [quick[at] for at in chunk])
        answers.update({at: Answer.OK for at, done in zip(chunk, held, strict=True) if done})

    async def decide(at: int, row: Found | None, now: float) -> Tried | Answer:
        return await _settle_one(table, ends[at], row, now)

    scopes = [end.scope.hash for end in ends]
    await _slowly(table, scopes, answers, decide, patience)
    return [answers[at] for at in range(len(ends))]


def _chunks(quick: dict[int, dict[str, Any]], limit: int) -> list[list[int]]:
    """Positions that fit into one packet together. Bytes are sent as hexadecimal digits: two for each."""
    chunks: list[list[int]] = []
    room = 0
    for at, values in quick.items():
        size = 2048 + 4 * sum(len(value) for value in values.values() if isinstance(value, str | bytes))
        if not chunks or size > room:
            chunks.append([])
            room = min(limit, _PACKET)
        chunks[-1].append(at)
        room -= size
    return chunks


async def _changed(table: Table, values: list[dict[str, Any]]) -> list[bool]:
    """Which of these settles held; none when the packet was refused as a whole."""
    try:
        return await table.change("settle", values)
    except (Locked, CodecError):
        return [False] * len(values)


async def _settle_one(table: Table, end: Settle, row: Found | None, now: float) -> Tried | Answer:
    record = None if row is None else row.record
    if row is not None and record is None:
        record = placeholder(row, now)
    answer, changed = model.settle(record, end, now)
    witness = None
    if end.actor and model.view(record, now) is not None:
        witness = Witness(end.scope, model.event_of(record, end, now), now + end.retention)
    if row is not None and changed is not None:
        tried = await _tried(table.replace(row, changed, witness))
    elif row is not None and end.kind is Kind.FORGOTTEN and answer is Answer.OK:
        tried = await _tried(table.delete(row, witness))
    else:
        return answer
    return answer if tried is True else tried


async def renew(table: Table, renewals: Sequence[Renewal], patience: Patience) -> list[Answer | Exception]:
    answers: dict[int, Answer | Exception] = {}
    values = [renew_values(renewal) for renewal in renewals]
    if await _tried(_renewed(table, values)) is True:
        return [Answer.OK] * len(renewals)

    async def decide(at: int, row: Found | None, now: float) -> Tried | Answer:
        if row is not None and row.record is None:
            return unreadable(row.nonce)
        answer, changed = model.renew(None if row is None else row.record, renewals[at], now)
        return await _written(table, row, answer, changed)

    await _slowly(table, [renewal.scope.hash for renewal in renewals], answers, decide, patience)
    return [answers[at] for at in range(len(renewals))]


async def note(table: Table, entry: Note, patience: Patience) -> Answer | Exception:
    values = {"scope": entry.scope.hash, "nonce": entry.nonce, "entry": entry.entry}
    if await _tried(_noted(table, values)) is True:
        return Answer.OK
    answers: dict[int, Answer | Exception] = {}

    async def decide(_: int, row: Found | None, now: float) -> Tried | Answer:
        if row is not None and row.record is None:
            return unreadable(row.nonce)
        answer, changed = model.note(None if row is None else row.record, entry, now)
        return await _written(table, row, answer, changed)

    await _slowly(table, [entry.scope.hash], answers, decide, patience)
    return answers[0]


async def _renewed(table: Table, values: list[dict[str, Any]]) -> bool:
    return await table.join("renew", values) == len(values)


async def _noted(table: Table, values: dict[str, Any]) -> bool:
    return (await table.change("note", [values]))[0]


async def _written(table: Table, row: Found | None, answer: Answer, changed: Record | None) -> Tried | Answer:
    if row is None or changed is None:
        return answer
    tried = await _tried(table.replace(row, changed))
    return answer if tried is True else tried


async def _slowly(
    table: Table,
    scopes: Sequence[bytes],
    answers: dict[int, Answer | Exception],
    decide: Callable[[int, Found | None, float], Awaitable[Tried | Answer]],
    patience: Patience,
) -> None:
    """Read and decide whatever has no answer yet, until each has one."""
    while still := _open(answers, len(scopes)):
        now, found = await table.read([scopes[at] for at in still])
        locked: list[int] = []
        for at in still:
            tried = await decide(at, found.get(scopes[at]), now)
            if isinstance(tried, Answer | CodecError | OutcomeUnknown):
                answers[at] = tried
            elif isinstance(tried, Locked):
                locked.append(at)
        if locked and await patience.ended():
            error = StoreUnavailable(
                "another transaction keeps the key's row locked: end it, or try again later"
            )
            answers.update(dict.fromkeys(locked, error))


def _open(answers: dict[int, Answer | Exception], count: int) -> Sequence[int]:
    return [at for at in range(count) if at not in answers]
