"""Looking after records: peek, find, resolve, forget, history, purge, reconcile, guarantee. Bodies for both colours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from semel import guarantees, model, steps
from semel.calls import Call, cut, failure_of
from semel.codec import preview
from semel.errors import (
    CodecError,
    ConfigurationError,
    InProgress,
    KeyExpired,
    OutcomeUnknown,
    PreviousFailure,
    SemelError,
    StoreUnavailable,
)
from semel.flow import Engine
from semel.guarantees import Guarantee
from semel.hooks import Unreconciled
from semel.keys import mask, scope_hash
from semel.model import Answer, Event, Kind, Record, Settle, State
from semel.options import NOT_FOUND, Found, check_probe, count
from semel.run import MaskedRun, Run, _current
from semel.seals import has_sealed_steps, is_sealed
from semel.shrinking import TOO_LARGE
from semel.store import Query
from semel.witness import Witness
from semel.words import Word, word

if TYPE_CHECKING:
    from semel.once import AsyncSemel, Semel

__all__ = [
    "Reconciled",
    "Recovery",
    "Word",
    "create",
    "find",
    "forget",
    "guarantee",
    "history",
    "peek",
    "purge",
    "purge_regularly",
    "query_for",
    "reconcile",
    "resolve",
    "word",
]

_PAGE: Final = 500
_PATIENCE: Final = 100  # a reconcile looks at so many times its limit at most
_LOST: Final = frozenset({State.RUNNING, State.UNKNOWN})
_ATTENTION: Final = _LOST | {State.FAILED}
_MEANWHILE: Final = (InProgress, OutcomeUnknown, PreviousFailure, KeyExpired)
"""What a resumed run may meet though nothing went wrong: another one has the key, or settled it, or nobody can tell yet."""
_UNREADABLE: Final = (
    " (a value that its function cannot read is replaced with resolve(key, value=…, result_type=…), one that a person gave "
    "also with correct=True, semel resolve --correct)"
)


class Recovery(msgspec.Struct, frozen=True):
    """What `reconcile` does about lost runs of one operation. Both functions get the record."""

    probe: Callable[..., Any] | None
    resume: Callable[..., Any] | None
    masked: bool = False
    options: Mapping[str, Any] = {}
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


async def create(engine: Engine, call: Call) -> None:
    """Stores make their tables before they answer the first question: so ask one."""
    await engine.store.peek(call.scope)


async def peek(engine: Engine, call: Call) -> Record | None:
    record, now = await engine.store.peek(call.scope)
    return _as_seen(record, now)


def _as_seen(record: Record | None, now: float) -> Record | None:
    seen = model.view(record, now)
    if record is None or seen is None:
        return None
    if seen is State.EXPIRED:
        record = model.bury(record)
    return record if seen is record.state else msgspec.structs.replace(record, state=seen)


async def find(engine: Engine, query: Query, prefix: str) -> list[Record]:
    unlisted = query.states - _ATTENTION
    if unlisted and query.ref is None and not engine.store.capabilities.lists_all:
        raise ConfigurationError(
            f"this store keeps no list of {', '.join(sorted(unlisted))} records, only of {', '.join(sorted(_ATTENTION))}: ask by key"
        )
    found: list[Record] = []
    limit = query.limit
    while True:
        page = await engine.store.scan(msgspec.structs.replace(query, limit=min(limit - len(found), _PAGE)))
        seen = [_as_seen(record, page.now) for record in page.records if _may_be_of(prefix, record)]
        found += [record for record in seen if record is not None]
        if not page.cursor or len(found) >= limit:
            return found
        query = msgspec.structs.replace(query, cursor=page.cursor)


def _may_be_of(prefix: str, record: Record) -> bool:
    """Whether a program with this prefix wrote it: tables are shared. What is masked tells nothing, and may be."""
    scope = record.scope
    if scope is None or not scope.key or "…" in scope.key:
        return True
    return scope.hash == scope_hash(prefix, scope.tenant, scope.operation, scope.key)


def query_for(
    states: Iterable[State | str],
    tenant: str | None,
    operation: str | None,
    ref: str | None,
    limit: int,
    *,
    abandoned: bool,
) -> Query:
    """What `find` was asked for."""
    return Query(
        tenant=tenant,
        operation=operation,
        states=frozenset(_state(each) for each in ([states] if isinstance(states, str) else states)),
        abandoned=abandoned,
        ref=ref,
        limit=count("limit", limit, least=1),
    )


def _state(given: Any) -> State:
    try:
        return State(given)
    except ValueError:
        raise ConfigurationError(
            f"{given!r} is no state of a record: states are {', '.join(State)}"
        ) from None


async def resolve(engine: Engine, call: Call, word: Word, actor: str, reason: str) -> None:
    record, now, broken = await _look(engine, call)
    if record is not None:
        _refuse_to_break_seals(call, record, word.kind)
    if word.correct and not broken:
        broken = _was_told(call, record, now)
    if not broken:
        _check_resolvable(call, record, now)
    data, marker = _told(call, word.value) if word.kind is Kind.DONE else (b"", "")
    known = _steps_of(record, word.kind)
    end = Settle(
        scope=call.scope,
        nonce=b"" if record is None else record.nonce,
        kind=word.kind,
        retention=call.options.retention,
        tombstone=call.options.tombstone,
        result=data,
        marker=marker,
        error=None if word.error is None else failure_of(word.error),
        steps=known,
        noted=None if record is None or known is None else record.noted,
        new_nonce=engine.runtime.entropy(16),
        repair=broken,
        actor=_words("actor", actor, 1_000) or "anonymous",
        reason=_words("reason", reason, 10_000),
    )
    answer = await _settled(engine, end)
    if answer is not Answer.OK:
        raise _refused(call, "it changed, or was resolved, in the meantime")


def _told(call: Call, value: Any) -> tuple[bytes, str]:
    """A person's value as bytes, and why it is not kept if it is not. Without a result_type it is plain data."""
    codec = call.codec
    if codec is None:
        return b"", ""
    data = codec.encode(value, compress_over=call.options.compress_over) if codec.typed else codec.tell(value)
    return (data, "") if len(data) <= call.options.max_result else (b"", TOO_LARGE)


