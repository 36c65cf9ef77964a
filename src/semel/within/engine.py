"""The life of a call inside a caller's transaction: no lease, no heartbeat, no second commit.

    look (own connection) ──▶ Replay, Mismatch, …        MariaDB, SQLite, and whoever waits for a leased run
    SAVEPOINT, claim ──▶ Won ──▶ function ──▶ flush, settle, RELEASE ──▶ Outcome; the caller commits
       │                            └──▶ error: ROLLBACK TO; a failure to keep goes to the face's own store
       └──▶ locked, Busy ──▶ wait … InProgress

Rule 1: whatever is raised, the caller's transaction is usable, unless the database itself ended it.
Rule 2: serialization failures and deadlocks are the caller's to retry: they pass untouched and are never recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

import msgspec

from semel import model, steps
from semel.calls import Call, add_note, failure_of, is_lazy, not_run
from semel.errors import ConfigurationError, OutcomeUnknown, SemelError, StoreUnavailable
from semel.flow import Engine
from semel.hooks import Executed, Failed, TakenOver
from semel.model import Answer, Ask, Busy, Kind, Policy, Record, Replay, Settle, Unknown, Verdict, Won
from semel.options import Found, Release
from semel.points import reach
from semel.recording import done_of
from semel.run import Outcome, Run, _current, leave
from semel.runtime import NO_INTERRUPT, Interrupt, own
from semel.stepping import Stepper
from semel.store import Store
from semel.waiting import Bench, Seat
from semel.within.afterwards import OWED, foretold, record_failure
from semel.within.bound import Bound, MissingTables, astray, ended
from semel.within.failures import is_missing_savepoint, is_missing_table, is_retryable, let_go
from semel.within.records import other_file

__all__ = ["TxEngine", "two_records"]

_LEAST_WAIT = 0.001  # wait=0: a row lock is waited for this long, never for ever

# Engines that had no connection of their own to look on (a pool that the callers' transactions exhaust): each further look
# would wait for its time-out, and the caller's own connection decides anyway.
_UNSEEN: Final = 10.0
_unseen_until: Final[WeakKeyDictionary[Engine, float]] = WeakKeyDictionary()


def two_records(home: str, dialect: str | None) -> ConfigurationError:
    """`dialect`: of the transaction's database, as far as it is known."""
    return ConfigurationError(
        f"the records of this face live in a {home} store, and this transaction is of a {dialect or 'SQL'} database: a key would have "
        "two records. Give the face the URL of the database that the transaction is in"
    )


