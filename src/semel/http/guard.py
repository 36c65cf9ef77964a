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
from collections.abc import Callable
from typing import Any, Final

import msgspec

from semel import steps
from semel.calls import Call, clean
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
from semel.hooks import Replayed, Unprotected
from semel.http.breaker import Breaker, Latency, Quota
from semel.http.keys import core_key
from semel.http.problem import DEFAULT_BASE, PROBLEM_TYPE, Problem
from semel.http.rules import Rules, Word, control_of, storable, word_for
from semel.http.snapshot import Snapshot
from semel.keys import make_scope
from semel.model import Ask, Failure, Kind, Policy, Record, Replay, Settle, State
from semel.options import Options, resolve
from semel.points import reach
from semel.results import codec_for
from semel.run import Run

__all__ = ["Admitted", "Guard", "Keyed"]

STARTED: Final = "http.response"  # the step that says: the effect is over, its response was on its way
_CODEC: Final = codec_for(None, bytes)
_MOST_OPTIONS: Final = 256
_SLACK: Final = 1 << 16  # headers and framing around a body of the largest size
_log = logging.getLogger("semel.http")


class _Said(msgspec.Struct, frozen=True):
    """What matters of a problem that a handler has answered."""

    type: str
    retryable: bool = False


_decode_problem: Final = msgspec.json.Decoder(_Said).decode


class Keyed(msgspec.Struct, frozen=True):
    """What is known of a request before it is admitted."""

    key: str
    principal: str
    tenant: str | None
    fingerprint: str
    wait: float
    route: str
    """Method and path, for people."""
    operation: str = "http"


