"""Are concurrent histories of claim, renew, note, settle and peek explained by *some* order of atomic decisions of the model?

Wing and Gong's search with Lowe's memory of visited configurations, one key at a time. A call has a time of invocation
and, if its sender learned of it, of return; a call without an answer may have taken effect at any time after its
invocation, or never. Decisions depend on the store's clock, so every call also has the times at which it may have
been decided: the server's own notes where there are any, else the ends of its interval.

The reference is a private copy of `semel.model`: a planted bug in the product does not reach it.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import inf
from typing import Any

import msgspec

from semel import model as _product
from semel.keys import Scope
from semel.model import Kind, Record, Replay, State, Unknown, Won
from semel.steps import decode

__all__ = ["Call", "Look", "inexplicable", "is_linearizable", "judged"]

_MOST_CONFIGURATIONS = 20_000


def _private_model() -> Any:
    spec = importlib.util.spec_from_file_location("semel_model_for_histories", _product.__file__)
    if spec is None or spec.loader is None:  # pragma: no cover - the package has its own source
        raise ImportError("the source of semel.model is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_model = _private_model()


class Look(msgspec.Struct, frozen=True):
    """A peek as an item of a history."""

    scope: Scope
    nonce: bytes = b""


class Call:
    """One item of one request. `answer` is None while its sender does not know it; `applied` holds store times.

    `witnessed`: the server itself noted every time at which it applied this call, so there are no others. Without that,
    a call whose answer was lost may have been applied, and one that may have been sent twice (`resent`) once more than
    its answer tells: as of its invocation, so leases must be long where answers are lost.
    """

    __slots__ = ("answer", "applied", "done", "invoked", "item", "resent", "verb", "witnessed")

    def __init__(self, verb: str, item: Any, invoked: float, *, witnessed: bool = False) -> None:
        self.verb, self.item, self.invoked = verb, item, invoked
        self.witnessed = witnessed
        self.done = inf
        self.resent = False
        self.answer: Any = None
        self.applied: list[float] = []

    def returned(self, at: float, answer: Any) -> None:
        self.done, self.answer = at, answer

    def __repr__(self) -> str:
        return f"<{self.verb} {self.item.nonce[:3].hex()} {self.invoked:.3f}-{self.done:.3f} {self.answer!r}>"


class _Move:
    """One possible decision: a call that must be explained, or an extra one that may be (lost, doubled)."""

    __slots__ = ("call", "due", "must", "times")

    def __init__(self, call: Call, times: Iterable[float], *, must: bool) -> None:
        self.call, self.times, self.must = call, tuple(times), must
        self.due = call.done if must else inf


def inexplicable(calls: Iterable[Call], *, most: int = _MOST_CONFIGURATIONS) -> tuple[list[str], int, int]:
    """The keys whose history no order explains, in words; how many keys there are; how many could not be decided."""
    by_key: dict[bytes, list[Call]] = defaultdict(list)
    for call in calls:
        by_key[call.item.scope.hash].append(call)
    verdicts = [(each, judged(each, most=most)) for each in by_key.values()]
    told = [
        f"H1: no order of decisions explains {len(each)} calls on {each[0].item.scope!r}"
        for each, explained in verdicts
        if explained is False
    ]
    return told, len(verdicts), sum(explained is None for _, explained in verdicts)


def is_linearizable(calls: Sequence[Call]) -> bool:
    """Whether the calls on one key have an order; a history that is too long to tell is an error."""
    explained = judged(calls)
    if explained is None:
        raise ValueError(f"{len(calls)} calls are too many: the search for their order was given up")
    return explained


def judged(calls: Sequence[Call], *, most: int = _MOST_CONFIGURATIONS) -> bool | None:
    """Whether some order explains the calls on one key; None when the search was given up as too long."""
    moves = _moves(calls)
    must = frozenset(number for number, move in enumerate(moves) if move.must)
    seen: dict[Any, list[frozenset[int]]] = {}
    count = 0
    stack: list[tuple[frozenset[int], Record | None, float]] = [(frozenset(), None, -inf)]
    while stack:
        taken, record, clock = stack.pop()
        if must <= taken:
            return True
        here = (
            taken & must,
            clock,
            None if record is None else (*_run_of(record), record.state, record.updated),
        )
        # Whoever got here with fewer assumptions can do whatever this one can.
        assumed = taken - must
        before = seen.setdefault(here, [])
        if any(each <= assumed for each in before):
            continue
        before.append(assumed)
        count += 1
        if count > most:
            return None
        stack.extend(_next(moves, taken, record, clock))
    return False


def _moves(calls: Sequence[Call]) -> list[_Move]:
    moves: list[_Move] = []
    for call in calls:
        extra = call.applied
        if call.answer is not None:
            # The first delivery is the one that was answered; a second one may or may not count.
            moves.append(_Move(call, call.applied[:1] or (call.invoked, call.done), must=True))
            extra = call.applied[1:]
            if call.resent:
                moves.append(_Move(call, (call.invoked,), must=False))
        elif not extra and not call.witnessed:
            moves += [_Move(call, (call.invoked,), must=False)] * (2 if call.resent else 1)
        moves += [_Move(call, (time,), must=False) for time in extra]
    return moves


def _next(moves: Sequence[_Move], taken: frozenset[int], record: Record | None, clock: float) -> list[Any]:
    """Every configuration after one more decision. A call that returned before another was invoked goes first."""
    left = [(number, move) for number, move in enumerate(moves) if number not in taken]
    horizon = min((move.due for _, move in left if move.must), default=inf)
    found = []
    # The last of them is tried first: the earliest that was answered. What may never have happened is assumed last.
    for number, move in sorted(left, key=lambda each: (each[1].must, -each[1].times[0])):
        if move.call.invoked > horizon:
            continue
        for time in move.times:
            decided = _decide(record, move, max(time, clock) if len(move.times) > 1 else time)
            if decided is not None and (move.must or decided[0] is not record):  # else nothing came of it
                found.append((taken | {number}, decided[0], max(time, clock)))
    return found


def _decide(record: Record | None, move: _Move, now: float) -> tuple[Record | None] | None:
    """The record after this decision, in a tuple; None when the model would have answered otherwise."""
    call = move.call
    if call.verb == "peek":
        return (record,) if not move.must or _seen(record, now) == _seen(*call.answer) else None
    answer, changed = getattr(_model, call.verb)(record, call.item, now)
    if move.must and not _same(answer, call.answer):
        return None
    if call.verb == "settle" and call.item.kind is Kind.FORGOTTEN and answer == "ok":
        return (None,)
    return (record if changed is None else changed,)


def _same(expected: Any, told: Any) -> bool:
    if type(expected) is not type(told):
        return False
    if isinstance(expected, Won):
        return bool(_run_of(expected.record) == _run_of(told.record))
    if isinstance(expected, Replay):
        mine, theirs = expected.record, told.record
        return bool((mine.state, mine.result) == (theirs.state, theirs.result))
    if isinstance(expected, Unknown):
        return bool(expected.policy is told.policy)
    return expected == told if isinstance(expected, str) else True


def _seen(record: Record | None, now: float) -> Any:
    """What a reader may rely on: a record that is over, and a tombstone's body, may have been swept away or not."""
    state = _model.view(record, now)
    if record is None or state is None or state is State.EXPIRED:
        return state
    return state, *_run_of(record), record.result, record.labels


def _run_of(record: Record) -> Any:
    return record.nonce, record.attempts, record.policy, record.steps and _steps_of(record.steps)


@lru_cache(maxsize=4_096)
def _steps_of(text: bytes) -> Any:
    """What steps mean: a note that was sent again is appended again, and of one name the last counts."""
    return tuple(
        sorted((step.name, step.phase, step.value, step.fingerprint) for step in decode(text).values())
    )