class TxEngine(Engine):
    """An engine over one caller's transaction. What it does not change, `Engine` does for it."""

    recorded = "is recorded as done if this transaction commits"
    _probed = b""  # the nonce of the ask that a probe was asked for

    def __init__(
        self,
        outer: Engine,
        bound: Bound,
        layered: Store,
        home: str | None,
        file: str | None = None,
        namespace: str | None = None,
    ) -> None:
        # Not Engine.__init__: a heart of its own would be made for every transaction, and never beat.
        self.__dict__.update(outer.__dict__)
        self.outer = outer
        self.bound = bound
        self.store = layered
        self.stepper = _NO_STEPS
        self._home = home
        self._file = self._unchecked = file
        self._namespace = namespace
        self._bare = layered is bound
        self._looks = False
        self._until = 0.0

    # ------------------------------------------------------------------------------------- a whole call
    async def execute(self, call: Call) -> Outcome[Any]:
        ask, verdict = await self.ask_once(call)
        try:
            if type(verdict) is not Won and type(verdict) is not Replay:
                ask, verdict = await self._contend(call, ask, verdict)
            if type(verdict) is Replay:
                return self.replay(call, verdict.record)
            return await self._perform(self.begin(call, ask, verdict.record))
        except BaseException:
            await self._undo_open(ask)
            raise

    async def _undo_open(self, ask: Ask) -> None:
        """A signal's handler raised where nobody has ended the savepoint: the caller's transaction is as before the claim."""
        if self.bound.has(ask.nonce):
            with suppress(Exception):  # what was raised before is what tells
                await self.runtime.protect(self.bound.undo(ask.nonce))

    def begin(self, call: Call, ask: Ask, record: Record, interrupt: Interrupt | None = None) -> Run:
        reach("claim.won")
        run = Run(self, call, ask, record, interrupt or NO_INTERRUPT)  # without a lease nothing interrupts
        run.policy = ask.policy  # the row says hold only to guard against a function that commits by itself
        if self.emit is not None and record.attempts > 1:
            self.emit(TakenOver(call.scope, record.attempts))
        return run

    async def _perform(self, run: Run) -> Outcome[Any]:
        call = run.call
        token = _current.set(run.weak)
        try:
            reach("run.started")
            value = await self.runtime.call(call.fn, call.args, call.kwargs, True)
            if is_lazy(value):
                raise not_run(call, value, self.runtime.colour)
            if (flushing := self.bound.flush(run.ask.nonce)) is not None:
                await flushing
            reach("run.returned")
        except Exception as error:
            await self.fail(run, own(error))
            raise
        except BaseException as error:
            await self.lose(run, error)
            raise
        finally:
            leave(token)
        return await self._complete(run, value)

    async def complete(self, run: Run, value: Any) -> Outcome[Any]:
        try:
            run.settling = True
            if (flushing := self.bound.flush(run.ask.nonce)) is not None:
                await flushing
        except BaseException as error:
            await self.runtime.protect(self._undo(run, error))
            raise
        return await self._complete(run, value)

    async def _complete(self, run: Run, value: Any) -> Outcome[Any]:
        """Settle and release the savepoint. The caller's commit makes it true, together with his rows."""
        data, marker, problem = self._encode(run.call, value)
        bound = self.bound
        try:
            end = done_of(run, data, marker, run.ask.policy)
            reach("settle.sent")
            if self._bare:
                answer: Answer | Exception = await bound.settle_one(end)
            else:
                answer = (await self.store.settle((end,)))[0]
            if answer is not Answer.OK:
                raise ended(unless_moved=bound.port.dialect != "sqlite")
            if not bound.keeps_open(run.ask.nonce):
                await bound.keep(run.ask.nonce)
        except BaseException as error:
            await self.runtime.protect(self._undo(run, error))
            if is_missing_table(error, bound.port.dialect):
                raise astray(bound.table) from error
            raise
        reach("settle.stored")
        if self.emit is not None:
            self.emit(Executed(run.scope, run.attempt, self.runtime.now() - run.won_at))
        if problem is not None:
            raise problem
        return Outcome(value, replayed=False, ref=run.ref, attempt=run.attempt, marker=marker)

    # ------------------------------------------------------------------------------------------ claiming
    async def ask_once(self, call: Call) -> tuple[Ask, Verdict]:
        bound = self.bound
        port = bound.port
        await port.prepare()
        dialect = port.dialect
        if self._home is not None and self._home != dialect:
            raise two_records(self._home, dialect)
        if self._unchecked is not None:
            await self._check_file(self._unchecked)
        wait = call.options.wait
        patience = max(_LEAST_WAIT, wait)
        self._until = self.runtime.now() + patience
        self._looks = dialect != "postgresql"
        ask = self._ask(call)
        if (OWED or self.debts.unwritten) and (verdict := await self._told_here(ask)) is not None:
            return ask, verdict
        if not self.outer.knows_tables and not self._looks:
            await self._know_tables(ask)
        if self._looks or not self._bare:
            try:
                return ask, await self.claim(ask)
            except BaseException:
                await self._undo_open(ask)
                raise
        # As `claim`, without a coroutine more around what nearly every call is.
        reach("claim.sent")
        bound.patience = patience
        try:
            try:
                verdict = await bound.claim_one(ask)
            except MissingTables:
                await self._make_tables(ask)
                verdict = await bound.claim_one(ask)
            self._looks = type(verdict) is Busy
            if type(verdict) is Won and verdict.record.steps:
                verdict = await self._checked(ask, verdict)
        except BaseException:
            await self._undo_open(ask)
            raise
        return ask, verdict

    async def _checked(self, ask: Ask, won: Won) -> Won | Unknown:
        """Steps that cannot be read here are known before the function runs: then the claim is taken back (R15)."""
        if steps.are_readable(won.record.steps):
            return won
        await self.runtime.protect(self.bound.undo(ask.nonce))
        return Unknown(won.record, Policy.HOLD, unreadable=True)

    async def _know_tables(self, ask: Ask) -> None:
        """PostgreSQL, once per face: a look on its own connection, which refuses tables of a newer semel; others look anyway."""
        with suppress(StoreUnavailable, OutcomeUnknown):  # the caller's own connection decides
            await self.outer.store.peek(ask.scope)
        self.outer.knows_tables = True

    async def _check_file(self, file: str) -> None:
        """SQLite: the table's name means the store's own file here, which it must for a replay as well (R27)."""
        if (other := await other_file(self.bound.port, self.bound.table, file)) is not None:
            raise ConfigurationError(
                f"this transaction is in the SQLite database {other!r}, and the records of this face are in {file!r}: a key would "
                "have two records. Give the face the URL of the database that the transaction is in"
            )
        self._unchecked = None

    async def _contend(
        self, call: Call, ask: Ask, verdict: Verdict, heard: list[Verdict] | None = None
    ) -> tuple[Ask, Won | Replay]:
        self.bench = _TxBench(self.outer.bench, self._until)
        return await super()._contend(call, ask, verdict, heard)

    async def claim(self, ask: Ask) -> Verdict:
        reach("claim.sent")
        verdict: Verdict | Exception | None = await self._told_here(ask)
        if self._looks and verdict is None:
            verdict = await self._look(ask)
        if verdict is None:
            self.bound.patience = max(_LEAST_WAIT, self._until - self.runtime.now())
            try:
                verdict = await (self.bound.claim_one(ask) if self._bare else self._claim_layered(ask))
            except MissingTables:
                await self._make_tables(ask)
                verdict = await self._claim_layered(ask)
        if isinstance(verdict, Exception):
            raise verdict
        self._looks = self._looks or isinstance(verdict, Busy)
        if isinstance(verdict, Won) and verdict.record.steps:
            return await self._checked(ask, verdict)
        return verdict

    async def _told_here(self, ask: Ask) -> Verdict | None:
        """What this process knows of the key, and the database does not."""
        if self.debts.unwritten and (busy := await self.debts.write(ask.scope)) is not None:
            return busy
        return await self._foretold(ask) if OWED else None

    async def _foretold(self, ask: Ask) -> Verdict | None:
        """A failure of this process that is not written yet (SQLite: the caller's transaction has the lock): do not run again."""
        if ask.nonce == self._probed:
            return None  # who asked for a probe knows better by now
        if (verdict := foretold(self._place, ask)) is None:
            return None
        with suppress(MissingTables):  # what was done since, here or where it can be seen, counts
            return await self._known_here(ask) or verdict
        return verdict

    @property
    def _place(self) -> tuple[Hashable, ...]:
        return (self._file or id(self.outer.store), self.bound.table, self._namespace)

    async def _claim_layered(self, ask: Ask) -> Verdict | Exception:
        return (await self.store.claim((ask,)))[0]

    async def _look(self, ask: Ask) -> Verdict | None:
        """What needs no write, seen on a connection of our own: the latest, whatever snapshot the caller has, unlocked."""
        if self.runtime.now() < _unseen_until.get(self.outer, 0.0):
            return None
        try:
            record, now = await self.outer.store.peek(ask.scope)
        except StoreUnavailable:
            _unseen_until[self.outer] = self.runtime.now() + _UNSEEN
            return None  # the caller's own connection decides
        verdict, changed = model.claim(record, ask, now)
        if isinstance(verdict, Unknown):
            return await self._known_here(ask) or verdict
        return verdict if changed is None else None

    async def _known_here(self, ask: Ask) -> Replay | None:
        """What a probe has said in this very transaction, which nobody else can see."""
        record, now = await self.store.peek(ask.scope)
        verdict = model.claim(record, ask, now)[0]
        return verdict if isinstance(verdict, Replay) else None

    async def _make_tables(self, ask: Ask) -> None:
        """First use: the face's own store makes its tables, if it may, on its own connection (R45)."""
        try:
            await self.outer.store.peek(ask.scope)
        except SemelError as error:
            raise MissingTables(self.bound.port, self.bound.table) from error
        if self.bound.port.dialect == "postgresql":
            # Its session remembers that a function was not there until it takes a lock on a table, which calling one is not.
            await self.bound.peek(ask.scope)

    async def _probe(
        self, call: Call, ask: Ask, unknown: Unknown, heard: list[Verdict]
    ) -> tuple[Ask, Found | None]:
        asked = await super()._probe(call, ask, unknown, heard)
        self._probed = ask.nonce
        self._looks = (
            False  # what the probe said is written in the caller's transaction: only there it can be seen
        )
        return asked

    # ------------------------------------------------------------------------------------------- failing
    async def fail(self, run: Run, error: Exception) -> None:
        await self.runtime.protect(self._undo(run, error))
        if is_retryable(error, self.bound.port.dialect):
            return
        decision, after = self._decision(run, error)
        word = "release" if isinstance(decision, Release) else decision
        if self.emit is not None:
            self.emit(Failed(run.scope, run.attempt, word, error))
        if word == "release" and not after:
            return
        kind = {"release": Kind.RELEASED, "replay": Kind.FAILED, "hold": Kind.UNKNOWN}[word]
        await self._keep_failure(run, kind, error, after)

    async def lose(self, run: Run, error: BaseException) -> None:
        """Cancelled or interrupted: the rows are rolled back; under hold and probe something outside may have happened."""
        if self.bound.port.dialect == "sqlite":
            let_go(error)
        await self.runtime.protect(self._undo(run, error))
        if self.emit is not None:
            self.emit(Failed(run.scope, run.attempt, "lost", error))
        if run.ask.policy is not Policy.RETRY:
            await self._keep_failure(run, Kind.UNKNOWN, error, 0.0)

    async def fail_for_good(self, run: Run, error: BaseException | str) -> None:
        problem = error if isinstance(error, BaseException) else RuntimeError(error)
        await self.runtime.protect(self._undo_by_hand(run))
        await self._keep_failure(run, Kind.FAILED, problem, 0.0, told=error)

    async def release(self, run: Run) -> None:
        await self.runtime.protect(self._undo_by_hand(run))

    async def _undo_by_hand(self, run: Run) -> None:
        """No function's error is on its way that could tell: what is not undone is said here, and no failure is recorded."""
        try:
            await self.bound.undo(run.ask.nonce)
        except SemelError:
            raise  # which says what to do
        except Exception as error:
            if is_missing_savepoint(error, self.bound.port.dialect):
                raise ended() from error
            add_note(
                error,
                "the savepoint of the claim could not be rolled back, and no failure is recorded: roll the whole transaction back",
            )
            raise

    async def _undo(self, run: Run, error: BaseException) -> None:
        try:
            await self.bound.undo(run.ask.nonce)
        except Exception as second:  # noqa: BLE001 - the function's error is the one that tells
            if not is_retryable(error, self.bound.port.dialect):
                why = "" if str(second) == str(error) else f" ({second})"
                add_note(
                    error, f"the savepoint could not be rolled back{why}: roll the whole transaction back"
                )

    async def _keep_failure(
        self,
        run: Run,
        kind: Kind,
        error: BaseException,
        after: float,
        told: BaseException | str | None = None,
    ) -> None:
        options = run.call.options
        end = Settle(
            scope=run.scope,
            nonce=run.ask.nonce,
            kind=kind,
            retention=options.retention,
            tombstone=options.tombstone if kind is Kind.FAILED else 0.0,
            error=failure_of(error if told is None else told),
            ref=run.ref,
            after=after,
            policy=Policy.HOLD if kind is Kind.UNKNOWN and run.ask.policy is not Policy.PROBE else None,
        )
        ask = msgspec.structs.replace(run.ask, takeover=b"")
        work = record_failure(self.outer, self.bound, self._place, ask, end, error, run.attempt)
        await self.runtime.protect(work)


