"""Records in PostgreSQL: one body for both colours and both drivers.

Every verb is one statement, in a transaction of its own (`sql/postgres.sql` has them, with the rules they keep). A
claim reads first, so a replay writes nothing; the common claim and settle are decided by the statement's conditions.
Everything else is decided by `model` in Python on a row that was read, and written by `swap` only if the row is still
the version that was read. A row lock held between reading and writing (SELECT … FOR UPDATE) was rejected: a client
that is paused in between would block the key for everybody, and it costs three more round trips.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal

from semel import model
from semel.errors import CodecError, ConfigurationError, OutcomeUnknown, SemelError
from semel.keys import Scope
from semel.model import (
    Answer,
    Ask,
    Busy,
    Event,
    Kind,
    Note,
    Policy,
    Record,
    Renewal,
    Settle,
    State,
    Unknown,
    Verdict,
)  # fmt: skip
from semel.store import Capabilities, Facts, Page, Query, Settings, Unwatch
from semel.stores.postgres.errors import Locked, Lost, ReadOnly, Trouble
from semel.stores.postgres.facts import facts_of
from semel.stores.postgres.hunch import Hunch
from semel.stores.postgres.link import Row, Source
from semel.stores.postgres.poster import PostgresPoster
from semel.stores.postgres.sql import (
    WIDTH,
    Change,
    change_args,
    claim_words,
    claims_words,
    columns,
    is_plain,
    new_words,
    news_words,
    record_of,
    renewal_args,
    settle_words,
    settles_words,
    span,
)  # fmt: skip
from semel.stores.postgres.talk import Talk
from semel.stores.postgres.turns import in_turns, settled
from semel.stores.queries import page_start, states_of

__all__ = ["PostgresStore"]

_BULK: Final = 1 << 16  # a result this large travels alone: nothing small waits behind it
_PURGE: Final = 1000  # rows a purge statement removes at most
_NOTHING: Final[Row] = (0.0, None, None, None)  # neither inserted nor there: somebody was faster
_OUTCOMES: Final = frozenset({State.DONE, State.EXPIRED})


class PostgresStore:
    """See `Store`. `_skew` shifts the store's clock, in seconds: for tests that let time pass."""

    LOCKED: Final = Busy(0.05, 0)

    def __init__(self, source: Source, settings: Settings, *, pool: int = 10, listens: bool = True) -> None:
        if settings.acks:
            raise ConfigurationError(
                "acks is for Redis: on PostgreSQL set synchronous_standby_names and synchronous_commit on the server"
            )
        self._talk = Talk(source, settings, size=pool, listens=listens)
        self._where = source.where
        self._skew = 0.0
        self._hunch = Hunch()
        self.losses = self._talk.losses

    @property
    def colour(self) -> Literal["sync", "async"]:
        return self._talk.source.colour

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            durable=True,
            shared=True,
            notifies=self._talk.listens,
            joins_transactions=True,
            batches=True,
            server_clock=True,
        )

    async def _run(self, name: str, deadline: float, *args: Any) -> Sequence[Row]:
        return await self._talk.run(name, (self._skew, *args), deadline)

    # ------------------------------------------------------------------------------------------------ claim
    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        deadline = self._talk.deadline()
        if len(asks) == 1:
            # One key, one statement, as few steps as can be; what that does not decide is decided below.
            ask = asks[0]
            try:
                row = await self._first_row(ask, deadline)
                verdict = model.claim(None, ask, row[0])[0] if row[1] else self.judged(row, ask)
            except Locked:
                return [self.LOCKED]
            except (Trouble, CodecError, ValueError):
                verdict = None
            if verdict is not None:
                return [verdict]
        return await in_turns(asks, self._claim, deadline, self._where)

    async def _first_row(self, ask: Ask, deadline: float) -> Row:
        """Of claim_one, or of claim_new where that is enough."""
        words = new_words(ask, self._skew) if self._hunch.new else None
        if words is not None and (rows := await self._hunch.follow(self._talk.run(*words, deadline))):
            return rows[0]
        row = (await self._talk.run(*claim_words(ask, self._skew), deadline))[0]
        self._hunch.learn(new=bool(row[1]))
        return row

    def judged(self, row: Row, ask: Ask) -> Verdict | None:
        """The verdict by a row of claim_one that was there, where nothing is to be written; None: not decided."""
        if row[2] is None:
            return None
        verdict, changed = _judge(row, ask, row[0])
        return verdict if changed is None and (row[3] or ask.scope.hash not in self._talk.watchers) else None

    async def claim_late(self, ask: Ask, deadline: float) -> list[Verdict | Exception]:
        """What a first try (see `poster`) did not decide."""
        return await in_turns((ask,), self._claim, deadline, self._where)

    def poster(self) -> PostgresPoster | None:
        """The quick way, for the flow of one event loop."""
        return PostgresPoster(self) if self.colour == "async" else None

    async def _claim(self, asks: list[Ask], deadline: float) -> list[Verdict | Exception]:
        """Each scope once, in order."""
        verdicts: list[Verdict | Exception] = [self.LOCKED] * len(asks)
        todo = list(range(len(asks)))
        while todo:
            try:
                rows = await self._read_or_insert([asks[at] for at in todo], deadline)
                lost = await self._decide_claims(asks, todo, rows, verdicts, deadline)
            except Locked:
                if len(asks) > 1:
                    raise
                return verdicts
            except ReadOnly as error:
                if len(asks) == 1:
                    raise
                self.losses.tell()  # as below
                await self._look(asks, todo, verdicts, error, deadline)
                return verdicts
            except (SemelError, Trouble):
                if len(asks) > 1:
                    self.losses.tell()  # of those that a statement before has granted
                raise
            if _is_over(deadline):
                for at in lost:
                    verdicts[at] = self.LOCKED
                return verdicts
            todo = lost
        return verdicts

    async def _read_or_insert(self, asks: list[Ask], deadline: float) -> Sequence[Row]:
        if len(asks) == 1:
            return await self._talk.run(*claim_words(asks[0], self._skew), deadline)
        found = await self._inserted(asks, deadline)
        if rest := [ask for ask in asks if ask.scope.hash not in found]:
            rows = await self._talk.run(*claims_words(rest, self._skew), deadline)
            found |= _found(rows)
            self._hunch.learn(new=len(rest) if all(row[4] is None for row in rows) else 0)
        return [found.get(ask.scope.hash, _NOTHING) for ask in asks]

    async def _inserted(self, asks: list[Ask], deadline: float) -> dict[bytes, Row]:
        """Those that claim_new_many inserted, where the keys are most likely new."""
        if self._hunch.new and (words := news_words(asks, self._skew)) is not None:
            found = _found(await self._hunch.follow(self._talk.run(*words, deadline)))
            if len(found) == len(asks):
                self._hunch.learn(new=len(found))
            return found
        return {}

    async def _look(
        self,
        asks: list[Ask],
        todo: list[int],
        verdicts: list[Verdict | Exception],
        refusal: ReadOnly,
        deadline: float,
    ) -> None:
        """Nothing can be written: outcomes are read all the same, and whoever needs more is told why."""
        rows = await self._talk.run(*claims_words([asks[at] for at in todo], self._skew, look=True), deadline)
        found = _found(rows)
        for at in todo:
            row = found.get(asks[at].scope.hash)
            verdict, changed = (None, None) if row is None else _judge(row, asks[at], row[0])
            verdicts[at] = refusal if verdict is None or changed is not None else verdict

    async def _decide_claims(
        self,
        asks: list[Ask],
        todo: list[int],
        rows: Sequence[Row],
        verdicts: list[Verdict | Exception],
        deadline: float,
    ) -> list[int]:
        """Fill in the verdicts; returns the places where somebody was faster, to be asked again."""
        lost: list[int] = []
        changes: dict[int, Change] = {}
        for at, row in zip(todo, rows, strict=True):
            ask, (now, inserted, version, waited) = asks[at], row[:4]
            if inserted:
                verdicts[at] = model.claim(None, ask, now)[0]
            elif version is None:
                lost.append(at)
            else:
                verdicts[at], changed = _judge(row, ask, now)
                if changed is not None:
                    changes[at] = Change(changed, version)
                elif not waited and ask.scope.hash in self._talk.watchers and isinstance(verdicts[at], Busy):
                    await self._mark(ask.scope, deadline)  # a new row since the waiter marked the old one
        if changes:
            for at, written in zip(changes, await self._swap(list(changes.values()), deadline), strict=True):
                if written is None:
                    verdicts[at] = self.LOCKED
                elif not written:
                    lost.append(at)
        return sorted(lost)

    # ----------------------------------------------------------------------------------------------- settle
    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        deadline = self._talk.deadline()
        try:
            if len(ends) == 1:
                try:
                    words = settle_words(ends[0], self._skew)
                    if words is not None and await self._talk.run(*words, deadline):
                        return [Answer.OK]
                except (Trouble, CodecError, ValueError):
                    pass
            return await in_turns(ends, self._settle, deadline, self._where, alone=_is_bulky)
        finally:
            for end in ends:
                self._talk.watchers.wake(end.scope.hash)

    async def settle_late(self, end: Settle, deadline: float) -> list[Answer | Exception]:
        """As `claim_late`."""
        return await in_turns((end,), self._settle, deadline, self._where)

    async def _settle(self, ends: list[Settle], deadline: float) -> list[Answer | Exception]:
        done = await self._settle_plainly(ends, deadline)
        return [
            Answer.OK if at in done else await self._alone(self._settle_by_model(end, deadline))
            for at, end in enumerate(ends)
        ]

    async def _settle_plainly(self, ends: list[Settle], deadline: float) -> set[int]:
        """The common case by the statement's conditions; returns the places where they held."""
        plain = [at for at, end in enumerate(ends) if is_plain(end)]
        if not plain:
            return set()
        if len(plain) == 1 and (words := settle_words(ends[plain[0]], self._skew)) is not None:
            try:
                rows = await self._talk.run(*words, deadline)
            except Locked:
                return set()
            return set(plain) if rows else set()
        rows = await self._talk.run(*settles_words([ends[at] for at in plain], self._skew), deadline)
        return {plain[row[0] - 1] for row in rows}

    async def _settle_by_model(self, end: Settle, deadline: float) -> Answer:
        while True:
            now, version, record = await self._read(end.scope, deadline)
            answer, changed = model.settle(record, end, now)
            event = model.event_of(record, end, now) if end.actor and model.view(record, now) else None
            if end.kind is Kind.FORGOTTEN:
                if (
                    answer is not Answer.OK
                    or record is None
                    or await self._remove(end, version, now, event, deadline)
                ):
                    return answer
            elif changed is None:
                return answer
            else:
                change = Change(changed, version, ends=True, event=event, retention=end.retention)
                if (await self._swap([change], deadline))[0]:
                    return answer
            if _is_over(deadline):
                raise Locked("the record stayed locked")

    async def _remove(
        self, end: Settle, version: str, now: float, event: Event | None, deadline: float
    ) -> bool:
        keep = span(end.retention)
        state = event.state.value if event is not None and event.state is not None else None
        told = (now, state, event and end.actor, end.reason, event.attempt if event else 0, keep)
        try:
            return bool(await self._run("forget", deadline, end.scope.hash, version, *told))
        except Locked:
            return False

    # ---------------------------------------------------------------------------------------- renew and note
    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        return await in_turns(renewals, self._renew, self._talk.deadline(), self._where)

    async def _renew(self, renewals: list[Renewal], deadline: float) -> list[Answer | Exception]:
        rows = await self._run("renew", deadline, *columns(map(renewal_args, renewals)))
        done = {row[0] - 1 for row in rows}
        return [
            Answer.OK if at in done else await self._alone(self._renew_by_model(renewal, deadline))
            for at, renewal in enumerate(renewals)
        ]

    async def _renew_by_model(self, renewal: Renewal, deadline: float) -> Answer:
        return await self._change(
            renewal.scope, lambda record, now: model.renew(record, renewal, now), deadline
        )

    async def note(self, note: Note) -> Answer:
        deadline = self._talk.deadline()
        scope = note.scope
        try:
            args = (self._skew, scope.hash, note.nonce, note.entry)
            if await self._talk.run("note", args, deadline, may_be_lost=True):
                return Answer.OK
        except Locked:
            pass
        except Lost:
            # It may have been written. Looking is safe: nobody but the owner, who waits here, adds steps.
            _, _, record = await self._read(scope, deadline)
            if record is not None and record.nonce == note.nonce and note.entry in record.steps:
                return Answer.OK
        try:
            return await self._change(scope, lambda record, now: model.note(record, note, now), deadline)
        except Trouble as trouble:
            raise trouble.told(self._where) from trouble

    # ----------------------------------------------------------------------------- read, decide, write if unchanged
    async def _read(self, scope: Scope, deadline: float) -> tuple[float, str, Record | None]:
        row = (await self._run("read", deadline, scope.hash))[0]
        return row[0], row[1], None if row[1] is None else record_of(row[-WIDTH:])[0]

    async def _change(
        self,
        scope: Scope,
        decide: Callable[[Record | None, float], tuple[Answer, Record | None]],
        deadline: float,
    ) -> Answer:
        while True:
            now, version, record = await self._read(scope, deadline)
            answer, changed = decide(record, now)
            if changed is None or (await self._swap([Change(changed, version)], deadline))[0]:
                return answer
            if _is_over(deadline):
                raise Locked("the record stayed locked")

    async def _swap(self, changes: list[Change], deadline: float) -> list[bool | None]:
        """Per change: written, or not because the row is another version by now, or (None) locked."""
        try:
            rows = await self._run("swap", deadline, *columns(map(change_args, changes)))
        except Locked:
            if len(changes) == 1:
                return [None]
            return [(await self._swap([change], deadline))[0] for change in changes]
        done = {row[0] - 1 for row in rows}
        return [at in done for at in range(len(changes))]

    async def _alone(self, answer: Awaitable[Answer]) -> Answer | Exception:
        try:
            return await answer
        except (Trouble, SemelError) as error:
            return settled(error, self._where)

    # --------------------------------------------------------------------------------------------- everything else
    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        row = (await self._run("read", self._talk.deadline(), scope.hash))[0]
        if row[1] is None:
            return None, row[0]
        record, readable = record_of(row[-WIDTH:])
        if not readable:
            raise OutcomeUnknown(
                f"the record of {scope!r} cannot be read: look at the row {scope.hex} in the database, then `resolve` "
                "the key with what happened, or `forget` it",
                attempt=record.attempts,
                unreadable=True,
                nonce=record.nonce,
            )
        return record, row[0]

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        deadline = self._talk.deadline()
        watchers = self._talk.watchers
        watchers.add(scope.hash, wake)
        try:
            await self._talk.listen(deadline)
            await self._mark(scope, deadline)
        except BaseException:
            watchers.remove(scope.hash, wake)
            raise

        async def unwatch() -> None:
            watchers.remove(scope.hash, wake)

        return unwatch

    async def _mark(self, scope: Scope, deadline: float) -> None:
        """Tell the row that somebody waits. Not while it is locked: then it changes now, and the waiter looks again."""
        if self._talk.listens:
            try:
                await self._run("mark", deadline, scope.hash)
            except Locked:
                self._talk.watchers.wake(scope.hash)

    async def scan(self, query: Query) -> Page:
        deadline = self._talk.deadline()
        if query.history is not None:
            return await self._history(query.history, deadline)
        chosen = states_of(query)
        states = sorted(state.value for state in chosen)
        where = (states, query.tenant, query.operation, query.abandoned, page_start(query), query.limit + 1)
        if query.ref is not None:
            rows = await self._run("scan_ref", deadline, *where, query.ref)
        else:
            rows = await self._run("scan_all" if _OUTCOMES & chosen else "scan", deadline, *where)
        now = rows[0][0] if rows else (await self._run("now", deadline))[0][0]
        records = tuple(record_of(row[1:])[0] for row in rows[: query.limit])
        cursor = bytes(rows[query.limit - 1][1]).hex() if len(rows) > query.limit else ""
        return Page(records=records, cursor=cursor, now=now)

    async def _history(self, scope: Scope, deadline: float) -> Page:
        rows = await self._run("history", deadline, scope.hash)
        events = tuple(
            Event(at, Kind(kind), None if state is None else State(state), actor, reason, attempt)
            for _, at, kind, state, actor, reason, attempt in rows
            if at is not None
        )
        return Page(events=events, now=rows[0][0])

    async def purge(self, limit: int) -> int:
        deadline = self._talk.deadline()
        gone = 0
        while gone < limit:
            share = min(_PURGE, limit - gone)
            found = len(await self._run("purge", deadline, share))
            gone += found
            if found < share:
                break
            deadline = self._talk.deadline()
        await self._run("purge_bodies", deadline, min(_PURGE, limit))
        await self._run("purge_audit", deadline, min(_PURGE, limit))
        return gone

    async def facts(self) -> Facts:
        rows = await self._talk.run("facts", (), self._talk.deadline())
        return facts_of(dict(sorted((name, value) for name, value in rows)), pooled=not self._talk.listens)

    async def aclose(self) -> None:
        await self._talk.aclose()

    leave = aclose  # what other loops opened is theirs, and ends with them


def _found(rows: Sequence[Row]) -> dict[bytes, Row]:
    """The rows of claim_many and claim_new_many, by scope: one has all that were inserted, the others are of those that were there."""
    found: dict[bytes, Row] = {}
    for row in rows:
        if len(row) > 4 and row[4] is not None:
            found[bytes(row[4])] = row
        else:
            found |= dict.fromkeys(map(bytes, row[1] or ()), (row[0], True, None, None))
    return found


def _judge(row: Row, ask: Ask, now: float) -> tuple[Verdict, Record | None]:
    record, readable = record_of(row[-WIDTH:])
    return model.claim(record, ask, now) if readable else (Unknown(None, Policy.HOLD, unreadable=True), None)


def _is_over(deadline: float) -> bool:
    """No time for another round, which may have to wait for a lock."""
    return time.monotonic() + 0.1 >= deadline


def _is_bulky(end: Settle) -> bool:
    return len(end.result) > _BULK
