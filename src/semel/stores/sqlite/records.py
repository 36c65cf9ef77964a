"""What the verbs do on an SQLite connection that the caller holds: a reader's, the writer's, or a user's own.

Every write here expects a transaction that began with BEGIN IMMEDIATE: nobody else can change a row between the
look at it and the write, so the decision is `model`'s and needs no retry. Nothing here begins, commits or waits.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from math import inf, isinf
from operator import itemgetter
from typing import Any, Final

import msgspec

from semel import model
from semel.errors import OutcomeUnknown
from semel.keys import Scope, mask
from semel.model import (
    Answer,
    Ask,
    Event,
    Kind,
    Note,
    Policy,
    Record,
    Renewal,
    Settle,
    State,
    Verdict,
)
from semel.store import Page, Query
from semel.stores.rows import COLUMNS
from semel.stores.sqlite.bulk import Bulk, Plain, parts
from semel.stores.sqlite.cells import (
    Unreadable,
    exact,
    is_bad_text,
    lenient_text,
    shown,
    to_cells,
    to_fresh_cells,
    to_record,
    told,
    try_record,
)
from semel.stores.sqlite.conditions import BODIES, ENDED, LAPSED, condition

__all__ = ["Records"]

_FIXED: Final = 4  # scope, tenant, operation, key: never change once a row is there
_PURGE_CHUNK: Final = 500
_UNREADABLE: Final = model.Unknown(None, Policy.HOLD, unreadable=True)

_BODY: Final = (
    "result",
    "error_type",
    "error_code",
    "error_message",
    "steps",
    "ref",
    "labels",
    "marker",
)  # model.bury
# `model.settle` restated for the one case that matters for speed: the owner of a run that is there says that it is done.
# Whatever else it may be changes no row here and goes to the model; the equivalence test compares them.
_SELDOM: Final = (
    ", policy = coalesce(:policy, policy), ref = coalesce(:ref, ref), marker = :marker, "
    "steps = coalesce(:steps, steps)"
)
_DONE: Final = (
    "state = 'done', updated = :now, settled = :now, lease_until = :now, expires = :expires, tombstone = :tombstone, "
    f"not_before = NULL, result = :result, error_type = NULL, error_code = NULL, error_message = NULL{_SELDOM} "
    "WHERE scope = :scope AND nonce = :nonce AND state = 'running' "
    "AND (policy <> 'retry' OR expires IS NULL OR expires > :now)"
)


class Records:
    """One table's statements. `skew` is added to the process's clock, so that tests can move time."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.skew = 0.0
        columns, binds = ", ".join(COLUMNS), ", ".join("?" * len(COLUMNS))
        changes = ", ".join(f"{name} = ?" for name in COLUMNS[_FIXED:])
        self._select = f'SELECT {columns} FROM "{table}" WHERE scope = ?'
        self._add = f'INSERT INTO "{table}" ({columns}) VALUES ({binds}) ON CONFLICT (scope) DO NOTHING'
        self._update = f'UPDATE "{table}" SET {changes} WHERE scope = ?'
        self._finish = f'UPDATE "{table}" SET {_DONE}'
        self._delete = f'DELETE FROM "{table}" WHERE scope = ?'
        self._bulk = Bulk(table, COLUMNS, _DONE, _DONE.replace(_SELDOM, ", marker = NULL"))
        self._done_row = itemgetter(*self._bulk.done.names)

    def _now(self) -> float:
        return time.time() + self.skew

    # ------------------------------------------------------------------------------------------ reads
    def find(self, db: sqlite3.Connection, scope: Scope) -> Record | None:
        row = self._row_of(db, scope)
        return None if row is None else to_record(row)

    def _row_of(self, db: sqlite3.Connection, scope: Scope) -> Sequence[Any] | None:
        try:
            rows = db.execute(self._select, (scope.hash,)).fetchall()
        except sqlite3.OperationalError as error:
            if not is_bad_text(error):
                raise
            raise Unreadable from error
        return rows[0] if rows else None

    def peek(self, db: sqlite3.Connection, scope: Scope) -> tuple[Record | None, float]:
        try:
            return self.find(db, scope), self._now()
        except Unreadable as error:
            raise _unreadable(scope) from error.__cause__

    def look(self, db: sqlite3.Connection, ask: Ask) -> Verdict | None:
        """The verdict of a claim that changes nothing, such as a replay; None when it takes a write."""
        try:
            return self._seen(self._row_of(db, ask.scope), ask)
        except Unreadable:
            return _UNREADABLE

    def look_all(self, db: sqlite3.Connection, asks: Sequence[Ask]) -> list[Verdict | None]:
        """The same for several; what follows an undecided one on its key is undecided, too."""
        if len(asks) == 1:
            return [self.look(db, asks[0])]
        found = self._rows_of(db, asks)
        if found is not None and not found:
            return [None] * len(asks)
        verdicts: list[Verdict | None] = []
        undecided: set[bytes] = set()
        for ask in asks:
            key, verdict = ask.scope.hash, None
            if key not in undecided:
                verdict = self.look(db, ask) if found is None else self._seen(found.get(key), ask)
            if verdict is None:
                undecided.add(key)
            verdicts.append(verdict)
        return verdicts

    def _rows_of(self, db: sqlite3.Connection, asks: Sequence[Ask]) -> dict[bytes, Sequence[Any]] | None:
        """By scope; None when a damaged one among them keeps SQLite from reading any."""
        found: dict[bytes, Sequence[Any]] = {}
        try:
            for part in parts(asks):
                found.update((row[0], row) for row in self._bulk.find(db, [ask.scope.hash for ask in part]))
        except sqlite3.OperationalError as error:
            if not is_bad_text(error):
                raise
            return None
        return found

    def _seen(self, row: Sequence[Any] | None, ask: Ask) -> Verdict | None:
        if row is None:
            return None
        try:
            verdict, changed = model.claim(to_record(row), ask, self._now())
        except Unreadable:
            return _UNREADABLE
        return verdict if changed is None else None

    def scan(self, db: sqlite3.Connection, query: Query) -> Page:
        now = self._now()
        if query.history is not None:
            return Page(events=self._history(db, query.history, now), now=now)
        where, values = condition(query, now)
        sql = f'SELECT id, {", ".join(COLUMNS)} FROM "{self.table}" WHERE {where}'
        found: list[Record] = []
        cursor = ""
        db.text_factory = lenient_text
        try:
            for number, *row in db.execute(sql, values):
                if len(found) == query.limit:
                    return Page(found, cursor=cursor, now=now)
                cursor = str(number)
                record = try_record(row)
                if record is not None and model.view(record, now) is not None:
                    found.append(record)
        finally:
            db.text_factory = str
        return Page(found, now=now)

    def _history(self, db: sqlite3.Connection, scope: Scope, now: float) -> tuple[Event, ...]:
        rows = db.execute(
            f'SELECT at, kind, state, actor, reason, attempt FROM "{self.table}_audit" '
            "WHERE scope = ? AND (kept_until IS NULL OR kept_until > ?) ORDER BY id",
            (scope.hash, now),
        ).fetchall()
        return tuple(
            Event(at, Kind(kind), None if state is None else State(state), actor, reason, attempt)
            for at, kind, state, actor, reason, attempt in rows
        )

    # ----------------------------------------------------------------------------------------- writes
    def claim(self, db: sqlite3.Connection, ask: Ask) -> Verdict:
        now = self._now()
        # Insert first: what comes here was looked at before, and is nearly always a key that nobody has used.
        verdict, changed = model.claim(None, ask, now)
        if changed is not None and self._insert(db, changed):
            return verdict
        try:
            record = self.find(db, ask.scope)
        except Unreadable:
            return _UNREADABLE
        verdict, changed = model.claim(record, ask, now)
        if changed is not None:
            self._write(db, changed)
        return verdict

    def claim_all(self, db: sqlite3.Connection, asks: Sequence[Ask]) -> list[Verdict | None]:
        """Several by one statement; None for each one that `claim` must decide."""
        now = self._now()
        won = [model.claim(None, ask, now) for ask in asks]
        if self._bulk.add(db, now, [to_fresh_cells(record) for _, record in won if record is not None]):
            return [verdict for verdict, _ in won]
        return [None] * len(asks)

    def settle(self, db: sqlite3.Connection, end: Settle) -> Answer:
        if not end.actor:
            return Answer.OK if self._finished(db, end) else self._settle(db, end)
        # Record and audit line are two statements: both or none, whatever becomes of the others in this commit.
        db.execute("SAVEPOINT semel_settle")
        try:
            answer = self._settle(db, end)
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK TO semel_settle")
                db.execute("RELEASE semel_settle")
            raise
        db.execute("RELEASE semel_settle")
        return answer

    def settle_all(self, db: sqlite3.Connection, ends: Sequence[Settle]) -> list[Answer | None]:
        """Several by one statement; None for each one that `settle` must decide."""
        now = self._now()
        quick = [end for end in ends if not end.actor and _is_plain(end) and end.retention > 1.0]
        distinct = len({end.scope.hash for end in ends}) == len(ends)  # or their order would matter
        if not (distinct and quick and self._finished_all(db, quick, now, len(ends))):
            return [None] * len(ends)
        if len(quick) == len(ends):
            return [Answer.OK] * len(ends)
        done = {end.scope.hash for end in quick}
        return [Answer.OK if end.scope.hash in done else None for end in ends]

    def _finished_all(self, db: sqlite3.Connection, ends: Sequence[Settle], now: float, size: int) -> bool:
        if any(end.ref is not None or end.marker or end.policy or end.steps is not None for end in ends):
            rows = [self._done_row(self._values(end, now)) for end in ends]
            return self._bulk.done.run(db, now, rows, size)
        # Nearly always: what is left of a row is what `plain` asks for.
        plain: list[Plain] = [
            (
                expires := _end_of(now, end.retention),
                _tombstone(expires, end),
                end.result or None,
                end.scope.hash,
                end.nonce,
            )
            for end in ends
        ]
        return self._bulk.finish(db, now, plain, size)

    def _finished(self, db: sqlite3.Connection, end: Settle) -> bool:
        if not _is_plain(end):
            return False
        return db.execute(self._finish, self._values(end, self._now())).rowcount == 1

    @staticmethod
    def _values(end: Settle, now: float) -> dict[str, Any]:
        expires = _end_of(now, end.retention)
        return {
            "now": now,
            "expires": expires,
            "tombstone": _tombstone(expires, end),
            "policy": None if end.policy is None else end.policy.value,
            "marker": end.marker or None,
            "result": end.result or None,
            "ref": exact(end.ref),
            "steps": end.steps,
            "scope": end.scope.hash,
            "nonce": end.nonce,
        }

    def _settle(self, db: sqlite3.Connection, end: Settle) -> Answer:
        now, damaged = self._now(), False
        if end.error is not None:
            end = msgspec.structs.replace(end, error=told(end.error))
        try:
            record = self.find(db, end.scope)
        except Unreadable as error:
            record, damaged = _stand_in(end, now, error), True
        answer, changed = model.settle(record, end, now)
        forgotten = end.kind is Kind.FORGOTTEN and answer is Answer.OK
        if forgotten or (damaged and changed is not None):
            db.execute(self._delete, (end.scope.hash,))
        if damaged and changed is not None:
            self._insert(db, changed)
        elif changed is not None:
            self._write(db, changed)
        if end.actor and (changed is not None or (forgotten and model.view(record, now) is not None)):
            self._log(db, end, model.event_of(record, end, now))
        return answer

    def renew(self, db: sqlite3.Connection, renewal: Renewal) -> Answer:
        answer, changed = model.renew(self._owned(db, renewal.scope), renewal, self._now())
        if changed is not None:
            self._write(db, changed)
        return answer

    def note(self, db: sqlite3.Connection, note: Note) -> Answer:
        answer, changed = model.note(self._owned(db, note.scope), note, self._now())
        if changed is not None:
            self._write(db, changed)
        return answer

    def purge(self, db: sqlite3.Connection, limit: int) -> tuple[int, bool]:
        """Drop up to `limit` expired records, and the bodies over tombstones; how many records, and is there more?

        At most 500 of each at a time, so that the write lock is soon free again.
        """
        now, limit = self._now(), min(limit, _PURGE_CHUNK)
        dead = self._past(db, ENDED, None, now, limit)
        dead += self._past(db, LAPSED, None, now, limit - len(dead))
        buried = self._past(db, BODIES, State.EXPIRED, now, _PURGE_CHUNK)
        db.executemany(f'DELETE FROM "{self.table}" WHERE id = ?', dead)
        db.executemany(
            f'UPDATE "{self.table}" SET expires = 0, {", ".join(f"{name} = NULL" for name in _BODY)} WHERE id = ?',
            buried,
        )
        trails = db.execute(
            f'DELETE FROM "{self.table}_audit" WHERE id IN (SELECT id FROM "{self.table}_audit" '
            "WHERE kept_until IS NOT NULL AND kept_until <= ? LIMIT ?)",
            (now, _PURGE_CHUNK),
        ).rowcount
        return len(dead), len(dead) == limit or _PURGE_CHUNK in {len(buried), trails}

    def _past(
        self, db: sqlite3.Connection, where: str, seen: State | None, now: float, limit: int
    ) -> list[tuple[int]]:
        """The ids of up to `limit` rows that read as `seen`.

        A row that cannot be read is never touched by time: it may be a run whose outcome is not known (R15).
        """
        light = ", ".join("NULL" if name in {"result", "steps"} else name for name in COLUMNS)
        found: list[tuple[int]] = []
        db.text_factory = lenient_text
        try:
            for number, *row in db.execute(
                f'SELECT id, {light} FROM "{self.table}" WHERE {where}', {"now": now}
            ):
                if len(found) == limit:
                    break
                record = try_record(row)
                if record is not None and model.view(record, now) is seen:
                    found.append((number,))
        finally:
            db.text_factory = str
        return found

    def _owned(self, db: sqlite3.Connection, scope: Scope) -> Record | None:
        try:
            return self.find(db, scope)
        except Unreadable as error:
            raise _unreadable(scope) from error.__cause__

    def _insert(self, db: sqlite3.Connection, record: Record) -> bool:
        return db.execute(self._add, to_cells(record)).rowcount == 1

    def _write(self, db: sqlite3.Connection, record: Record) -> None:
        row = to_cells(record)
        db.execute(self._update, (*row[_FIXED:], row[0]))

    def _log(self, db: sqlite3.Connection, end: Settle, event: Event) -> None:
        kept_until = None if isinf(end.retention) else event.at + end.retention
        state = None if event.state is None else event.state.value
        actor, reason = shown(event.actor), shown(event.reason)
        line = (
            end.scope.hash,
            event.at,
            event.kind.value,
            state,
            actor,
            reason,
            event.attempt,
            kept_until,
        )
        db.execute(
            f'INSERT INTO "{self.table}_audit" (scope, at, kind, state, actor, reason, attempt, kept_until) '
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            line,
        )
        # A trail is kept or dropped whole: its older lines live as long as the youngest of them.
        db.execute(
            f'UPDATE "{self.table}_audit" SET kept_until = (SELECT CASE WHEN count(*) = count(kept_until) '
            f'THEN max(kept_until) END FROM "{self.table}_audit" WHERE scope = ?) WHERE scope = ?',
            (end.scope.hash, end.scope.hash),
        )


def _end_of(now: float, retention: float) -> float | None:
    return None if retention == inf else now + retention


def _tombstone(expires: float | None, end: Settle) -> float | None:
    return expires + end.tombstone if end.tombstone and expires is not None else None


def _is_plain(end: Settle) -> bool:
    """The owner says that it is done, and nothing else."""
    return end.kind is Kind.DONE and not end.new_nonce and not end.after and end.error is None


def _stand_in(end: Settle, now: float, damage: Unreadable) -> Record:
    """A person's word repairs a damaged row; nobody else's may, since the fence cannot be read (R15)."""
    if end.kind is not Kind.FORGOTTEN and not (end.repair or end.new_nonce):
        raise _unreadable(end.scope) from damage.__cause__
    return Record(State.UNKNOWN, end.nonce, 0, 0, now, now, now, inf, Policy.HOLD, scope=end.scope)


def _unreadable(scope: Scope) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the record of key {mask(scope.key)!r} (operation {scope.operation!r}, scope {scope.hash.hex()}) cannot be read: "
        "it is damaged, or a newer version wrote it; find out what happened, then call resolve(key, …) or forget(key)",
        unreadable=True,
    )
