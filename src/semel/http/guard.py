"""One keyed request against the store: admitted, answered from what is stored, or refused. One body, both colours.

    admit ──▶ Admitted ──▶ begin ──▶ (the handler runs) ──▶ settle, fail or lose
       ├────▶ Snapshot: the stored response
       ├────▶ Problem: the layer's own answer
       └────▶ None: the store is down and the route said fail_open

Persist the outcome before the first byte of the response; claim with the fingerprint; never free a key whose handler
may have had its effect, unless `effects` says that a failed one left nothing behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from semel import steps
from semel.calls import Call, clean, failure_of
from semel.edges import Edge
from semel.errors import (
    CodecError,
    ConfigurationError,
    InProgress,
    KeyExpired,
    KeyMismatch,
    LeaseLost,
    NotRecorded,
    OutcomeUnknown,
    StoreUnavailable,
)
from semel.face import Face
from semel.flow import Engine
from semel.hooks import Executed, Failed, Replayed, Unprotected
from semel.http.breaker import Breaker, Latency, Quota
from semel.http.budget import Budget
from semel.http.head import Head, read_head
from semel.http.keys import core_key
from semel.http.problem import DEFAULT_BASE, PROBLEM_TYPE, Problem
from semel.http.reply import Headers, Replies, Reply
from semel.http.rules import Rules, Word
from semel.http.snapshot import Snapshot
from semel.model import Ask, Failure, Kind, Policy, Record, Replay, Settle, State, Won, view
from semel.points import reach
from semel.recording import TOO_LARGE
from semel.results import codec_for
from semel.run import Run, run_or_none

__all__ = ["Admitted", "Guard", "Keyed"]

STARTED: Final = "http.response"  # the step that says: the effect is over, its response was on its way
_CODEC: Final = codec_for(None, bytes)
_MOST_LABELS: Final = 256
_SLACK: Final = 1 << 16  # headers and framing around a body of the largest size
_KINDS: Final[Mapping[Word, Kind]] = {
    "store": Kind.DONE,
    "replay": Kind.FAILED,
    "release": Kind.RELEASED,
    "hold": Kind.UNKNOWN,
}
# What is given again for a handler that raised: as most servers say it.
_FAILED: Final = Snapshot(500, [(b"content-type", b"text/plain; charset=utf-8")], b"Internal Server Error")
_log = logging.getLogger("semel.http")


class _Said(msgspec.Struct, frozen=True):
    """What matters of a problem that a handler has answered."""

    type: str
    retryable: bool = False


_decode_problem: Final = msgspec.json.Decoder(_Said).decode


class Keyed(msgspec.Struct, frozen=True, gc=False):
    """What is known of a request before it is admitted."""

    key: str
    principal: str
    tenant: str | None
    fingerprint: str
    wait: float
    route: str
    """Method and path, for people."""
    operation: str = "http"
    outline: str = ""
    """What was told of the request before its body came, where its client gave a digest."""
    is_old: bool = False
    """The key tells its own age, and nothing is kept for so long by itself (H35)."""


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """The key is ours: `begin` at once, in the task that will run the handler."""

    engine: Engine
    call: Call
    ask: Ask
    record: Record


class Guard:
    """One route's rules over one `Semel` or `AsyncSemel`."""

    def __init__(self, once: Face, rules: Rules) -> None:
        self.once = once
        self.rules = rules
        self.breaker = Breaker()
        self.latency = Latency()
        self.quota = None if rules.quota is None else Quota(rules.quota)
        self.replies = Replies(rules, once._emit)  # noqa: SLF001 - our own
        self._budget = Budget(rules.store_timeout, once._timeout)  # noqa: SLF001 - our own
        self.sources = tuple(_source(source) for source in rules.sources)
        """Where the key comes from: kind, name, and the name as a header line has it."""
        given = {
            "lease": rules.lease,
            "retention": rules.retention,
            "tombstone": rules.tombstone,
            "max_waiters": rules.max_waiters,
            "max_result": rules.max_response + _SLACK,
            "result_type": bytes,
            "on_unknown": "hold" if rules.effects == "opaque" else "retry",
        }
        self._edge = Edge(once, given, codec=_CODEC, readable="masked")
        self._labels: dict[str, Mapping[str, str]] = {}

    @property
    def engine(self) -> Engine:
        return self._edge.engine

    # ----------------------------------------------------------------------------------------------- admission
    async def admit(self, keyed: Keyed) -> Admitted | Snapshot | Problem | None:
        engine = self.engine
        now = engine.runtime.now()
        if not self.breaker.allows(now):
            return self._closed(StoreUnavailable("the store failed a moment ago"), keyed)
        call = self._call(keyed)
        who, spent = (keyed.tenant or "", keyed.principal), False
        try:
            if self.quota is not None:
                spent = self.quota.spend(who, now)
                if not spent and await self._is_new(call):
                    return Problem.of("quota-exceeded", retry_after=1.0)
            if keyed.is_old and await self._is_forgotten(call):
                if spent:
                    self._refund(who)
                return Problem.of("key-expired")
            # As `engine.acquire`, but the store's first answer must come within the route's own time (H34).
            ask, verdict = await self._budget.claim(engine, call)
            if type(verdict) is not Won and type(verdict) is not Replay:
                self._check_nesting(call)
                ask, verdict = await engine._contend(call, ask, verdict)  # noqa: SLF001 - the rest of `acquire`
        except StoreUnavailable as error:
            self.breaker.failed(engine.runtime.now())
            return self._closed(error, keyed)
        except (KeyMismatch, InProgress, KeyExpired, OutcomeUnknown) as error:
            self.breaker.succeeded()
            if spent:
                self._refund(who)
            return self._refusal(error)
        self.breaker.succeeded()
        if type(verdict) is Replay:
            if spent:
                self._refund(who)
            return self._stored(engine, call, verdict.record)
        reach("http.admitted")
        return Admitted(engine, call, ask, verdict.record)

    async def early(self, keyed: Keyed) -> Snapshot | Problem | None:
        """The answer to a repetition whose body has not come yet, but is told by its digest (H22). None: it must come."""
        engine = self.engine
        call = self._call(keyed)
        try:
            record, now = await self._budget.peek(engine, call.scope)
        except StoreUnavailable as error:
            self.breaker.failed(engine.runtime.now())
            return self._closed(error, keyed)
        is_over = record is not None and record.state in (State.DONE, State.FAILED) and record.expires > now
        if record is None or not is_over or (record.labels or {}).get("outline") != keyed.outline:
            return None
        return self._stored(engine, call, record)

    def _call(self, keyed: Keyed) -> Call:
        labels = self._labels.get(keyed.route)
        if labels is None:
            if len(self._labels) >= _MOST_LABELS:  # paths come from requests
                self._labels.clear()
            labels = self._labels[keyed.route] = {"route": clean(keyed.route[:255])}
        if keyed.outline:
            labels = {**labels, "outline": keyed.outline}
        return self._edge.call(
            core_key(keyed.key, keyed.principal),
            tenant=self._edge.tenant if keyed.tenant is None else keyed.tenant,
            operation=keyed.operation,
            wait=keyed.wait,
            fingerprint=bytes.fromhex(keyed.fingerprint),
            labels=labels,
        )

    async def _is_new(self, call: Call) -> bool:
        record, _ = await self._budget.peek(self.engine, call.scope)
        return record is None

    async def _is_forgotten(self, call: Call) -> bool:
        """Nothing that a repetition could get: its handler may have asked for a longer retention, or still run."""
        record, now = await self._budget.peek(self.engine, call.scope)
        return view(record, now) in (None, State.RELEASED, State.EXPIRED)

    def _refund(self, who: tuple[str, str]) -> None:
        """Only new keys count."""
        if self.quota is not None:
            self.quota.refund(who)

    @staticmethod
    def _check_nesting(call: Call) -> None:
        """A request that waits for itself: its key is held by the handler that it would run."""
        running = run_or_none()
        if running is not None and running.scope == call.scope:
            route = (call.labels or {}).get("route", "this route")
            raise ConfigurationError(
                f"{route} is guarded twice, by a middleware and by a decorator: leave the route out of the middleware "
                "(routes=), or take the decorator away"
            )

    def _closed(self, error: StoreUnavailable, keyed: Keyed) -> Problem | None:
        if not self.rules.fail_open:
            _log.warning("the idempotency store is unavailable, refusing %s: %s", keyed.route, error)
            return Problem.of("store-unavailable", retry_after=1.0)
        _log.error(
            "the idempotency store is unavailable, running %s without protection: %s", keyed.route, error
        )
        if self.engine.emit is not None:
            self.engine.emit(Unprotected(self._call(keyed).scope))
        return None

    def _refusal(self, error: Exception) -> Problem:
        if isinstance(error, InProgress):
            # Not later than the lease: then the key may be anybody's. Not much later than its handler usually takes.
            return Problem.of("in-progress", retry_after=min(error.retry_after, self.latency.typical()))
        if isinstance(error, KeyMismatch):
            return Problem.of("key-reused")
        return Problem.of("key-expired" if isinstance(error, KeyExpired) else "outcome-unknown")

    def _stored(self, engine: Engine, call: Call, record: Record) -> Snapshot | Problem:
        if engine.emit is not None:
            engine.emit(Replayed(call.scope, record.attempts))
        if not record.result:
            # Settled by hand, or too large even without its body: what happened is known, its response is not.
            outcome = "failed" if record.state is State.FAILED else "done"
            return Problem.of("response-not-stored", outcome=outcome)
        try:
            snapshot = Snapshot.decode(_CODEC.decode(record.result))
        except CodecError as error:
            _log.error("the stored response of %r cannot be read: %s", call.scope, error)
            return Problem.of("outcome-unknown")
        if not snapshot.kept:
            return self._not_kept(snapshot)
        # Decoded a moment ago, so nobody else has it: no copy for one field.
        msgspec.structs.force_setattr(snapshot, "left", max(0.0, record.expires - time.time()))
        return snapshot

    def _not_kept(self, snapshot: Snapshot) -> Problem:
        extra: dict[str, Any] = (
            {"original_status": snapshot.status} if snapshot.status else {"outcome": "done"}
        )
        if (location := snapshot.header(b"location")) is not None:
            extra["location"] = location
        return Problem.of("response-not-stored", **extra)

    # --------------------------------------------------------------------------------------------- while it runs
    def begin(self, admitted: Admitted) -> Run:
        return admitted.engine.begin(admitted.call, admitted.ask, admitted.record)

    async def resumed(self, run: Run) -> Problem | None:
        """An earlier attempt had begun to answer when it died: the effect is over, its response is lost (H19)."""
        try:
            known = run.steps.get(STARTED) if run.has_steps else None
            if known is not None:
                snapshot = self._begun(run, known.value)
                problem = self._not_kept(snapshot)
                return await self._recorded(run, snapshot, "store") or problem
        except Exception as error:
            await self.engine.fail(run, error)  # which leaves the steps: the next attempt looks at them again
            raise
        reach("run.started")
        return None

    @staticmethod
    def _begun(run: Run, note: bytes) -> Snapshot:
        try:
            return Snapshot.decode(_CODEC.decode(note))
        except CodecError as error:
            _log.error("what the response of %r was cannot be read: %s", run.scope, error)
            return Snapshot(0, kept=False)

    async def started(self, run: Run, status: int, headers: Headers) -> Headers | Problem:
        """The response of a stream begins: remember that the handler's effect is over before its first byte leaves.

        The headers to send. A problem: that could not be remembered, so the stream must not begin.
        """
        head = read_head(self.rules, status, headers)
        if head.kind.startswith(b"text/event-stream"):
            if head.word != "release":  # the handler has returned: what it did is not done again
                await self._recorded(run, Snapshot(status, head.stored, kept=False), "store")
            raise ConfigurationError(
                "a keyed request was answered with server-sent events: they need an event log to attach to (events=), "
                "which this version does not have; use a GET for the stream, or leave the route out (routes=)"
            )
        sent = self.replies.first(head.word, head.sent, head.retention)
        if head.word == "release":
            return sent
        snapshot = Snapshot(status, head.stored, kept=False)
        try:
            await self._noted(run, snapshot)
        except Exception as error:  # noqa: BLE001 - the effect happened: whatever it is, the key must not be freed
            _log.warning("a stream of %r could not be begun: %s", run.scope, error)
            pending = Problem.of("outcome-pending", retry_after=1.0)
            return await self._recorded(run, snapshot, "store") or pending
        return sent

    async def _noted(self, run: Run, snapshot: Snapshot) -> None:
        note = snapshot.encode()
        await self.engine.stepper.step(run, STARTED, self._giver(note), (), {}, None, bytes, None)
        reach("http.responding")

    def _giver(self, note: bytes) -> Callable[[], Any]:
        if self.engine.runtime.colour == "sync":
            return lambda: note

        async def give() -> bytes:
            return note

        return give

    # ------------------------------------------------------------------------------------------------ the outcome
    async def settle(
        self, run: Run, status: int, headers: Headers, body: bytes | None, *, passing: bool = False
    ) -> Headers | Problem:
        """Record what became of the request, before its response is sent: the headers to send, or a problem in its place.

        `body` None: it was longer than `max_response`. `passing`: nothing of the application has run.
        """
        reach("run.returned")
        try:
            head = read_head(self.rules, status, headers)
            word: Word = "release" if passing or self._is_passing(head, body) else head.word
            kept = body is not None and len(body) <= self.rules.max_response
            snapshot = Snapshot(status, head.stored, body if kept and body else b"", kept=kept)
            end = self._end_of(run, snapshot, word, head.retention)
        except Exception:  # of ours, or of stored=: what the handler did is not done again
            await self.replaced(run, status)
            raise
        if run.settling:  # its end is recorded, and what is said in its place changes nothing
            return self.replies.first("release", head.sent)
        engine = run._engine  # noqa: SLF001 - our own
        self.latency.add(engine.runtime.now() - run.won_at)
        try:  # as `_recorded`, without a coroutine more around the write
            await engine.recorder.record(run, end, None)
        except (NotRecorded, LeaseLost) as error:
            problem = self._unrecorded(error, word)
            if problem is not None:
                return problem
        else:
            self._tell(engine, run, word)
        return self.replies.first(word, head.sent, head.retention)

    def word(self, status: int, headers: Headers, body: bytes | None) -> Word:
        """What a whole response means for its key; `settle` records just this."""
        head = read_head(self.rules, status, headers)
        return "release" if self._is_passing(head, body) else head.word

    def _is_passing(self, head: Head, body: bytes | None) -> bool:
        """A call of the core inside of the handler met a key in progress, say, and `install` answered so.

        That is true only for now: stored, it would be given again for as long as responses are kept.
        """
        if head.kind != PROBLEM_TYPE or not body or self.rules.effects == "opaque":
            return False
        try:
            said = _decode_problem(body)
        except msgspec.MsgspecError:
            return False
        return said.retryable and said.type.startswith((DEFAULT_BASE, self.rules.problem_base))

    async def _recorded(
        self, run: Run, snapshot: Snapshot, word: Word, failure: Failure | None = None
    ) -> Problem | None:
        engine = run._engine  # noqa: SLF001 - our own
        end = self._end_of(run, snapshot, word, None)
        try:
            await engine.recorder.record(
                run, end if failure is None else msgspec.structs.replace(end, error=failure), None
            )
        except (NotRecorded, LeaseLost) as error:
            return self._unrecorded(error, word)
        self._tell(engine, run, word)
        return None

    @staticmethod
    def _unrecorded(error: NotRecorded | LeaseLost, word: Word) -> Problem | None:
        if isinstance(error, LeaseLost):
            # Somebody else owns the key now, and his outcome counts: this response must not be believed.
            return Problem.of("in-progress", retry_after=1.0)
        return Problem.of("outcome-pending", retry_after=1.0) if word in ("store", "replay") else None

    @staticmethod
    def _tell(engine: Engine, run: Run, word: Word) -> None:
        if word == "store" and engine.emit is not None:
            engine.emit(Executed(run.scope, run.attempt, engine.runtime.now() - run.won_at))

    def _end_of(self, run: Run, snapshot: Snapshot, word: Word, retention: float | None) -> Settle:
        options = run.call.options
        answered = word in ("store", "replay")
        encoded = _CODEC.encode(snapshot.encode(), compress_over=options.compress_over) if answered else b""
        fits = len(encoded) <= options.max_result
        return Settle(
            run.scope,
            run.ask.nonce,
            _KINDS[word],
            options.retention if retention is None else retention,
            options.tombstone if answered else 0.0,
            encoded if fits else b"",
            "" if fits else TOO_LARGE,
            run.ref,
            Failure("HTTPStatus", str(snapshot.status), "") if word in ("replay", "hold") else None,
            policy=Policy.HOLD if word == "hold" else None,
            steps=self._steps(run, answered=answered) if run.has_steps else None,
        )

    @staticmethod
    def _steps(run: Run, *, answered: bool) -> bytes:
        """What stays of the steps: not that a response had begun, because whoever gets here knows how it ended."""
        kept = {name: step for name, step in run.steps.items() if name != STARTED}
        return steps.summarize(kept) if answered else b"".join(map(steps.encode, kept.values()))

    @property
    def keeps_failures(self) -> bool:
        """A handler that raised is answered with 500, and so is every repetition (H15). Else its key is free, or held."""
        rules = self.rules
        return rules.stored == "everything" or (
            rules.effects == "opaque" and rules.stored in ("final", "success")
        )

    async def fail(self, run: Run, error: Exception) -> Reply | None:
        """The handler raised, or its stream broke: `effects` decides (H15). What is recorded already stays.

        A Reply: what every repetition will get; send it now too, if nothing has been sent (H11).
        """
        if run.settling:
            return None
        if self.rules.effects != "opaque" and _has_begun(run):
            await self._recorded(run, Snapshot(500), "release")
        elif run.lease_lost or not self.keeps_failures:
            await self.engine.fail(run, error)
        else:
            return await self._failed(run, error)
        return None

    async def _failed(self, run: Run, error: Exception) -> Reply:
        if self.engine.emit is not None:
            self.engine.emit(Failed(run.scope, run.attempt, "replay", error))
        problem = await self._recorded(run, _FAILED, "replay", failure_of(error))
        if problem is not None:
            return self.replies.problem(problem)
        length = (b"content-length", b"%d" % len(_FAILED.body))
        return Reply(_FAILED.status, self.replies.first("replay", [*_FAILED.headers, length]), _FAILED.body)

    async def replaced(self, run: Run, status: int) -> None:
        """Another response was sent in place of the handler's: what happened is kept, what was said is not.

        Also where a handler has returned and we could not read or record its response: its key must not be freed.
        """
        if run.settling:
            return
        await self._recorded(run, Snapshot(status, kept=False), "store")

    async def lose(self, run: Run, error: BaseException) -> Problem | None:
        """Cancelled or interrupted: nobody knows how far the handler came. A problem: because another owner has the key."""
        try:
            await self.engine.lose(run, error)
        except LeaseLost:
            return Problem.of("in-progress", retry_after=1.0)
        return None


def _has_begun(run: Run) -> bool:
    try:
        return run.has_steps and STARTED in run.steps
    except msgspec.DecodeError:
        return False  # a newer version wrote them, perhaps; no reason to keep the key


def _source(text: str) -> tuple[str, str, bytes]:
    kind, _, name = text.partition(":")
    return kind, name, name.encode("latin-1", "replace")
