"""Reconciling: go through lost runs, and settle what registered probes and functions can settle. One body for both colours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from semel import model
from semel.calls import Call, nothing_to_run
from semel.errors import (
    ConfigurationError,
    InProgress,
    KeyExpired,
    OutcomeUnknown,
    PreviousFailure,
    SemelError,
    StoreUnavailable,
)
from semel.flow import Engine
from semel.hooks import Unreconciled
from semel.keeping import may_be_of, settled
from semel.model import Answer, Kind, Record, Settle, State
from semel.options import NOT_FOUND, Found, check_probe, count
from semel.run import MaskedRun, Run, _current
from semel.store import Query
from semel.typed import CallOptions, Recovering
from semel.witness import Witness

if TYPE_CHECKING:
    from semel.once import AsyncSemel, Semel

__all__ = ["Reconciled", "Recovery", "reconcile"]

_PAGE: Final = 500
_PATIENCE: Final = 100  # it looks at so many times its limit at most
_LOST: Final = frozenset({State.RUNNING, State.UNKNOWN})
_ELSEWHERE: Final = (InProgress, PreviousFailure, KeyExpired)
"""Another one has the key, or settled it, since it was looked at: there is nothing left to do about it."""
_MEANWHILE: Final = (*_ELSEWHERE, OutcomeUnknown)
"""What a resumed run may meet though nothing went wrong; of the last one nobody can tell yet."""
_SEEN_TO: Final = "seen to"


class Recovery(msgspec.Struct, frozen=True):
    """What `reconcile` does about lost runs of one operation. Both functions get the record."""

    probe: Callable[..., Any] | None
    resume: Callable[..., Any] | None
    masked: bool = False
    options: Recovering = {}
    """How what it settles is kept, where that is not as the face says."""


class Reconciled(msgspec.Struct, frozen=True):
    """What a reconcile found and did. `left` are the keys that still need a person, `failures` those that something went wrong with.

    Keys are as records show them.
    """

    found: int = 0
    settled: int = 0
    resumed: int = 0
    failed: int = 0
    left: tuple[str, ...] = ()
    failures: tuple[tuple[str, Exception], ...] = ()


async def reconcile(engine: Engine, face: Semel | AsyncSemel, limit: int) -> Reconciled:
    """Go through abandoned and unknown runs. Several reconcilers at once are fine: nonces decide.

    `limit` counts those that something is registered for: what nobody can do anything about must not stand in their way.
    """
    limit = count("limit", limit, least=1)
    # Outcomes of this process that the store did not take are offered first: their runs need nobody else.
    counts = {"settled": await engine.debts.pay_now(), "resumed": 0, "failed": 0}
    left: list[str] = []
    failures: list[tuple[str, Exception]] = []
    found, tried, cursor, shown = 0, 0, "", ""
    try:
        while tried < limit and found < limit * _PATIENCE:
            page = await engine.store.scan(Query(states=_LOST, limit=_PAGE, cursor=cursor))
            for record in page.records:
                live = record.state is State.RUNNING and page.now < record.lease_until
                if live or tried == limit or not may_be_of(face._prefix, record):  # noqa: SLF001 - our own face
                    continue
                found += 1
                recovery, shown = _recovery_of(face, record), "" if record.scope is None else record.scope.key
                tried += recovery is not None
                done = (
                    "left" if recovery is None else await _recover(engine, face, record, recovery, failures)
                )
                if done in counts:
                    counts[done] += 1
                elif done == "left" and len(left) < limit:
                    left.append(shown)
            cursor, shown = page.cursor, ""
            if not cursor:
                break
    except StoreUnavailable as error:
        if not counts["settled"] and not counts["resumed"]:
            raise
        failures.append((shown, error))  # what was done until then is told all the same
    return Reconciled(found=found, left=tuple(left), failures=tuple(failures), **counts)


def _recovery_of(face: Semel | AsyncSemel, record: Record) -> Recovery | None:
    scope, known = record.scope, face._recoveries  # noqa: SLF001 - our own face
    if scope is None:
        return None
    return known.get((scope.operation, scope.tenant)) or known.get((scope.operation, None))


async def _recover(
    engine: Engine,
    face: Semel | AsyncSemel,
    record: Record,
    recovery: Recovery,
    failures: list[tuple[str, Exception]],
) -> str:
    """One lost run: probe it, or run its registered function again. "left" when a person must look, `_SEEN_TO` where somebody
    else did it meanwhile."""
    witness = Witness(awaits=engine.runtime.colour == "async")
    heard = msgspec.structs.replace(
        recovery,
        probe=None if recovery.probe is None else witness.heard(recovery.probe, check_probe),
        resume=None if recovery.resume is None else witness.heard(recovery.resume),
    )
    try:
        return await _tried(engine, face, record, heard)
    except Exception as error:
        theirs = witness.saw(error)
        if not theirs and isinstance(error, StoreUnavailable | ConfigurationError):
            raise  # the next record would fare no better
        if theirs or not isinstance(error, _MEANWHILE) or getattr(error, "unreadable", False):
            failures.append(("" if record.scope is None else record.scope.key, error))
            if engine.emit is not None and record.scope is not None:
                engine.emit(Unreconciled(record.scope, error))
        elif isinstance(error, _ELSEWHERE):
            return _SEEN_TO
        stays = isinstance(error, SemelError) and not isinstance(error, ConfigurationError)
        return "left" if stays else "failed"  # one operation's failure must not stop the others


async def _tried(engine: Engine, face: Semel | AsyncSemel, record: Record, recovery: Recovery) -> str:
    scope = record.scope
    if scope is None:
        return "left"
    # Whoever runs a key at this moment needs no recovery: nobody waits for him, whatever the face does. Nor does its default
    # policy count: that of the calls is stored (R10).
    given: dict[str, Any] = {
        "tenant": scope.tenant,
        "operation": scope.operation,
        "wait": 0,
        "on_unknown": "retry",
        **recovery.options,
    }
    if recovery.probe is not None:
        given["on_unknown"] = recovery.probe
    work = nothing_to_run if recovery.resume is None else recovery.resume
    call = face._call(scope.key or "…", work, (record,), cast("CallOptions", given), claims=False)  # noqa: SLF001 - our own face
    if call.scope.hash != scope.hash:
        # The readable key was masked. A probe gets the record and needs no key, but whose record it is, nobody can tell.
        if recovery.probe is None or not recovery.masked:
            return "left"
        call = msgspec.structs.replace(call, scope=scope)
        return await _probe_only(engine, call, record, recovery.probe, MaskedRun)
    if recovery.resume is not None:
        outcome = await engine.execute(call)
        return "settled" if outcome.replayed else "resumed"
    return "left" if recovery.probe is None else await _probe_only(engine, call, record, recovery.probe)


async def _probe_only(
    engine: Engine, call: Call, record: Record, probe: Callable[..., Any], kind: type[Run] = Run
) -> str:
    run = kind(engine, call, _ask_of(call, record), record, engine.runtime.interrupt())
    token = _current.set(run.weak)
    try:
        answer = await engine.runtime.call(probe, (record,), {}, call.options.inline)
    finally:
        _current.reset(token)
    if isinstance(answer, Found):
        return "settled" if await engine.settle_found(call, record, answer) is Answer.OK else _SEEN_TO
    if answer is NOT_FOUND and record.policy is not model.Policy.HOLD:
        end = Settle(
            call.scope,
            record.nonce,
            Kind.RELEASED,
            call.options.retention,
            new_nonce=engine.runtime.entropy(16),
            reason="probe",
        )
        return "settled" if await settled(engine, end) is Answer.OK else _SEEN_TO
    return "left"


def _ask_of(call: Call, record: Record) -> model.Ask:
    return model.Ask(
        call.scope, record.nonce, call.options.lease, call.options.retention, labels=record.labels
    )