def _words(name: str, text: Any, most: int) -> str:
    """What a person says about it, as every store can keep it."""
    if not isinstance(text, str):
        raise ConfigurationError(f"{name} must be text, not {text!r}")
    return cut(text, most)


def _steps_of(record: Record | None, kind: Kind) -> bytes | None:
    """What a person's word leaves of the steps; None leaves them as they are.

    An outcome ends the run: names and times stay (R26). A release says that what was begun may be done again: a step that
    was only started would be held for ever otherwise. Those that are finished stay.
    """
    if record is None or not record.steps:
        return None
    try:
        if kind is Kind.RELEASED:
            return steps.finished(record.steps)
        return steps.summarize(steps.decode(record.steps))
    except CodecError:
        # Sealed, and the keys are not here: only a failure may be said of it. Damaged, they would stop every next attempt.
        return None if is_sealed(record) else b""


async def _look(engine: Engine, call: Call) -> tuple[Record | None, float, bool]:
    """The record, the store's time, and whether it is unreadable (then resolve repairs it)."""
    try:
        record, now = await engine.store.peek(call.scope)
    except OutcomeUnknown:
        return None, 0.0, True
    if record is None:
        return record, now, False
    seen, broken = model.view(record, now), False
    if seen is State.DONE and record.result:
        try:
            _read(call, record.result)
        except CodecError:
            broken = True
    elif seen is State.RELEASED and not is_sealed(record):
        broken = not steps.are_readable(record.steps)
    return record, now, broken


def _read(call: Call, result: bytes) -> None:
    """Raises CodecError. Whoever named no type has no classes at hand, and needs none to see that it can be read."""
    if call.codec is None or call.options.result_type is None:
        preview(result)
    else:
        call.codec.decode(result)


def _check_resolvable(call: Call, record: Record | None, now: float) -> None:
    seen = model.view(record, now)
    if record is None or seen is None:
        raise _refused(call, "there is no record of it")
    if seen is State.RUNNING:
        raise InProgress(
            f"key {mask(call.key)} is running (attempt {record.attempts}): only an unknown or failed key can be resolved",
            retry_after=max(0.0, record.lease_until - now),
            attempt=record.attempts,
        )
    if seen not in (State.UNKNOWN, State.FAILED) or record.resolved:
        told = " and was resolved already" if record.resolved else ""
        hint = _UNREADABLE if seen is State.DONE else ""
        raise _refused(call, f"it is {seen.value}{told}{hint}")


def _was_told(call: Call, record: Record | None, now: float) -> bool:
    """True: a person gave the value that stands there, so a person may correct it. ConfigurationError otherwise."""
    if record is not None and record.resolved and model.view(record, now) is State.DONE:
        return True
    raise ConfigurationError(
        f"key {mask(call.key)} of {call.scope.tenant}/{call.scope.operation} holds no value that a person gave: there is "
        "nothing to correct, resolve it without that"
    )


