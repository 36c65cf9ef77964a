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

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from semel import ids, steps
from semel.canonical import FINGERPRINT_VERSION
from semel.codec import Codec
from semel.errors import (
    CodecError,
    ConfigurationError,
    InProgress,
    InvalidKey,
    KeyExpired,
    KeyMismatch,
    LeaseLost,
    NotRecorded,
    OutcomeUnknown,
    PreviousFailure,
    StoreUnavailable,
)
from semel.heart import Heart
from semel.hooks import Contended, Emit, Executed, Failed, LeaseGone, Refused, Replayed, TakenOver, Unrecorded
from semel.keys import Scope, SecretRing, check_key, fingerprint, mask
from semel.model import (
    Answer,
    Ask,
    Busy,
    Expired,
    Failure,
    Kind,
    Mismatch,
    Note,
    Policy,
    Record,
    Replay,
    Settle,
    State,
    Unknown,
    Verdict,
    Won,
)
from semel.options import NOT_FOUND, Found, Options, Release, seconds
from semel.points import reach
from semel.results import codec_for
from semel.run import Outcome, Run, _current
from semel.runtime import Parker, Runtime, Ticker
from semel.store import Store, Unwatch

__all__ = ["Call", "Engine", "failure_of", "nothing_to_run"]

UNENCODABLE = "unencodable"
TOO_LARGE = "too large"
_SAFETY_POLL = 1.0  # a lost wake-up costs at most this, or the lease if that is shorter


def nothing_to_run() -> None:
    """The function of a call that has none: a claim by hand, a look at a record."""


class Call(msgspec.Struct, frozen=True):
    """One call, with everything checked: what must happen once, how to do it, and what to say meanwhile."""

    scope: Scope
    key: str
    options: Options
    fn: Callable[..., Any] = nothing_to_run
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    codec: Codec | None = None
    """None: the result is not kept (consume)."""
    fingerprint: bytes = b""
    labels: Mapping[str, str] | None = None