class Admitted(msgspec.Struct, frozen=True):
    """The key is ours: `begin` at once, in the task that will run the handler."""

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
        self._options: dict[str, Any] = {
            "lease": rules.lease,
            "retention": rules.retention,
            "tombstone": rules.tombstone,
            "max_waiters": rules.max_waiters,
            "max_result": rules.max_response + _SLACK,
            "result_type": bytes,
            "on_unknown": "hold" if rules.effects == "opaque" else "retry",
        }
        self._known: dict[tuple[float, str, str], Options] = {}

    @property
    def engine(self) -> Engine:
        engine: Engine = self.once._engine()  # type: ignore[attr-defined]  # noqa: SLF001 - each face has its own
        return engine

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
                    return self.rules.problem(Problem.of("quota-exceeded", retry_after=1.0))
            ask, verdict = await engine.acquire(call)
        except StoreUnavailable as error:
            self.breaker.failed(engine.runtime.now())
            return self._closed(error, keyed)
        except (KeyMismatch, InProgress, KeyExpired, OutcomeUnknown) as error:
            self.breaker.succeeded()
            return self.rules.problem(self._refusal(error))
        self.breaker.succeeded()
        if isinstance(verdict, Replay):
            if self.quota is not None and spent:
                self.quota.refund(who)  # only new keys count
            return self._stored(call, verdict.record)
        reach("http.admitted")
        return Admitted(call, ask, verdict.record)

    def _call(self, keyed: Keyed) -> Call:
        face = self.once
        tenant = face._defaults.tenant if keyed.tenant is None else keyed.tenant  # noqa: SLF001 - our own
        name = keyed.wait, tenant, keyed.operation
        options = self._known.get(name)
        if options is None:
            if len(self._known) >= _MOST_OPTIONS:  # tenants and routes come from requests
                self._known.clear()
            words = {"wait": keyed.wait, "tenant": tenant, "operation": keyed.operation}
            options = self._known[name] = resolve(face._defaults, self._options | words)  # noqa: SLF001
        key = core_key(keyed.key, keyed.principal)
        return Call(
            make_scope(face._prefix, tenant, keyed.operation, key, "masked"),  # noqa: SLF001
            key,
            options,
            codec=_CODEC,
            fingerprint=bytes.fromhex(keyed.fingerprint),
            labels={"route": clean(keyed.route[:255])},
        )

    async def _is_new(self, call: Call) -> bool:
        record, _ = await self.engine.store.peek(call.scope)
        return record is None

    def _closed(self, error: StoreUnavailable, keyed: Keyed) -> Problem | None:
        if not self.rules.fail_open:
            _log.warning("the idempotency store is unavailable, refusing %s: %s", keyed.route, error)
            return self.rules.problem(Problem.of("store-unavailable", retry_after=1.0))
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

    def _stored(self, call: Call, record: Record) -> Snapshot | Problem:
        emit = self.engine.emit
        if emit is not None:
            emit(Replayed(call.scope, record.attempts))
        if not record.result or call.codec is None:
            # Settled by hand, or too large even without its body: what happened is known, its response is not.
            outcome = "failed" if record.state is State.FAILED else "done"
            return self.rules.problem(Problem.of("response-not-stored", outcome=outcome))
        try:
            snapshot = Snapshot.decode(call.codec.decode(record.result))
        except CodecError as error:
            _log.error("the stored response of %r cannot be read: %s", call.scope, error)
            return self.rules.problem(Problem.of("outcome-unknown"))
        if not snapshot.kept:
            return self._not_kept(snapshot)
        return msgspec.structs.replace(snapshot, left=max(0.0, record.expires - time.time()))

    def _not_kept(self, snapshot: Snapshot) -> Problem:
        extra: dict[str, Any] = {"original_status": snapshot.status}
        if (location := snapshot.header(b"location")) is not None:
            extra["location"] = location
        return self.rules.problem(Problem.of("response-not-stored", **extra))

    # --------------------------------------------------------------------------------------------- while it runs
    def begin(self, admitted: Admitted) -> Run:
        return self.engine.begin(admitted.call, admitted.ask, admitted.record)

    async def resumed(self, run: Run) -> Problem | None:
        """An earlier attempt had begun to answer when it died: the effect is over, its response is lost (H19)."""
        known = run.steps.get(STARTED) if run.has_steps else None
        if known is None or run.call.codec is None:
            reach("run.started")
            return None
        snapshot = Snapshot.decode(run.call.codec.decode(known.value))
        problem = self._not_kept(snapshot)
        return await self._recorded(run, snapshot, "store") or problem

    async def started(self, run: Run, status: int, headers: list[tuple[bytes, bytes]]) -> Problem | None:
        """The response of a stream begins: remember that the handler's effect is over before its first byte leaves.

        A problem: that could not be remembered, so the stream must not begin.
        """
        if any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        ):
            raise ConfigurationError(
                "a keyed request was answered with server-sent events: they need an event log to attach to (events=), "
                "which this version does not have; use a GET for the stream, or leave the route out (routes=)"
            )
        if word_for(self.rules, status, control_of(headers)[0]) == "release":
            return None
        snapshot = Snapshot(status, storable(self.rules, headers), kept=False)
        try:
            await self._noted(run, snapshot)
        except Exception as error:  # noqa: BLE001 - the effect happened: whatever it is, the key must not be freed
            _log.warning("a stream of %r could not be begun: %s", run.scope, error)
            pending = self.rules.problem(Problem.of("outcome-pending", retry_after=1.0))
            return await self._recorded(run, snapshot, "store") or pending
        return None

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
        self,
        run: Run,
        status: int,
        headers: list[tuple[bytes, bytes]],
        body: bytes | None,
        *,
        passing: bool = False,
    ) -> Problem | None:
        """Record what became of the request, before its response is sent. A problem is sent in its place.

        `body` None: it was longer than `max_response`. `passing`: nothing of the application has run.
        """
        reach("run.returned")
        retention = control_of(headers)[1]
        word = self.word(status, headers, body, passing=passing)
        self.latency.add(self.engine.runtime.now() - run.won_at)
        kept = body is not None and len(body) <= self.rules.max_response
        snapshot = Snapshot(status, storable(self.rules, headers), body if kept and body else b"", kept=kept)
        return await self._recorded(run, snapshot, word, retention)

    def word(
        self, status: int, headers: list[tuple[bytes, bytes]], body: bytes | None, *, passing: bool = False
    ) -> Word:
        """What a whole response means for its key; `settle` records just this."""
        if passing or self._is_passing(headers, body):
            return "release"
        return word_for(self.rules, status, control_of(headers)[0])

    def _is_passing(self, headers: list[tuple[bytes, bytes]], body: bytes | None) -> bool:
        """A call of the core inside of the handler met a key in progress, say, and `install` answered so.

        That is true only for now: stored, it would be given again for as long as responses are kept.
        """
        kinds = [value for name, value in headers if name.lower() == b"content-type"]
        if self.rules.effects == "opaque" or not body or kinds != [PROBLEM_TYPE]:
            return False
        try:
            said = _decode_problem(body)
        except msgspec.MsgspecError:
            return False
        return said.retryable and said.type.startswith((DEFAULT_BASE, self.rules.problem_base))

    async def _recorded(
        self, run: Run, snapshot: Snapshot, word: Word, retention: float | None = None
    ) -> Problem | None:
        try:
            if word == "store" and retention is None:
                await self.engine.complete(run, snapshot.encode())
            else:
                await self.engine.recorder.record(run, self._end(run, snapshot, word, retention), None)
        except NotRecorded:
            if word in ("store", "replay"):
                return self.rules.problem(Problem.of("outcome-pending", retry_after=1.0))
        except LeaseLost:
            # Somebody else owns the key now, and his outcome counts: this response must not be believed.
            return self.rules.problem(Problem.of("in-progress", retry_after=1.0))
        return None

    def _end(self, run: Run, snapshot: Snapshot, word: Word, retention: float | None) -> Settle:
        options = run.call.options
        kept = options.retention if retention is None else retention
        kind = {"store": Kind.DONE, "replay": Kind.FAILED, "release": Kind.RELEASED, "hold": Kind.UNKNOWN}[
            word
        ]
        answered = word in ("store", "replay") and run.call.codec is not None
        failure = Failure("HTTPStatus", str(snapshot.status), "") if word in ("replay", "hold") else None
        return Settle(
            scope=run.scope,
            nonce=run.ask.nonce,
            kind=kind,
            retention=kept,
            tombstone=options.tombstone if answered else 0.0,
            result=run.call.codec.encode(snapshot.encode()) if answered and run.call.codec else b"",
            ref=run.ref,
            error=failure,
            policy=Policy.HOLD if word == "hold" else None,
            steps=self._steps(run, answered=answered) if run.has_steps else None,
        )

    @staticmethod
    def _steps(run: Run, *, answered: bool) -> bytes:
        """What stays of the steps: not that a response had begun, because whoever gets here knows how it ended."""
        kept = {name: step for name, step in run.steps.items() if name != STARTED}
        return steps.summarize(kept) if answered else b"".join(map(steps.encode, kept.values()))

    async def fail(self, run: Run, error: Exception) -> None:
        """The handler raised, or its stream broke: `effects` decides (H15)."""
        if run.has_steps and STARTED in run.steps and self.rules.effects != "opaque":
            await self._recorded(run, Snapshot(500), "release")
        elif self.rules.stored == "everything":
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await self._recorded(run, Snapshot(500, headers, b"Internal Server Error"), "replay")
        else:
            await self.engine.fail(run, error)

    async def replaced(self, run: Run, status: int) -> None:
        """Another response was sent in place of the handler's: what happened is kept, what was said is not."""
        await self._recorded(run, Snapshot(status, kept=False), "store")

    async def lose(self, run: Run, error: BaseException) -> None:
        """Cancelled or interrupted: nobody knows how far the handler came."""
        await self.engine.lose(run, error)
