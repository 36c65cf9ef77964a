"""The life of a call: claim, wait, run, settle. One body for both colours; nothing here knows asyncio or threads.

    acquire ──▶ Won ──▶ perform ──▶ record ──▶ Outcome
       │                   │           └──▶ NotRecorded: the write goes on in the background
       ├──▶ Replay ──▶ Outcome, or PreviousFailure
       ├──▶ Busy ──▶ park until woken, claim again … InProgress
       └──▶ Unknown ──▶ probe … OutcomeUnknown

Rule 1: after the function has started, nothing that goes wrong may free the key unless policy says so.
Rule 2: what is written after the effect carries the claim's nonce, on a path the caller cannot cancel.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from semel import steps
from semel.asking import Asker
from semel.calls import Call, add_note, failure_of, is_lazy, name_of, not_run
from semel.canonical import FINGERPRINT_VERSION
from semel.debts import Debts
from semel.deciding import decision_of
from semel.door import Door
from semel.errors import (
    CodecError,
    KeyExpired,
    KeyMismatch,
    LeaseLost,
    NotRecorded,
    OutcomeUnknown,
    PreviousFailure,
)
from semel.heart import Heart
from semel.hooks import Emit, Executed, Failed, Refused, Replayed, TakenOver
from semel.keys import SecretRing, check_ref
from semel.model import (
    Answer,
    Ask,
    Busy,
    Expired,
    Failure,
    Kind,
    Mismatch,
    Policy,
    Record,
    Replay,
    Settle,
    State,
    Unknown,
    Verdict,
    Won,
)
from semel.options import NOT_FOUND, Found, Release, check_probe
from semel.points import reach
from semel.posting import Brief, poster_of
from semel.recording import Recorder, done_of
from semel.refusals import check_ref_type, refused, undecided, unkept, unreadable
from semel.run import Outcome, Run, _current, leave, not_kept
from semel.runtime import NO_INTERRUPT, Interrupt, NotBegun, Runtime, Stoppable, Ticker, in_spite_of, own
from semel.seals import MARK
from semel.shrinking import TOO_LARGE
from semel.stepping import Stepper
from semel.store import Store
from semel.waiting import Bench, Seat

__all__ = ["Engine", "done_of"]

UNENCODABLE = "unencodable"
# Python 3.11 asks each time for a member of an enumeration, 70 ns: those of every call are asked for once.
_RETRY, _DONE = Policy.RETRY, Kind.DONE
_NOTHING: Final = object()  # what a function that has not returned has given


class Engine:
    """The flow over one store in one world. Faces make one per loop, or one per process for threads."""

    recorded = "is recorded as done"  # what is said of a run that has ended well
    knows_tables = False  # whether they were looked at before the first transaction of a caller
    _decision = staticmethod(decision_of)

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        *,
        secrets: SecretRing,
        settle_timeout: float,
        timeout: float = 0.0,
        emit: Emit | None,
        door: Door | None = None,
    ) -> None:
        self.door = door or Door("Semel")  # of the face, where there is one
        self.store = store
        self.runtime = runtime
        self.secrets = secrets
        self.settle_timeout = settle_timeout
        self.emit = emit
        self.shared = store.capabilities.shared
        poster = poster_of(store)
        self.heart = Heart(store, runtime, emit)
        self.debts = Debts(store, runtime, self.heart, emit, timeout)
        self.asker = Asker(store, runtime, self.heart, self.debts, poster, self.door)
        self.recorder = Recorder(
            store,
            runtime,
            self.heart,
            self.debts,
            settle_timeout=settle_timeout,
            timeout=timeout,
            emit=emit,
            poster=poster,
        )
        self.stepper = Stepper(store, runtime, self.debts, settle_timeout=settle_timeout)
        self.bench = Bench(store, runtime, emit)
        self.purger: Ticker | None = None
        self.cache: Stoppable | None = None

    # ------------------------------------------------------------------------------------- a whole call
    async def execute(self, call: Call) -> Outcome[Any]:
        ask = self._ask(call)
        try:
            verdict = await self.asker.brief(ask)
            if isinstance(verdict, Brief):
                # Nobody is told: hooks time every call to the store, and leave no quick way.
                return self._repeat(call, verdict.attempts, verdict.reply, None, "", verdict.at)
            if type(verdict) is Replay:
                return self.replay(call, verdict.record)
            if type(verdict) is not Won:
                ask, verdict = await self._contend(call, ask, verdict)
                if type(verdict) is Replay:
                    return self.replay(call, verdict.record)
            if self.runtime.detaches(call.fn, call.options.inline):
                # It runs on without its caller, so a lost lease must not cancel the caller: the settle will tell.
                run = self.begin(call, ask, verdict.record, NO_INTERRUPT)
                run.detached = run.started = True
                return await self.runtime.detach(self._perform(run), recall=True)
            run = self.begin(call, ask, verdict.record)  # held here: until it is begun, nobody else does
            return await self._perform(run)
        except BaseException:
            self.disown(ask)
            raise

    def begin(self, call: Call, ask: Ask, record: Record, interrupt: Interrupt | None = None) -> Run:
        """The key is ours: keep it alive from here until it is settled."""
        reach("claim.won")
        run = Run(self, call, ask, record, interrupt or self.runtime.interrupt())
        self.heart.add(run)
        if self.emit is not None and record.attempts > 1:
            self.emit(TakenOver(call.scope, record.attempts))
        return run

    def disown(self, ask: Ask) -> None:
        """Its caller was interrupted, by a signal's handler perhaps: what was granted and not begun is given back."""
        if self.heart.give_up(ask.nonce):
            self.debts.abandon(ask)

    async def _perform(self, run: Run) -> Outcome[Any]:
        call = run.call
        value: Any = _NOTHING
        try:
            run.started = True
            token = _current.set(run.weak)
            try:
                reach("run.started")
                value = await self.runtime.call(call.fn, call.args, call.kwargs, call.options.inline)
                if is_lazy(value):
                    lazy, value = value, _NOTHING
                    raise not_run(call, lazy, self.runtime.colour)
                reach("run.returned")
            except Exception as error:
                if value is _NOTHING:
                    await self.fail(run, own(error))
                raise
            finally:
                leave(token)
            if run.interrupt.fired:
                run.interrupt.absorb()
            # As `complete`, without a coroutine more around the settle.
            data, marker, problem = self._encode(call, value)
            await self.recorder.record(run, done_of(run, data, marker), value)
        except BaseException as error:
            await self._interrupted(run, value, error)
            raise
        return self._completed(run, value, marker, problem)

    async def _interrupted(self, run: Run, value: Any, error: BaseException) -> None:
        """Whether the function has returned decides: its outcome is recorded, or lost. Nothing to do where one is on its way."""
        if run.settling:
            return
        if value is _NOTHING or run.foreign:
            ending = self.lose(run, error)
        else:
            data, marker, _ = self._encode(run.call, value)
            ending = self.runtime.protect(self.recorder.record(run, done_of(run, data, marker), value))
        await in_spite_of(error, self.runtime, ending)

    async def complete(self, run: Run, value: Any) -> Outcome[Any]:
        """The effect happened: record it, whatever that takes."""
        try:
            data, marker, problem = self._encode(run.call, value)
            await self.recorder.record(run, done_of(run, data, marker), value)
        except BaseException as error:
            await self._interrupted(run, value, error)
            raise
        return self._completed(run, value, marker, problem)

    def _completed(self, run: Run, value: Any, marker: str, problem: CodecError | None) -> Outcome[Any]:
        if self.emit is not None:
            self.emit(Executed(run.scope, run.attempt, self.runtime.now() - run.won_at))
        if problem is not None:
            raise problem
        return Outcome(value, False, run.ref, run.attempt, marker)

    def _encode(self, call: Call, value: Any) -> tuple[bytes, str, CodecError | None]:
        if call.codec is None:
            return b"", "", None
        try:
            data = call.codec.encode(value, compress_over=call.options.compress_over)
        except CodecError as error:
            return b"", UNENCODABLE, unkept(call, error, self.recorded)
        if len(data) > call.options.max_result:
            return b"", TOO_LARGE, None
        return data, "", None

    def replay(self, call: Call, record: Record) -> Outcome[Any]:
        """What the record holds, decoded afresh. Never writes, never runs anything."""
        if self.emit is not None:
            self.emit(Replayed(call.scope, record.attempts))
        if record.state is State.FAILED:
            failure = record.error or Failure("Exception")
            told, about = (failure.type, failure.code, failure.message), name_of(call)
            raise PreviousFailure(*told, attempt=record.attempts, about=about)
        if record.marker == UNENCODABLE and call.codec is not None:
            raise CodecError(
                f"{name_of(call)} is done, but its result could not be encoded when it happened and was not kept; "
                f"it is not run again (ref={record.ref!r})",
                recorded=True,
            )
        if call.options.ref_type is not None and record.ref is not None:
            check_ref_type(call, record.ref)
        return self._repeat(call, record.attempts, record.result, record.ref, record.marker)

    @staticmethod
    def _repeat(
        call: Call, attempts: int, result: bytes, ref: str | None = None, marker: str = "", at: int = 0
    ) -> Outcome[Any]:
        """The result that begins at `at`."""
        codec = call.codec
        if codec is None or len(result) == at:
            return Outcome(None, True, ref, attempts, marker or not_kept(codec))
        try:
            return Outcome(codec.decode(result, at), True, ref, attempts, marker)
        except CodecError as error:
            raise unreadable(call, attempts, error, sealed=result[at : at + 1] == MARK) from error

    # ------------------------------------------------------------------------------------------ claiming

    async def acquire(self, call: Call) -> tuple[Ask, Won | Replay]:
        """Own the key or learn its outcome; everything else raises."""
        ask, verdict = await self.ask_once(call)
        try:
            if type(verdict) is Won or type(verdict) is Replay:
                return ask, verdict
            return await self._contend(call, ask, verdict)
        except BaseException:
            self.disown(ask)
            raise

    async def ask_once(self, call: Call) -> tuple[Ask, Verdict]:
        """One claim, whatever its verdict."""
        ask = self._ask(call)
        try:
            return ask, await self.claim(ask)
        except BaseException:
            self.disown(ask)
            raise

    def _ask(self, call: Call) -> Ask:
        """A claim for this call, with a nonce of its own."""
        options = call.options
        return Ask(
            call.scope,
            self.runtime.entropy(16),
            options.lease,
            options.retention,
            _RETRY if options.on_unknown == "retry" else options.policy,
            call.fingerprint,
            FINGERPRINT_VERSION,
            call.labels,
            self.secrets.current,
        )

    def claim(self, ask: Ask) -> Coroutine[Any, Any, Verdict]:
        """One answer of the store to one ask."""
        return self.asker.claim(ask)

    async def _contend(
        self, call: Call, ask: Ask, verdict: Verdict, heard: list[Verdict] | None = None
    ) -> tuple[Ask, Won | Replay]:
        """Wait and probe, as the call says; everything but the two raises, and is then the last of what was `heard`."""
        seat: Seat | None = None
        found: Found | None = None
        heard = [] if heard is None else heard
        try:
            while True:
                heard[:] = [verdict]
                match verdict:
                    case Won(record=record) if found is not None:
                        # From here on its own run settles it, now or later: nobody else may free it.
                        verdict = Replay(record)
                        verdict = await self._keep_found(call, ask, record, found)
                    case Won() | Replay():
                        return ask, verdict
                    case Busy():
                        if seat is None:
                            # Subscribe, claim again, then wait: a settle in between is never missed.
                            seat = await self.bench.sit(call, verdict)
                        elif await seat.park(verdict):
                            await seat.watch_again()
                        ask, verdict = await seat.ask(self.claim, ask)
                    case Unknown():
                        ask, found = await self._probe(call, ask, verdict, heard)
                        verdict = await self.claim(ask)
                    case other:  # Mismatch or Expired
                        raise self._refusal(call, other)
        finally:
            try:
                if type(verdict) is not Won:
                    self.debts.leave(ask, verdict)
                if seat is not None:
                    await seat.leave()
            except BaseException:
                self.bench.stand(seat)  # once more is no harm
                self.disown(ask)  # ours, perhaps, but nobody will run it
                raise

    def _refusal(self, call: Call, verdict: Mismatch | Expired) -> KeyMismatch | KeyExpired:
        if self.emit is not None:
            self.emit(Refused(call.scope, type(verdict).__name__.lower()))
        return refused(call, verdict)

    # ------------------------------------------------------------------------------------ lost outcomes

    async def _probe(
        self, call: Call, ask: Ask, unknown: Unknown, heard: list[Verdict]
    ) -> tuple[Ask, Found | None]:
        """Let the caller's probe decide. Returns the ask to claim with, and what was found; raises when it stays unknown.

        What it raises itself is no verdict on this key: then nothing was `heard`.
        """
        record, probe = unknown.record, call.options.on_unknown
        if record is not None and not steps.are_readable(record.steps):
            unknown = msgspec.structs.replace(unknown, unreadable=True)
        if record is None or unknown.unreadable or not callable(probe):
            raise self._unknown(call, unknown)
        run = Run(self, call, ask, record, self.runtime.interrupt())
        token = _current.set(run.weak)
        heard.clear()
        try:
            answer = await self.runtime.call(probe, call.args, {}, call.options.inline)
        finally:
            leave(token)
        heard.append(unknown)
        check_probe(answer)
        if isinstance(answer, Found):
            await self.settle_found(call, record, answer)
            return ask, answer
        if answer is NOT_FOUND and unknown.policy is Policy.PROBE:
            return msgspec.structs.replace(ask, takeover=record.nonce), None
        raise self._unknown(call, unknown, probed=True)

    async def _keep_found(self, call: Call, ask: Ask, record: Record, found: Found) -> Replay:
        """The record ended, or was freed, while the probe looked: what was found is the outcome, and nothing is run (R11).

        Told as it was written. Another claim would find nothing where the retention is over by then.
        """
        run = self.begin(call, ask, record)
        run.started = True  # what was found is its effect
        if found.ref is not None:
            run.set_ref(found.ref)
        await self.complete(run, found.value)
        data, marker, _ = self._encode(call, found.value)
        return Replay(
            msgspec.structs.replace(record, state=State.DONE, result=data, marker=marker, ref=run.ref)
        )

    async def settle_found(self, call: Call, record: Record, found: Found) -> Answer:
        """A probe found the effect: write its result in the lost owner's place (a new nonce ends his rights)."""
        data, marker, problem = self._encode(call, found.value)
        if problem is not None:
            raise CodecError(
                f"what the probe found for {name_of(call)} cannot be stored, so the key stays unknown: {problem.__cause__}"
            ) from problem.__cause__
        end = Settle(
            scope=call.scope,
            nonce=record.nonce,
            kind=Kind.DONE,
            retention=call.options.retention,
            tombstone=call.options.tombstone,
            result=data,
            marker=marker,
            ref=None if found.ref is None else check_ref(found.ref),
            steps=steps.summarize(steps.decode(record.steps)) if record.steps else None,
            new_nonce=self.runtime.entropy(16),
        )
        answer = (await self.store.settle((end,)))[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _unknown(self, call: Call, unknown: Unknown, *, probed: bool = False) -> OutcomeUnknown:
        if self.emit is not None:
            self.emit(Refused(call.scope, "unknown"))
        return undecided(call, unknown, probed=probed)

    async def fail(self, run: Run, error: Exception) -> None:
        """The function raised: a known failure, decided by `on_error` (R9). The error itself goes to the caller."""
        if run.foreign:
            return
        if run.interrupt.fired:
            run.interrupt.absorb()
        decision, after = self._decision(run, error)
        word = "release" if isinstance(decision, Release) else decision
        kind = {"release": Kind.RELEASED, "replay": Kind.FAILED, "hold": Kind.UNKNOWN}[word]
        policy = Policy.HOLD if kind is Kind.UNKNOWN and run.policy is not Policy.PROBE else None
        await self._end_badly(run, kind, error, after=after, policy=policy, word=word)

    async def lose(self, run: Run, error: BaseException) -> None:
        """Cancelled, interrupted, exiting: the outcome is lost, and `on_unknown` decides at once (R10)."""
        if run.foreign:
            return
        lost = run.interrupt.fired
        if run.threads and not lost and run.detached:
            # The loop ends under a thread that runs on: never free a key under it, let its lease decide.
            self.heart.leave(run, error)
            return
        if lost:
            run.interrupt.absorb()
            self.debts.lost(run)
            raise LeaseLost(
                f"{name_of(run.call)} was taken over by another owner; attempt {run.attempt} was cancelled"
            )
        free = run.policy is Policy.RETRY or isinstance(error, NotBegun)
        kind = Kind.RELEASED if free else Kind.UNKNOWN
        await self._end_badly(run, kind, error, after=0.0, policy=None, word="lost")

    async def fail_for_good(self, run: Run, error: BaseException | str) -> None:
        """A failure declared by hand: it is the outcome, and replayed as PreviousFailure."""
        nonce, kept, buried = run.ask.nonce, run.call.options.retention, run.call.options.tombstone
        end = Settle(run.scope, nonce, Kind.FAILED, kept, buried, ref=run.ref, error=failure_of(error))
        await self.recorder.record(run, end, None)

    async def release(self, run: Run) -> None:
        """Give the key back without an outcome."""
        end = Settle(run.scope, run.ask.nonce, Kind.RELEASED, run.call.options.retention)
        await self.recorder.record(run, end, None)

    async def _end_badly(
        self, run: Run, kind: Kind, error: BaseException, *, after: float, policy: Policy | None, word: str
    ) -> None:
        options = run.call.options
        if self.emit is not None:
            self.emit(Failed(run.scope, run.attempt, word, error))
        end = Settle(
            scope=run.scope,
            nonce=run.ask.nonce,
            kind=kind,
            retention=options.retention,
            tombstone=options.tombstone if kind is Kind.FAILED else 0.0,
            error=failure_of(error),
            ref=run.ref,
            after=after,
            policy=policy,
        )
        try:
            await self.recorder.record(run, end, None)
        except (NotRecorded, LeaseLost) as problem:
            add_note(error, str(problem))

    async def close(self) -> None:
        """Let calls end, with their leases renewed, for at most `settle_timeout`; then stop. No call begins any more."""
        until = self.runtime.now() + self.settle_timeout
        while self.heart.busy and self.runtime.now() < until:
            await self.runtime.sleep(0.01)
        await self.debts.close(max(0.0, until - self.runtime.now()))
        self.stop()
        await self.runtime.drain(self.settle_timeout)

    def stop(self) -> None:
        """No heartbeat, no purge and no cache of its own any more."""
        self.heart.stop()
        for each in (self.purger, self.cache):
            if each is not None:
                each.stop()
