"""A keyed request meets the store: it is admitted, answered from what is stored, or refused. One body, both colours.

admit ──▶ Admitted: begin it
   ├────▶ Snapshot: the stored response
   ├────▶ Problem: the layer's own answer
   └────▶ None: the store is down and the route said fail_open
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Mapping
from typing import Final

import msgspec

from semel.bodies import BodyDamaged, BodyMissing
from semel.calls import Call, clean
from semel.edges import Edge
from semel.errors import (
    CodecError,
    ConfigurationError,
    InProgress,
    KeyExpired,
    KeyMismatch,
    OutcomeUnknown,
    StoreUnavailable,
)
from semel.face import Face
from semel.flow import Engine
from semel.hooks import Replayed, Unprotected
from semel.http.breaker import Breaker, Latency, Quota
from semel.http.budget import Budget
from semel.http.keys import core_key
from semel.http.problem import Problem
from semel.http.rules import Rules
from semel.http.snapshot import Snapshot
from semel.http.stored import CODEC, not_kept, repeated, stored
from semel.model import Ask, Record, Replay, State, Verdict, Won, view
from semel.points import reach
from semel.posting import Brief
from semel.run import run_or_none

__all__ = ["Admission", "Admitted", "Keyed"]

_MOST_LABELS: Final = 256
_SLACK: Final = 1 << 16  # headers and framing around a body of the largest size
_log = logging.getLogger("semel.http")


class Keyed(msgspec.Struct, frozen=True, gc=False):
    """What is known of a request before it is admitted."""

    key: str
    principal: str
    tenant: str | None
    fingerprint: bytes
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


class Admission:
    """Who may run, for one route's rules over one `Semel` or `AsyncSemel`."""

    def __init__(self, once: Face, rules: Rules, latency: Latency) -> None:
        self._rules = rules
        self._latency = latency
        self._breaker = Breaker()
        self._quota = None if rules.quota is None else Quota(rules.quota)
        self._budget = Budget(rules.store_timeout, once._timeout)  # noqa: SLF001 - our own
        given = {
            "lease": rules.lease,
            "retention": rules.retention,
            "tombstone": rules.tombstone,
            "max_waiters": rules.max_waiters,
            "max_result": rules.max_response + _SLACK,
            "result_type": bytes,
            "on_unknown": "hold" if rules.effects == "opaque" else "retry",
        }
        self.edge = Edge(once, given, codec=CODEC, readable="masked")
        self._labels: dict[str, Mapping[str, str]] = {}
        self._ring = once._ring  # noqa: SLF001 - our own

    async def admit(self, keyed: Keyed) -> Admitted | Snapshot | Problem | None:
        engine, breaker = self.edge.engine, self._breaker
        if breaker.failures and not breaker.allows(engine.runtime.now()):
            return self._closed(StoreUnavailable("the store failed a moment ago"), keyed)
        call = self._call(keyed)
        spent: tuple[str, str] | None = None
        try:
            if self._quota is not None or keyed.is_old:
                spent = self._spent(keyed, engine.runtime.now())
                problem = await self._turned_away(call, keyed, spent)
                if problem is not None:
                    return problem
            verdict: Verdict | Brief
            # As `engine.acquire`, but the store's first answer must come within the route's own time (H34).
            watch, task, before = self._budget.begin(engine)
            if watch is None or task is None:
                ask, verdict = await self._budget.claim(engine, call)
            else:  # as there, without a coroutine more around the wait
                try:
                    ask = engine._ask(call)  # noqa: SLF001 - as `ask_once` does
                    verdict = await engine.asker.brief(ask)
                except CancelledError as error:
                    watch.check(task, before, error)
                    raise
                finally:
                    watch.end(task)
                self._budget.has_answered = True
            if type(verdict) is not Won and not isinstance(verdict, (Brief, Replay)):
                self._check_nesting(call)
                ask, verdict = await engine._contend(call, ask, verdict)  # noqa: SLF001 - the rest of `acquire`
        except StoreUnavailable as error:
            breaker.failed(engine.runtime.now())
            return self._closed(error, keyed)
        except (KeyMismatch, InProgress, KeyExpired, OutcomeUnknown) as error:
            breaker.failures = 0
            self._refund(spent)
            return self._refusal(error)
        breaker.failures = 0
        if isinstance(verdict, Won):
            reach("http.admitted")
            return Admitted(engine, call, ask, verdict.record)
        found = self._found(engine, call, verdict, spent)
        if type(found) is Snapshot and found.spilled is not None:
            return await self._fetched(engine, call, found)
        return found

    async def early(self, keyed: Keyed) -> Snapshot | Problem | None:
        """The answer to a repetition whose body has not come yet, but is told by its digest (H22). None: it must come."""
        engine = self.edge.engine
        call = self._call(keyed)
        try:
            record, now = await self._budget.peek(engine, call.scope)
        except StoreUnavailable as error:
            self._breaker.failed(engine.runtime.now())
            return self._closed(error, keyed)
        is_over = record is not None and record.state in (State.DONE, State.FAILED) and record.expires > now
        if record is None or not is_over or (record.labels or {}).get("outline") != keyed.outline:
            return None
        found = self._replayed(engine, call, record)
        if type(found) is Snapshot and found.spilled is not None:
            return await self._fetched(engine, call, found)
        return found

    def _call(self, keyed: Keyed) -> Call:
        labels = self._labels.get(keyed.route)
        if labels is None:
            if len(self._labels) >= _MOST_LABELS:  # paths come from requests
                self._labels.clear()
            labels = self._labels[keyed.route] = {"route": clean(keyed.route[:255])}
        if keyed.outline:
            labels = {**labels, "outline": keyed.outline}
        return self.edge.call(
            core_key(keyed.key, keyed.principal),
            self.edge.tenant if keyed.tenant is None else keyed.tenant,
            keyed.operation,
            keyed.wait,
            keyed.fingerprint,
            labels,
        )

    def _found(
        self, engine: Engine, call: Call, verdict: Brief | Replay, spent: tuple[str, str] | None
    ) -> Snapshot | Problem:
        self._refund(spent)
        if isinstance(verdict, Brief):  # nobody is told: hooks leave no quick way
            return repeated(call, verdict)
        return self._replayed(engine, call, verdict.record)

    def _replayed(self, engine: Engine, call: Call, record: Record) -> Snapshot | Problem:
        if engine.emit is not None:
            engine.emit(Replayed(call.scope, record.attempts))
        return stored(call, record)

    async def _fetched(self, engine: Engine, call: Call, snapshot: Snapshot) -> Snapshot | Problem:
        """The response with its body, from where it was spilled to. It is never run again, whatever becomes of that."""
        spill, ring = self._rules.spill, self._ring
        if spill is None:
            _log.error("a body of %r was spilled, and this route has no spill= to read it from", call.scope)
            return not_kept(snapshot)
        try:
            body = await engine.runtime.call(spill.read, (call.scope, snapshot.spilled, ring), {}, False)
        except (BodyMissing, BodyDamaged, CodecError) as error:
            _log.error("the spilled body of %r cannot be given: %s", call.scope, error)
            return not_kept(snapshot)
        except Exception as error:  # noqa: BLE001 - whatever a store of bodies raises, it may answer later
            _log.warning("the store of bodies is unavailable: %s", error)
            return Problem.of("store-unavailable", retry_after=1.0)
        return msgspec.structs.replace(snapshot, body=body, kept=True)

    async def _turned_away(self, call: Call, keyed: Keyed, spent: tuple[str, str] | None) -> Problem | None:
        """Before the store is asked for the key: nobody has paid for a new one, or it is too old to be known."""
        if self._quota is not None and spent is None and await self._is_new(call):
            return Problem.of("quota-exceeded", retry_after=1.0)
        if keyed.is_old and await self._is_forgotten(call):
            self._refund(spent)
            return Problem.of("key-expired")
        return None

    async def _is_new(self, call: Call) -> bool:
        record, _ = await self._budget.peek(self.edge.engine, call.scope)
        return record is None

    async def _is_forgotten(self, call: Call) -> bool:
        """Nothing that a repetition could get: its handler may have asked for a longer retention, or still run."""
        record, now = await self._budget.peek(self.edge.engine, call.scope)
        return view(record, now) in (None, State.RELEASED, State.EXPIRED)

    def _spent(self, keyed: Keyed, now: float) -> tuple[str, str] | None:
        """Who has paid for a new key; None: he has none left, or they cost nothing."""
        who = keyed.tenant or "", keyed.principal
        return who if self._quota is not None and self._quota.spend(who, now) else None

    def _refund(self, who: tuple[str, str] | None) -> None:
        """Only new keys count."""
        if who is not None and self._quota is not None:
            self._quota.refund(who)

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
        if not self._rules.fail_open:
            _log.warning("the idempotency store is unavailable, refusing %s: %s", keyed.route, error)
            return Problem.of("store-unavailable", retry_after=1.0)
        _log.error(
            "the idempotency store is unavailable, running %s without protection: %s", keyed.route, error
        )
        if (emit := self.edge.engine.emit) is not None:
            emit(Unprotected(self._call(keyed).scope))
        return None

    def _refusal(self, error: Exception) -> Problem:
        if isinstance(error, InProgress):
            # Not later than the lease: then the key may be anybody's. Not much later than its handler usually takes.
            return Problem.of("in-progress", retry_after=min(error.retry_after, self._latency.typical()))
        if isinstance(error, KeyMismatch):
            return Problem.of("key-reused")
        return Problem.of("key-expired" if isinstance(error, KeyExpired) else "outcome-unknown")
