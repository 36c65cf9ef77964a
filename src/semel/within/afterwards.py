"""A failure that is to be kept (`on_error` replay or hold) is written on a second connection, after the rollback.

The record that the function's savepoint held is gone with it, so the face's own store claims the key anew and settles it.
Where the caller's transaction still stands in the way (SQLite's write lock, a row lock that InnoDB keeps) it is written
when that transaction ends, if the session can tell, and otherwise tried again in the background for `settle_timeout`.
Meanwhile this process knows of it: a transaction here that asks for the key is told what the record is going to say.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from semel import forks, model
from semel.calls import add_note
from semel.errors import StoreUnavailable
from semel.flow import Engine
from semel.hooks import Unrecorded
from semel.keys import mask
from semel.model import Answer, Ask, Busy, Record, Settle, Verdict, Won
from semel.runtime import run_sync
from semel.within.bound import Bound

__all__ = ["OWED", "foretold", "record_failure"]


class _Owed(msgspec.Struct, frozen=True, weakref=True, eq=False):
    """A failure that is still to be written: the record that it is going to be."""

    key: tuple[Hashable, bytes]
    record: Record
    epoch: int
    """Of the process that is going to write it: a child has inherited it, and nobody who would."""


# By the place of the records and the scope, until it is written or given up. Whoever is going to write it keeps it: what was
# left behind (a session that nobody ended, a loop that was closed) is gone from here with its owner.
OWED: Final[WeakValueDictionary[tuple[Hashable, bytes], _Owed]] = WeakValueDictionary()


def foretold(place: Hashable, ask: Ask) -> Verdict | None:
    """What a failure that is not written yet will answer; None if there is none, or if it will not stand in the way."""
    owed = OWED.get((place, ask.scope.hash))
    if owed is None or owed.epoch != forks.epoch:
        return None
    verdict, changed = model.claim(owed.record, ask, time.time())
    return verdict if changed is None else None


def _owe(place: Hashable, ask: Ask, end: Settle, attempt: int) -> _Owed:
    """From now on it is foretold. One that was not written yet is replaced: this one is the later attempt's."""
    now = time.time()
    failed = model.settle(model.claim(None, ask, now)[1], end, now)[1]
    assert failed is not None  # noqa: S101 - the claim of an absent key is always won, and its owner may fail
    owed = _Owed((place, ask.scope.hash), msgspec.structs.replace(failed, attempts=attempt), forks.epoch)
    OWED[owed.key] = owed
    return owed


def _forget(owed: _Owed) -> None:
    """From now on the record itself answers, and what people say of it. Never takes a later one away."""
    if OWED.get(owed.key) is owed:
        OWED.pop(owed.key, None)


async def record_failure(
    outer: Engine, bound: Bound, place: Hashable, ask: Ask, end: Settle, error: BaseException, attempt: int
) -> None:
    """Never raises and never waits long: what could not be done at once is said in a note on `error`.

    `place`: where the records of this face are, the same for every face of this process that has them there.
    """
    ask = msgspec.structs.replace(ask, nonce=os.urandom(16))
    end = msgspec.structs.replace(end, nonce=ask.nonce)
    owed = _owe(place, ask, end, attempt)
    name = f"key {mask(ask.scope.key)} of {ask.scope.tenant}/{ask.scope.operation}"
    maybe_ours = False
    if not bound.holds_everything:
        problem = await _write(outer, ask, end, owed)
        if problem is None or not problem.passing:
            _forget(owed)
        if problem is None:
            return
        maybe_ours = problem.maybe_ours
        if not problem.passing:
            _give_up(outer, ask, maybe_ours=maybe_ours)
            add_note(error, f"the failure of {name} was not recorded: {problem.text}")
            return

    def now_free(over: bool) -> None:
        work = _keep_trying(outer, ask, end, owed, maybe_ours=maybe_ours)
        # Who still has to end the transaction around it must not wait for what waits for that.
        if over and outer.runtime.colour == "sync":
            run_sync(work)
        else:
            outer.runtime.background(work)

    if bound.port.after_end(now_free):
        add_note(
            error,
            f"the failure of {name} is recorded on a second connection when this session's transaction ends",
        )
        return
    outer.runtime.background(_keep_trying(outer, ask, end, owed, maybe_ours=maybe_ours))
    add_note(
        error,
        f"the failure of {name} is being recorded on a second connection, in the background: end this transaction "
        f"within {outer.settle_timeout:g} s (settle_timeout), or it is not recorded and the key is free",
    )


class _Problem(msgspec.Struct, frozen=True):
    text: str
    passing: bool = False
    maybe_ours: bool = False
    """The claim was granted, or may have been: nobody will run it."""


async def _write(outer: Engine, ask: Ask, end: Settle, owed: _Owed) -> _Problem | None:
    """Claim and settle; None when it is in."""
    try:
        verdict = (await outer.store.claim((ask,)))[0]
        if isinstance(verdict, Exception):
            return _trouble(verdict)
        if isinstance(verdict, Busy):
            return _Problem(str(verdict), passing=True)
        if not isinstance(verdict, Won):
            return _Problem(f"another outcome of the key is there by now ({type(verdict).__name__.lower()})")
        if OWED.get(owed.key) is not owed:
            return _Problem("a later attempt has failed as well, and that is recorded", maybe_ours=True)
        answer = (await outer.store.settle((end,)))[0]
    except Exception as error:  # noqa: BLE001 - the function's own error is what its caller gets
        return _trouble(error)
    if answer is Answer.OK:
        return None
    return _trouble(answer) if isinstance(answer, Exception) else _Problem(str(answer))


def _trouble(error: Exception) -> _Problem:
    return _Problem(str(error), passing=isinstance(error, StoreUnavailable), maybe_ours=True)


async def _keep_trying(outer: Engine, ask: Ask, end: Settle, owed: _Owed, *, maybe_ours: bool) -> None:
    until = outer.runtime.now() + outer.settle_timeout
    pause = 0.01
    try:
        while (problem := await _write(outer, ask, end, owed)) is not None:
            maybe_ours |= problem.maybe_ours
            left = until - outer.runtime.now()
            if not problem.passing or left <= 0:
                _give_up(outer, ask, maybe_ours=maybe_ours)
                if outer.emit is not None:
                    outer.emit(Unrecorded(ask.scope, 0, StoreUnavailable(problem.text)))
                return
            await outer.runtime.sleep(min(pause, left))
            pause = min(pause * 2, 0.25)
    finally:
        _forget(owed)


def _give_up(outer: Engine, ask: Ask, *, maybe_ours: bool) -> None:
    """The failure is not recorded, and the key is free: under hold it would be unknown for ever."""
    if maybe_ours:
        outer.debts.abandon(ask)
