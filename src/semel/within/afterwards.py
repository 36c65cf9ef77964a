"""A failure that is to be kept (`on_error` replay or hold) is written on a second connection, after the rollback.

The record that the function's savepoint held is gone with it, so the face's own store claims the key anew and settles it.
Where the caller's transaction still stands in the way (SQLite's write lock, a row lock that InnoDB keeps) it is written
when that transaction ends, if the session can tell, and otherwise tried again in the background for `settle_timeout`.
"""

from __future__ import annotations

import os

import msgspec

from semel.calls import add_note
from semel.errors import StoreUnavailable
from semel.flow import Engine
from semel.hooks import Unrecorded
from semel.keys import mask
from semel.model import Answer, Ask, Busy, Settle, Won
from semel.runtime import run_sync
from semel.within.bound import Bound

__all__ = ["record_failure"]


async def record_failure(outer: Engine, bound: Bound, ask: Ask, end: Settle, error: BaseException) -> None:
    """Never raises and never waits long: what could not be done at once is said in a note on `error`."""
    ask = msgspec.structs.replace(ask, nonce=os.urandom(16))
    end = msgspec.structs.replace(end, nonce=ask.nonce)
    name = f"key {mask(ask.scope.key)} of {ask.scope.tenant}/{ask.scope.operation}"
    maybe_ours = False
    if not bound.holds_everything:
        problem = await _write(outer, ask, end)
        if problem is None:
            return
        maybe_ours = problem.maybe_ours
        if not problem.passing:
            _give_up(outer, ask, maybe_ours=maybe_ours)
            add_note(error, f"the failure of {name} was not recorded: {problem.text}")
            return

    def now_free() -> None:
        work = _keep_trying(outer, ask, end, maybe_ours=maybe_ours)
        if outer.runtime.colour == "sync":
            run_sync(work)
        else:
            outer.runtime.background(work)

    if bound.port.after_end(now_free):
        add_note(
            error,
            f"the failure of {name} is recorded on a second connection when this session's transaction ends",
        )
        return
    outer.runtime.background(_keep_trying(outer, ask, end, maybe_ours=maybe_ours))
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


async def _write(outer: Engine, ask: Ask, end: Settle) -> _Problem | None:
    """Claim and settle; None when it is in."""
    try:
        verdict = (await outer.store.claim((ask,)))[0]
        if isinstance(verdict, Exception):
            return _trouble(verdict)
        if isinstance(verdict, Busy):
            return _Problem(str(verdict), passing=True)
        if not isinstance(verdict, Won):
            return _Problem(f"another outcome of the key is there by now ({type(verdict).__name__.lower()})")
        answer = (await outer.store.settle((end,)))[0]
    except Exception as error:  # noqa: BLE001 - the function's own error is what its caller gets
        return _trouble(error)
    if answer is Answer.OK:
        return None
    return _trouble(answer) if isinstance(answer, Exception) else _Problem(str(answer))


def _trouble(error: Exception) -> _Problem:
    return _Problem(str(error), passing=isinstance(error, StoreUnavailable), maybe_ours=True)


async def _keep_trying(outer: Engine, ask: Ask, end: Settle, *, maybe_ours: bool) -> None:
    until = outer.runtime.now() + outer.settle_timeout
    pause = 0.01
    while True:
        problem = await _write(outer, ask, end)
        if problem is None:
            return
        maybe_ours |= problem.maybe_ours
        left = until - outer.runtime.now()
        if not problem.passing or left <= 0:
            _give_up(outer, ask, maybe_ours=maybe_ours)
            if outer.emit is not None:
                outer.emit(Unrecorded(ask.scope, 0, StoreUnavailable(problem.text)))
            return
        await outer.runtime.sleep(min(pause, left))
        pause = min(pause * 2, 0.25)


def _give_up(outer: Engine, ask: Ask, *, maybe_ours: bool) -> None:
    """The failure is not recorded, and the key is free: under hold it would be unknown for ever."""
    if maybe_ours:
        outer.debts.abandon(ask)