class Engine:
    """The flow over one store in one world. Faces make one per loop, or one per process for threads."""

    def __init__(
        self, store: Store, runtime: Runtime, *, secrets: SecretRing, settle_timeout: float, emit: Emit | None
    ) -> None:
        self.store = store
        self.runtime = runtime
        self.secrets = secrets
        self.settle_timeout = settle_timeout
        self.emit = emit
        self.heart = Heart(store, runtime, emit)
        self.purger: Ticker | None = None
        self._waiting: dict[bytes, int] = {}

    # ------------------------------------------------------------------------------------- a whole call

    async def execute(self, call: Call) -> Outcome[Any]:
        ask, verdict = await self.acquire(call)
        if type(verdict) is Replay:
            return self.replay(call, verdict.record)
        run = self.begin(call, ask, verdict.record)
        if self.runtime.detaches(call.fn, call.options.inline):
            return await self.runtime.detach(self._perform(run))
        return await self._perform(run)

    def begin(self, call: Call, ask: Ask, record: Record) -> Run:
        """The key is ours: keep it alive from here until it is settled."""
        reach("claim.won")
        run = Run(self, call, ask, record, self.runtime.interrupt())
        self.heart.add(run)
        if self.emit is not None and record.attempts > 1:
            self.emit(TakenOver(call.scope, record.attempts))
        return run

    async def _perform(self, run: Run) -> Outcome[Any]:
        call = run.call
        token = _current.set(run)
        try:
            reach("run.started")
            value = await self.runtime.call(call.fn, call.args, call.kwargs, call.options.inline)
            reach("run.returned")
        except Exception as error:
            await self.fail(run, error)
            raise
        except BaseException as error:
            await self.lose(run, error)
            raise
        finally:
            _current.reset(token)
        if run.interrupt.fired:
            run.interrupt.absorb()
        return await self.complete(run, value)

    async def complete(self, run: Run, value: Any) -> Outcome[Any]:
        """The effect happened: record it, whatever that takes."""
        data, marker, problem = self._encode(run.call, value)
        options = run.call.options
        end = Settle(
            scope=run.scope,
            nonce=run.ask.nonce,
            kind=Kind.DONE,
            retention=options.retention,
            tombstone=options.tombstone,
            result=data,
            marker=marker,
            ref=run.ref,
            steps=steps.summarize(run.steps) if run.has_steps else None,
        )
        await self._record(run, end, value)
        if self.emit is not None:
            self.emit(Executed(run.scope, run.attempt, self.runtime.now() - run.won_at))
        if problem is not None:
            raise problem
        return Outcome(value, replayed=False, ref=run.ref, attempt=run.attempt, marker=marker)

    def _encode(self, call: Call, value: Any) -> tuple[bytes, str, CodecError | None]:
        if call.codec is None:
            return b"", "", None
        try:
            data = call.codec.encode(value, compress_over=call.options.compress_over)
        except CodecError as error:
            error.add_note("the effect happened and is recorded as done; it will not run again for this key")
            return b"", UNENCODABLE, error
        if len(data) > call.options.max_result:
            return b"", TOO_LARGE, None
        return data, "", None

    def replay(self, call: Call, record: Record) -> Outcome[Any]:
        """What the record holds, decoded afresh. Never writes, never runs anything."""
        if self.emit is not None:
            self.emit(Replayed(call.scope, record.attempts))
        if record.state is State.FAILED:
            failure = record.error or Failure("Exception")
            raise PreviousFailure(failure.type, failure.code, failure.message, attempt=record.attempts)
        if record.marker == UNENCODABLE and call.codec is not None:
            raise CodecError(
                f"{_name(call)} is done, but its result could not be encoded when it happened and was not kept; "
                f"it is not run again (ref={record.ref!r})"
            )
        if call.options.ref_type is not None and record.ref is not None:
            _check_ref(call, record.ref)
        value = self._decode(call, record)
        return Outcome(value, replayed=True, ref=record.ref, attempt=record.attempts, marker=record.marker)

    def _decode(self, call: Call, record: Record) -> Any:
        if call.codec is None or not record.result:
            return None
        try:
            return call.codec.decode(record.result)
        except CodecError as error:
            raise OutcomeUnknown(
                f"the stored result of {_name(call)} cannot be read ({error}); it is kept as it is: read it with the "
                "version or key that wrote it, or repair the key with resolve(...) or forget(...)",
                attempt=record.attempts,
                unreadable=True,
            ) from error

    # ------------------------------------------------------------------------------------------ claiming

    async def acquire(self, call: Call) -> tuple[Ask, Won | Replay]:
        """Own the key or learn its outcome; everything else raises."""
        ask, verdict = await self.ask_once(call)
        if type(verdict) is Won or type(verdict) is Replay:
            return ask, verdict
        return await self._contend(call, ask, verdict)

    async def ask_once(self, call: Call) -> tuple[Ask, Verdict]:
        """One claim, whatever its verdict."""
        options = call.options
        ask = Ask(
            scope=call.scope,
            nonce=os.urandom(16),
            lease=options.lease,
            retention=options.retention,
            policy=options.policy,
            fingerprint=call.fingerprint,
            fingerprint_version=FINGERPRINT_VERSION,
            labels=call.labels,
            secret_id=self.secrets.current,
        )
        return ask, await self.claim(ask)

    async def claim(self, ask: Ask) -> Verdict:
        reach("claim.sent")
        try:
            verdict = (await self.store.claim((ask,)))[0]
        except BaseException:
            # No answer: the store may have granted it. Nobody will run it, so nobody may wait for it.
            self.runtime.background(self._abandon(ask))
            raise
        if isinstance(verdict, Exception):
            self.runtime.background(self._abandon(ask))
            raise verdict
        return verdict

    async def _abandon(self, ask: Ask) -> None:
        """Release a claim whose answer was lost, as long as it could still be holding the key."""
        until = self.runtime.now() + ask.lease
        end = Settle(ask.scope, ask.nonce, Kind.RELEASED, ask.retention)
        pause = 0.02
        while self.runtime.now() < until:
            answer = await self._try_settle(end)
            # GONE may also mean that the claim is still on its way: look again until its lease would be over.
            if answer is Answer.OK or answer is Answer.LOST:
                return
            await self.runtime.sleep(min(pause, max(0.0, until - self.runtime.now())))
            pause *= 2

    async def _contend(self, call: Call, ask: Ask, verdict: Verdict) -> tuple[Ask, Won | Replay]:
        seat: _Seat | None = None
        try:
            while True:
                match verdict:
                    case Won() | Replay():
                        return ask, verdict
                    case Busy():
                        if seat is None:
                            # Subscribe, claim again, then wait: a settle in between is never missed.
                            seat = await self._sit(call, verdict)
                        elif await seat.park(verdict):
                            await seat.watch()
                    case Unknown():
                        ask = await self._probe(call, ask, verdict)
                    case Mismatch() | Expired():
                        raise self._refusal(call, verdict)
                verdict = await self.claim(ask)
        finally:
            if seat is not None:
                await seat.leave()

    def _refusal(self, call: Call, verdict: Mismatch | Expired) -> KeyMismatch | KeyExpired:
        if self.emit is not None:
            self.emit(Refused(call.scope, type(verdict).__name__.lower()))
        if isinstance(verdict, Mismatch):
            return KeyMismatch(
                f"{_name(call)} was used with another request; use a new key for a new request, or repeat the "
                "request that this key was made for"
            )
        return KeyExpired(
            f"{_name(call)} was used and its result is no longer kept (retention is over); "
            "use a new key if this is a new action"
        )

    async def _sit(self, call: Call, busy: Busy) -> _Seat:
        options = call.options
        sitting = self._waiting.get(call.scope.hash, 0)
        waits = options.wait > 0 and sitting < options.max_waiters
        if self.emit is not None:
            self.emit(Contended(call.scope, waits, busy.retry_after))
        if not waits:
            raise _in_progress(call, busy, crowded=options.wait > 0)
        seat = _Seat(self, call)
        self._waiting[call.scope.hash] = sitting + 1
        try:
            await seat.watch()
        except BaseException:
            await seat.leave()
            raise
        return seat

    def stand(self, scope: Scope) -> None:
        left = self._waiting.get(scope.hash, 0) - 1
        if left > 0:
            self._waiting[scope.hash] = left
        else:
            self._waiting.pop(scope.hash, None)

    # ------------------------------------------------------------------------------------ lost outcomes

    async def _probe(self, call: Call, ask: Ask, unknown: Unknown) -> Ask:
        """Let the caller's probe decide. Returns the ask to claim with; raises when it stays unknown."""
        record, probe = unknown.record, call.options.on_unknown
        if record is None or unknown.unreadable or not callable(probe):
            raise self._unknown(call, unknown)
        run = Run(self, call, ask, record, self.runtime.interrupt())
        token = _current.set(run)
        try:
            answer = await self.runtime.call(probe, call.args, {}, call.options.inline)
        finally:
            _current.reset(token)
        if isinstance(answer, Found):
            await self.settle_found(call, record, answer)
            return ask
        if answer is NOT_FOUND and unknown.policy is Policy.PROBE:
            return msgspec.structs.replace(ask, takeover=record.nonce)
        raise self._unknown(call, unknown)

    async def settle_found(self, call: Call, record: Record, found: Found) -> Answer:
        """A probe found the effect: write its result in the lost owner's place (a new nonce ends his rights)."""
        data, marker, problem = self._encode(call, found.value)
        if problem is not None:
            raise problem
        end = Settle(
            scope=call.scope,
            nonce=record.nonce,
            kind=Kind.DONE,
            retention=call.options.retention,
            tombstone=call.options.tombstone,
            result=data,
            marker=marker,
            ref=found.ref,
            new_nonce=os.urandom(16),
        )
        answer = (await self.store.settle((end,)))[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _unknown(self, call: Call, unknown: Unknown) -> OutcomeUnknown:
        if self.emit is not None:
            self.emit(Refused(call.scope, "unknown"))
        attempt = 0 if unknown.record is None else unknown.record.attempts
        why = (
            "its record cannot be read"
            if unknown.unreadable
            else f"attempt {attempt} ended without an outcome (policy {unknown.policy.value})"
        )
        return OutcomeUnknown(
            f"it is not known whether {_name(call)} happened: {why}. Look the effect up, then call "
            "resolve(key, value=…), resolve(key, error=…) or resolve(key, release=True)",
            attempt=attempt,
            unreadable=unknown.unreadable,
        )

    async def fail(self, run: Run, error: Exception) -> None:
        """The function raised: a known failure, decided by `on_error` (R9). The error itself goes to the caller."""
        if run.interrupt.fired:
            run.interrupt.absorb()
        decision = Release() if run.lease_lost else _decide(run, error)
        after = seconds("Release(after)", decision.after) if isinstance(decision, Release) else 0.0
        word = "release" if isinstance(decision, Release) else decision
        kind = {"release": Kind.RELEASED, "replay": Kind.FAILED, "hold": Kind.UNKNOWN}[word]
        policy = Policy.HOLD if kind is Kind.UNKNOWN and run.ask.policy is not Policy.PROBE else None
        await self._end_badly(run, kind, error, after=after, policy=policy, word=word)

    async def lose(self, run: Run, error: BaseException) -> None:
        """Cancelled, interrupted, exiting: the outcome is lost, and `on_unknown` decides at once (R10)."""
        if run.interrupt.fired:
            run.interrupt.absorb()
            self.heart.remove(run)
            raise LeaseLost(
                f"{_name(run.call)} was taken over by another owner; attempt {run.attempt} was cancelled"
            )
        kind = Kind.RELEASED if run.ask.policy is Policy.RETRY else Kind.UNKNOWN
        await self._end_badly(run, kind, error, after=0.0, policy=None, word="lost")

    async def fail_for_good(self, run: Run, error: BaseException | str) -> None:
        """A failure declared by hand: it is the outcome, and replayed as PreviousFailure."""
        options = run.call.options
        end = Settle(
            scope=run.scope,
            nonce=run.ask.nonce,
            kind=Kind.FAILED,
            retention=options.retention,
            tombstone=options.tombstone,
            error=failure_of(error),
            ref=run.ref,
        )
        await self._record(run, end, None)

    async def release(self, run: Run) -> None:
        """Give the key back without an outcome."""
        await self._record(
            run, Settle(run.scope, run.ask.nonce, Kind.RELEASED, run.call.options.retention), None
        )

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
            await self._record(run, end, None)
        except (NotRecorded, LeaseLost) as problem:
            error.add_note(f"semel: {problem}")

    # ----------------------------------------------------------------------------------------- recording

    async def _record(self, run: Run, end: Settle, value: Any) -> None:
        """Store the end of a run. Raises LeaseLost or NotRecorded, never leaves it undecided in silence."""
        reach("settle.sent")
        answer: Answer | Exception
        try:
            answer = (await self.store.settle((end,)))[0]
        except StoreUnavailable as error:
            answer = error
        except BaseException:
            # Cancelled in the middle of the write: it is repeatable, so write it again where nothing can cancel it.
            await self.runtime.protect(self._persist(run, end, value, None))
            raise
        if answer is Answer.OK:
            self.heart.remove(run)
        else:
            await self.runtime.protect(self._persist(run, end, value, answer))
        reach("settle.stored")

    async def _persist(self, run: Run, end: Settle, value: Any, answer: Answer | Exception | None) -> None:
        until = self.runtime.now() + self.settle_timeout
        pause = 0.02
        while True:
            if answer is None:
                answer = await self._try_settle(end)
            if isinstance(answer, Answer):
                if await self._accepted(run, answer):
                    self.heart.remove(run)
                    return
            elif self.runtime.now() >= until:
                self.runtime.background(self._keep_trying(run, end))
                raise self._not_recorded(run, value, answer)
            elif not isinstance(answer, StoreUnavailable) and end.result:
                # The store refuses this very result (too big for a packet, say): keep at least the fact.
                end = msgspec.structs.replace(end, result=b"", marker=TOO_LARGE)
            else:
                await self.runtime.sleep(min(pause, max(0.0, until - self.runtime.now())))
                pause = min(pause * 2, 0.5)
            answer = None

    async def _accepted(self, run: Run, answer: Answer) -> bool:
        """Whether the settle is in. A vanished record is claimed again with the same nonce and settled anew."""
        if answer is Answer.OK:
            return True
        if answer is Answer.GONE and await self._reclaim(run):
            return False
        run.lease_lost = True
        self.heart.remove(run)
        if self.emit is not None:
            self.emit(LeaseGone(run.scope, run.attempt))
        raise LeaseLost(
            f"{_name(run.call)} was taken over by another owner while attempt {run.attempt} ran; its result was not "
            "accepted. Read the key to see the outcome that counts"
        )

    async def _reclaim(self, run: Run) -> bool:
        try:
            verdict = (await self.store.claim((run.ask,)))[0]
        except StoreUnavailable:
            return True  # no answer is no refusal: the settle is tried again
        return isinstance(verdict, Won | StoreUnavailable)

    async def _try_settle(self, end: Settle) -> Answer | Exception:
        try:
            return (await self.store.settle((end,)))[0]
        except StoreUnavailable as error:
            return error

    def _not_recorded(self, run: Run, value: Any, error: Exception) -> NotRecorded:
        if self.emit is not None:
            self.emit(Unrecorded(run.scope, run.attempt, error))
        problem = NotRecorded(
            f"{_name(run.call)} ended, but the store has not taken its outcome within {self.settle_timeout:g} s "
            f"({error}); the write goes on in the background. Do not run the effect again",
            value=value,
        )
        problem.__cause__ = error
        return problem

    async def _keep_trying(self, run: Run, end: Settle) -> None:
        """While the process lives: the lease is renewed and the outcome offered, until the store takes it."""
        pause = 0.5
        while True:
            answer = await self._try_settle(end)
            if isinstance(answer, Answer):
                try:
                    if await self._accepted(run, answer):
                        break
                except LeaseLost:
                    break
            await self.runtime.sleep(pause)
            pause = min(pause * 1.5, 5.0)
        self.heart.remove(run)

    # ------------------------------------------------------------------------------------ steps and ids

    async def step(
        self,
        run: Run,
        name: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        request: Any,
        result_type: Any,
        on_unknown: Any,
    ) -> Any:
        check_key(name)
        codec = codec_for(fn, result_type)
        wanted = "" if request is None else fingerprint(request)
        known = run.steps.get(name)
        if known is not None and wanted and known.fingerprint and wanted != known.fingerprint:
            raise KeyMismatch(f"step {name!r} of {_name(run.call)} was made with another request")
        if known is not None and known.phase == "done":
            return codec.decode(known.value)
        policy = run.call.options.on_unknown if on_unknown is None else on_unknown
        if known is not None:
            found = await self._probe_step(run, name, policy, args)
            if found is not None:
                await self._note(
                    run, steps.Step(name, "done", run.clock(), codec.encode(found.value), wanted)
                )
                return found.value
        elif policy != "retry":
            await self._note(run, steps.Step(name, "started", run.clock(), b"", wanted))
        reach("step.started")
        value = await self.runtime.call(fn, args, kwargs, run.call.options.inline)
        reach("step.returned")
        await self._note(run, steps.Step(name, "done", run.clock(), codec.encode(value), wanted))
        reach("step.stored")
        return value

    async def _probe_step(self, run: Run, name: str, policy: Any, args: Sequence[Any]) -> Found | None:
        """A step was started by an attempt that was lost: Found, None to run it (again), or OutcomeUnknown."""
        if policy == "retry":
            return None
        answer = (
            await self.runtime.call(policy, args, {}, run.call.options.inline) if callable(policy) else None
        )
        if isinstance(answer, Found):
            return answer
        if answer is NOT_FOUND:
            return None
        run.stuck = True
        raise OutcomeUnknown(
            f"it is not known whether step {name!r} of {_name(run.call)} happened: look it up, then resolve the key",
            attempt=run.attempt,
        )

    async def new_id(self, run: Run, kind: str, name: str) -> str:
        label = f"id:{name}"
        known = run.steps.get(label)
        if known is None:
            text = ids.mint(kind, int(run.clock() * 1000), os.urandom(10)).text
            await self._note(run, steps.Step(label, "id", run.clock(), text.encode()))
        else:
            text = ids.parse(known.value.decode(), kind).text
        if run.ref is None:
            run.ref = text
        return text

    async def _note(self, run: Run, step: steps.Step) -> None:
        entry = steps.encode(step)
        known = run.steps
        size = sum(len(each.value) + len(each.name) for each in known.values()) + len(entry)
        if len(known) >= steps.MAX_STEPS and step.name not in known:
            raise ConfigurationError(
                f"a run has at most {steps.MAX_STEPS} steps; {step.name!r} would be one more"
            )
        if size > steps.MAX_BYTES:
            raise ConfigurationError(
                f"the steps of a run hold at most {steps.MAX_BYTES} bytes together; with {step.name!r} they would "
                "hold more: return a ref from the step instead of its data"
            )
        note = Note(run.scope, run.ask.nonce, entry, run.call.options.retention)
        answer = await self.store.note(note)
        if answer is not Answer.OK:
            run.lease_lost = True
            raise LeaseLost(f"{_name(run.call)} was taken over; step {step.name!r} was not accepted")
        known[step.name] = step

    async def close(self) -> None:
        self.heart.stop()
        if self.purger is not None:
            self.purger.stop()
        await self.runtime.drain(self.settle_timeout)


class _Seat:
    """A waiter of a busy key: woken by the settle where the store can, polling where it cannot."""

    __slots__ = ("_engine", "_pause", "_scope", "_until", "call", "parker", "unwatch")

    def __init__(self, engine: Engine, call: Call) -> None:
        self._engine = engine
        self._scope = call.scope
        self.call = call
        self.parker: Parker = engine.runtime.parker()
        self.unwatch: Unwatch | None = None
        self._until = engine.runtime.now() + call.options.wait
        self._pause = call.options.poll[0]

    async def watch(self) -> None:
        """Subscribe, or subscribe anew: after a wake-up somebody else, in another process, may run the key."""
        if self.unwatch is not None:
            unwatch, self.unwatch = self.unwatch, None
            await unwatch()
        self.unwatch = await self._engine.store.watch(self._scope, self.parker.wake)

    async def park(self, busy: Busy) -> bool:
        """Wait for a wake-up, but not past what the caller, the lease or the polling allows; True when woken."""
        left = self._until - self._engine.runtime.now()
        if left <= 0:
            raise _in_progress(self.call, busy)
        if self._engine.store.capabilities.notifies:
            pause = _SAFETY_POLL
        else:
            pause, self._pause = self._pause, min(self._pause * 1.5, self.call.options.poll[1])
        reach("wait.parked")
        # Not past the end of the lease: from then on the key is anybody's. 1 ms keeps a lapsing one from spinning.
        return await self.parker.park(min(left, pause, max(busy.retry_after, 0.001)))

    async def leave(self) -> None:
        self._engine.stand(self._scope)
        if self.unwatch is not None:
            await self.unwatch()


def _name(call: Call) -> str:
    scope = call.scope
    return f"key {mask(call.key)} of {scope.tenant}/{scope.operation}"


def _in_progress(call: Call, busy: Busy, *, crowded: bool = False) -> InProgress:
    if busy.delayed:
        text = f"{_name(call)} failed and may be tried again in {busy.retry_after:.3g} s"
    elif crowded:
        text = f"{_name(call)} is in progress and {call.options.max_waiters} callers wait for it already (max_waiters)"
    else:
        text = (
            f"{_name(call)} is in progress (attempt {busy.attempt}, lease for {busy.retry_after:.3g} s more); try "
            "again later, or pass wait=seconds to wait for its outcome"
        )
    return InProgress(text, retry_after=busy.retry_after, attempt=busy.attempt)


def _decide(run: Run, error: Exception) -> str | Release:
    """What a known failure means, by the caller's word or by the default that fits `on_unknown`."""
    if run.stuck:
        return "hold"
    decision = run.call.options.on_error
    if decision is None:
        return "release" if run.ask.policy is Policy.RETRY else "hold"
    if not callable(decision):
        return decision
    answer: Any = decision(error)
    if isinstance(answer, Release) or answer in ("release", "hold", "replay"):
        return answer  # type: ignore[no-any-return]
    raise ConfigurationError(
        f'on_error answered {answer!r} for {error!r}; it must answer "release", "hold", "replay" or Release(after=…)'
    )


def failure_of(error: BaseException | str) -> Failure:
    """An error as it is stored: cut so that no column overflows after the effect."""
    if isinstance(error, str):
        return Failure("Error", None, _cut(error, 2000))
    if isinstance(error, PreviousFailure):
        return Failure(error.type_name, error.code, _cut(error.message, 2000))
    code = getattr(error, "code", None)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not lose the failure
        message = "<the error has no readable text>"
    return Failure(
        _cut(type(error).__qualname__, 255),
        None if code is None else _cut(str(code), 64),
        _cut(message, 2000),
    )


def _cut(text: str, most: int) -> str:
    clean = text.encode("utf-8", "replace").decode().replace("\0", "�")
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def _check_ref(call: Call, ref: str) -> None:
    try:
        ids.parse(ref, call.options.ref_type)
    except InvalidKey as error:
        raise KeyMismatch(
            f"{_name(call)} holds the ref {ref!r}, not one of type {call.options.ref_type!r}"
        ) from error