def _refuse_to_break_seals(call: Call, record: Record, kind: Kind) -> None:
    """What is sealed is not damaged: the program that has the keys reads it, and would not read what is written without.

    A failure has no sealed part, and leaves steps as they are. So does a release of a run that has made none.
    """
    releases = kind is Kind.RELEASED and not has_sealed_steps(record)
    if is_sealed(record) and (record.result or not (releases or kind is Kind.FAILED)):
        raise ConfigurationError(
            f"key {mask(call.key)} of {call.scope.tenant}/{call.scope.operation} belongs to a program with encrypt=, and the "
            "keys are not here: what is written without them cannot be read there. Call once.resolve(...) in a program with "
            "the ring; `forget` removes a record without its keys"
        )


def _refused(call: Call, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"key {mask(call.key)} of {call.scope.tenant}/{call.scope.operation} cannot be resolved: {why}; only unknown or "
        "failed keys can, once. `forget` removes a record"
    )


async def _settled(engine: Engine, end: Settle) -> Answer:
    answer = (await engine.store.settle((end,)))[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


async def forget(engine: Engine, call: Call, actor: str, reason: str) -> bool:
    try:
        record, now = await engine.store.peek(call.scope)
        there = model.view(record, now) is not None
    except OutcomeUnknown:
        there = True
    end = Settle(
        call.scope,
        b"",
        Kind.FORGOTTEN,
        call.options.retention,
        actor=_words("actor", actor, 1_000) or "anonymous",
        reason=_words("reason", reason, 10_000),
    )
    if await _settled(engine, end) is Answer.REFUSED:
        raise InProgress(
            f"key {mask(call.key)} is running: a live run cannot be forgotten", retry_after=call.options.lease
        )
    return there


async def history(engine: Engine, call: Call) -> list[Event]:
    return list((await engine.store.scan(Query(history=call.scope))).events)


async def purge(engine: Engine, limit: int | None, batch: int) -> int:
    batch = count("batch", batch, least=1)
    if limit is not None:
        limit = count("limit", limit, least=0)
    total = 0
    while limit is None or total < limit:
        size = batch if limit is None else min(batch, limit - total)
        gone = await engine.store.purge(size)
        total += gone
        if gone < size:
            break
    return total


def purge_regularly(engine: Engine, every: float) -> None:
    """A purge of its own every so often, for programs without a cron job."""

    async def tick() -> float:
        try:
            await purge(engine, None, 1_000)
        except SemelError as error:
            if engine.emit is not None:
                engine.emit(error)
        return engine.runtime.now() + every

    engine.purger = engine.runtime.ticker(tick)
    engine.purger.at(engine.runtime.now() + every)


async def guarantee(engine: Engine, *, enabled: bool) -> Guarantee:
    return guarantees.grade(await engine.store.facts(), enabled=enabled)


# ---------------------------------------------------------------------------------------------- reconcile


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
                if live or tried == limit or not _may_be_of(face._prefix, record):  # noqa: SLF001 - our own face
                    continue
                found += 1
                recovery, shown = _recovery_of(face, record), "" if record.scope is None else record.scope.key
                tried += recovery is not None
                done = (
                    "left" if recovery is None else await _recover(engine, face, record, recovery, failures)
                )
                if done in counts:
                    counts[done] += 1
                elif len(left) < limit:
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
    """One lost run: probe it, or run its registered function again. "left" when a person must look."""
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
        stays = isinstance(error, SemelError) and not isinstance(error, ConfigurationError)
        return "left" if stays else "failed"  # one operation's failure must not stop the others


async def _tried(engine: Engine, face: Semel | AsyncSemel, record: Record, recovery: Recovery) -> str:
    scope = record.scope
    if scope is None:
        return "left"
    # Whoever runs a key at this moment needs no recovery: nobody waits for him, whatever the face does.
    given: dict[str, Any] = {
        "tenant": scope.tenant,
        "operation": scope.operation,
        "wait": 0,
        **recovery.options,
    }
    if recovery.probe is not None:
        given["on_unknown"] = recovery.probe
    call = face._call(scope.key or "…", recovery.resume, (record,), dict(given), claims=False)  # noqa: SLF001 - our own face
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
        return "settled" if await engine.settle_found(call, record, answer) is Answer.OK else "left"
    if answer is NOT_FOUND and record.policy is not model.Policy.HOLD:
        end = Settle(
            call.scope,
            record.nonce,
            Kind.RELEASED,
            call.options.retention,
            new_nonce=engine.runtime.entropy(16),
            reason="probe",
        )
        return "settled" if await _settled(engine, end) is Answer.OK else "left"
    return "left"


def _ask_of(call: Call, record: Record) -> model.Ask:
    return model.Ask(
        call.scope, record.nonce, call.options.lease, call.options.retention, labels=record.labels
    )
