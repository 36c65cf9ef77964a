"""Looking after records: peek, find, resolve, forget, history, purge, guarantee. Bodies for both colours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from semel import guarantees, model, steps
from semel.calls import Call, cut, failure_of, name_of
from semel.codec import preview
from semel.codec.told import as_given
from semel.errors import (
    CodecError,
    ConfigurationError,
    InProgress,
    OutcomeUnknown,
    SemelError,
)
from semel.flow import Engine
from semel.guarantees import Guarantee
from semel.keys import check_name, scope_hash
from semel.model import Answer, Event, Kind, Policy, Record, Settle, State
from semel.options import count
from semel.records import NOBODY
from semel.seals import Sealed, has_sealed_steps, is_sealed
from semel.store import Query
from semel.words import Word, word

__all__ = [
    "Word",
    "create",
    "find",
    "forget",
    "guarantee",
    "history",
    "may_be_of",
    "peek",
    "purge",
    "purge_regularly",
    "query_for",
    "resolve",
    "settled",
    "word",
]

_PAGE: Final = 500
_ATTENTION: Final = frozenset({State.RUNNING, State.UNKNOWN, State.FAILED})
_UNREADABLE: Final = (
    " (a value that its function cannot read is replaced with resolve(key, value=…, result_type=…), one that a person gave "
    "also with correct=True, semel resolve --correct)"
)
_TOLD_WRONGLY: Final = (
    " (what a person said by mistake is replaced with correct=True, semel resolve --correct)"
)


async def create(engine: Engine, call: Call) -> None:
    """Stores make their tables before they answer the first question: so ask one."""
    await engine.store.peek(call.scope)


async def peek(engine: Engine, call: Call) -> Record | None:
    try:
        record, now = await engine.store.peek(call.scope)
    except (
        Sealed
    ) as sealed:  # its body stays so, as in a list (R7); who decides about it must be able to read it
        record, now = sealed.record, sealed.now
    return _as_seen(record, now)


def _as_seen(record: Record | None, now: float) -> Record | None:
    seen = model.view(record, now)
    if record is None or seen is None:
        return None
    if seen is State.EXPIRED:
        record = model.bury(record)
    return record if seen is record.state else msgspec.structs.replace(record, state=seen)


async def find(engine: Engine, query: Query, prefix: str | None) -> list[Record]:
    """What a program with this prefix wrote; None: whoever wrote it."""
    unlisted = query.states - _ATTENTION
    if unlisted and query.ref is None and not engine.store.capabilities.lists_all:
        raise ConfigurationError(
            f"this store keeps no list of {', '.join(sorted(unlisted))} records, only of {', '.join(sorted(_ATTENTION))}: ask by key"
        )
    found: list[Record] = []
    limit = query.limit
    while True:
        page = await engine.store.scan(msgspec.structs.replace(query, limit=min(limit - len(found), _PAGE)))
        seen = [
            _as_seen(record, page.now)
            for record in page.records
            if prefix is None or may_be_of(prefix, record)
        ]
        found += [record for record in seen if record is not None]
        if not page.cursor or len(found) >= limit:
            return found
        query = msgspec.structs.replace(query, cursor=page.cursor)


def may_be_of(prefix: str, record: Record) -> bool:
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
    if not isinstance(states, Iterable):
        raise ConfigurationError(f"states must be states of a record, such as ['unknown'], not {states!r}")
    for what, name in (("tenant", tenant), ("operation", operation), ("ref", ref)):
        if name is not None:
            check_name(what, name)
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
    record, nonce, now, broken = await _look(engine, call)
    if record is not None:
        _refuse_to_break_seals(call, record, word.kind)
    if word.correct and not broken:
        broken = _was_told(call, record, now)
    if not broken:
        _check_resolvable(call, record, now)
    data = _told(call, word.value) if word.kind is Kind.DONE else b""
    known = _steps_of(record, word.kind)
    end = Settle(
        scope=call.scope,
        nonce=nonce,
        kind=word.kind,
        retention=call.options.retention,
        tombstone=call.options.tombstone,
        result=data,
        error=None if word.error is None else failure_of(word.error),
        # Nothing is lost any more: the next caller's own policy counts, with steps as without.
        policy=Policy.RETRY if word.kind is Kind.RELEASED else None,
        steps=known,
        noted=None if record is None or known is None else record.noted,
        new_nonce=engine.runtime.entropy(16),
        repair=broken,
        actor=_words("actor", actor, 1_000) or "anonymous",
        reason=_words("reason", reason, 10_000),
    )
    answer = await settled(engine, end)
    if answer is not Answer.OK:
        raise _refused(call, "it changed, or was resolved, in the meantime")


def _told(call: Call, value: Any) -> bytes:
    """A person's value as bytes. Without a result_type it is plain data, with one it is made of that type here and now. What
    is too large to keep is refused, not dropped: no effect hangs on it, and whoever gave it would not hear that every caller
    is told that there is no result."""
    codec = call.codec
    if codec is None:
        return b""
    if codec.typed:
        data = codec.encode(_typed(call, value, codec.result_type), compress_over=call.options.compress_over)
    else:
        data = codec.tell(value)
    if len(data) > call.options.max_result:
        raise CodecError(
            f"the value for {name_of(call)} has {len(data)} bytes, and max_result={call.options.max_result}: nothing was "
            "changed. Give less (a ref or an id of it), or raise max_result"
        )
    return data


def _typed(call: Call, value: Any, result_type: Any) -> Any:
    try:
        return as_given(value, result_type)
    except CodecError as error:
        raise CodecError(
            f"the value for {name_of(call)} does not fit its result_type: {error}. Nothing was changed: give one, or plain "
            "data that makes one, or the result_type= of its function"
        ) from error.__cause__


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


async def _look(engine: Engine, call: Call) -> tuple[Record | None, bytes, float, bool]:
    """The record, the nonce that a word on it is fenced by, the store's time, and whether it is unreadable (then resolve
    repairs it, and nothing that was made since)."""
    try:
        record, now = await engine.store.peek(call.scope)
    except OutcomeUnknown as error:
        return None, error.nonce or NOBODY, 0.0, True
    if record is None:
        return record, NOBODY, now, False
    seen, broken = model.view(record, now), False
    if seen is State.DONE and record.result:
        try:
            _read(call, record.result)
        except CodecError:
            broken = True
    elif seen is State.RELEASED and not is_sealed(record):
        broken = not steps.are_readable(record.steps)
    return record, record.nonce, now, broken


def _read(call: Call, result: bytes) -> None:
    """Raises CodecError. Whoever named no type has no classes at hand, and needs none to see that it can be read."""
    if call.codec is None or call.options.result_type is None:
        preview(result)
    else:
        call.codec.decode(result)


def _check_resolvable(call: Call, record: Record | None, now: float) -> None:
    seen = model.view(record, now)
    if record is None or seen is None:
        raise _refused(call, "there is no record of it (are tenant and operation those of its call?)")
    if seen is State.RUNNING and now < record.lease_until:
        raise InProgress(
            f"{name_of(call)} is running (attempt {record.attempts}): only an unknown or failed key can be resolved; "
            "wait until it has ended, or its lease is over",
            retry_after=record.lease_until - now,
            attempt=record.attempts,
        )
    # A run that has lost its worker is unknown to callers with `hold` or a probe, whatever it was claimed with (R10).
    if seen not in (State.RUNNING, State.UNKNOWN, State.FAILED) or record.resolved:
        told = " and was resolved already" if record.resolved else ""
        hint = _UNREADABLE if seen is State.DONE else _TOLD_WRONGLY if seen is State.FAILED else ""
        raise _refused(call, f"it is {seen.value}{told}{hint}")


def _was_told(call: Call, record: Record | None, now: float) -> bool:
    """True: a person gave the outcome that stands there, so a person may correct it. ConfigurationError otherwise.

    A failure too: else only `forget` was left of one that was told by mistake, and the effect would be made again.
    """
    seen = model.view(record, now)
    if record is not None and record.resolved and seen in (State.DONE, State.FAILED):
        return True
    lapsed = seen is State.RUNNING and record is not None and now >= record.lease_until
    remedy = ", resolve it without that" if lapsed or seen in (State.UNKNOWN, State.FAILED) else ""
    raise ConfigurationError(
        f"{name_of(call)} holds no outcome that a person gave: there is nothing to correct{remedy}"
    )


def _refuse_to_break_seals(call: Call, record: Record, kind: Kind) -> None:
    """What is sealed is not damaged: the program that has the keys reads it, and would not read what is written without.

    A failure has no sealed part, and leaves steps as they are. So does a release of a run that has made none.
    """
    releases = kind is Kind.RELEASED and not has_sealed_steps(record)
    if is_sealed(record) and (record.result or not (releases or kind is Kind.FAILED)):
        raise ConfigurationError(
            f"{name_of(call)} belongs to a program with encrypt=, and the keys are not here: what is written without them "
            "cannot be read there. Call once.resolve(...) in a program with the ring; `forget` removes a record without its keys"
        )


def _refused(call: Call, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name_of(call)} cannot be resolved: {why}; only unknown or failed keys can, once. `forget` removes a record"
    )


async def settled(engine: Engine, end: Settle) -> Answer:
    """The store's answer; its trouble is raised."""
    answer = (await engine.store.settle((end,)))[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


async def forget(engine: Engine, call: Call, actor: str, reason: str) -> bool:
    """Remove the record that is there, and no other: a copy of this that arrives late meets what was made since."""
    end = Settle(
        call.scope,
        NOBODY,
        Kind.FORGOTTEN,
        call.options.retention,
        actor=_words("actor", actor, 1_000) or "anonymous",
        reason=_words("reason", reason, 10_000),
    )
    record, there, end = await _aimed(engine, end)
    while (answer := await settled(engine, end)) is Answer.LOST and record is not None:
        looked_at = record
        record, _, end = await _aimed(engine, end)
        if record is None or record.created != looked_at.created:
            break  # gone, by this very end where its answer was lost: it is not about the next one
    if answer is Answer.REFUSED:
        raise InProgress(
            f"{name_of(call)} is running: a live run cannot be forgotten; wait until it has ended, or its lease is over",
            retry_after=call.options.lease,
        )
    return there


async def _aimed(engine: Engine, end: Settle) -> tuple[Record | None, bool, Settle]:
    """The record as it can be read, whether there is one at all, and the end that removes this one only."""
    try:
        record, now = await engine.store.peek(end.scope)
    except OutcomeUnknown as error:
        return None, True, msgspec.structs.replace(end, nonce=error.nonce or NOBODY)
    nonce = NOBODY if record is None else record.nonce
    return record, model.view(record, now) is not None, msgspec.structs.replace(end, nonce=nonce)


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