class _TxBench(Bench):
    """The bench of the face's own store: leased runs are settled there, and its wake-ups come from there."""

    asks_twice = False  # on the caller's connection: there is no other one

    def __init__(self, outer: Bench, until: float) -> None:
        super().__init__(outer.store, outer.runtime, outer._emit)  # noqa: SLF001 - our own parent
        self._waiting = outer._waiting  # noqa: SLF001 - one count for all
        self._until = until

    async def sit(self, call: Call, busy: Busy) -> Seat:
        seat = await super().sit(call, busy)
        seat._until = self._until  # noqa: SLF001 - a row lock was waited for already
        return seat


class _NoSteps(Stepper):
    """A step or an id must be durable when it returns, and nothing is before the caller's commit.

    Refused at once: a plain function, which runs in the loop here, would never await what says so.
    """

    def __init__(self) -> None:
        """It refuses, so it needs nothing."""

    def step(
        self,
        run: Run,
        name: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        request: Any,
        result_type: Any,
        on_unknown: Any,
    ) -> NoReturn:
        del run, name, fn, args, kwargs, request, result_type, on_unknown
        raise _no_steps("run.step")

    def new_id(self, run: Run, kind: str, name: str) -> NoReturn:
        del run, kind, name
        raise _no_steps("run.new_id")


_NO_STEPS: Final = _NoSteps()


def _no_steps(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} cannot be used inside within(): it must be durable when it returns, and nothing is before the caller's "
        "commit. Use execute() without within() for runs with steps; make the id in the function and keep it with run.set_ref"
    )
