"""Are concurrent histories of claim, renew, note, settle and peek explained by *some* order of atomic decisions of the model?

Wing and Gong's search with Lowe's memory of visited configurations, one key at a time. A call has a time of invocation
and, if its sender learned of it, of return; a call without an answer may have taken effect at any time after its
invocation, or never. Decisions depend on the store's clock, so every call also has the times at which it may have
been decided: the server's own notes where there are any, else those of its interval that make a difference (`_times`).

The reference is a private copy of `semel.model`: a planted bug in the product does not reach it.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from math import inf
from typing import Any

import msgspec

from semel import model as _product
from semel.keys import Scope
from semel.model import Ask, Busy, Kind, Record, Renewal, Replay, State, Unknown, Won
from semel.steps import decode

__all__ = ["Call", "Look", "inexplicable", "is_linearizable", "judged", "listed"]

_MOST_CONFIGURATIONS = 20_000
_GRAIN = 1e-6  # seconds: stores round their times to it


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
    a call whose answer was lost may have been applied at any time since, and one that may have been sent twice (`resent`)
    once more than its answer tells.
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

    @property
    def is_locked_out(self) -> bool:
        """`Busy` with attempt 0: the store did not decide, since somebody else was writing the row (for 50 ms, say)."""
        return type(self.answer) is Busy and self.answer.attempt == 0

    def __repr__(self) -> str:
        return f"<{self.verb} {self.item.nonce[:3].hex()} {self.invoked:.3f}-{self.done:.3f} {self.answer!r}>"


class _Move:
    """One possible decision: a call that must be explained, or an extra one that may be (lost, doubled)."""

    __slots__ = ("call", "due", "must", "times")

    def __init__(self, call: Call, times: Iterable[float], *, must: bool) -> None:
        self.call, self.times, self.must = call, tuple(times), must
        self.due = call.done if must else inf


def inexplicable(
    calls: Iterable[Call], *, most: int = _MOST_CONFIGURATIONS, at_length: bool = False
) -> tuple[list[str], int, int]:
    """The keys whose history no order explains, in words; how many keys there are; how many could not be decided.

    `at_length`: with every call on such a key, and which of them the longest order that was found leaves unexplained.
    """
    by_key: dict[bytes, list[Call]] = defaultdict(list)
    for call in calls:
        by_key[call.item.scope.hash].append(call)
    told, undecided = [], 0
    for each in by_key.values():
        explained, left = _searched(each, most)
        undecided += explained is None
        if explained is False:
            text = f"H1: no order of decisions explains {len(each)} calls on {each[0].item.scope!r}"
            told.append("\n".join([text, *listed(each, left)]) if at_length else text)
    return told, len(by_key), undecided


def listed(calls: Sequence[Call], unexplained: Collection[Call] = ()) -> list[str]:
    """The calls on one key for people: milliseconds since the first of them; `!` marks those that are unexplained."""
    since = min((call.invoked for call in calls), default=0.0)

    def at(time: float) -> str:
        return (
            f"{(time - since) * 1000:.3f}" if time - since < 1e6 else "never" if time == inf else f"{time!r}"
        )

    return [
        f"{'!' if call in unexplained else ' '} {call.item.nonce[:3].hex():6s} {at(call.invoked)}…{at(call.done)} {call.verb}"
        f"{_asked(call.item)}{' (resent)' * call.resent} → {_told(call.answer, at)}"
        f"{''.join(f', decided {at(time)}' for time in call.applied)}"
        for call in sorted(calls, key=lambda each: each.invoked)
    ]


def _asked(item: Any) -> str:
    kind = getattr(item, "kind", None)
    lease = getattr(item, "lease", None)
    return (f" {kind.value}" if kind is not None else "") + (
        f" lease {lease:g} s" if lease is not None else ""
    )


def _told(answer: Any, at: Callable[[float], str]) -> str:
    match answer:
        case None:
            return "no answer"
        case Won(record) | Replay(record) | (Record() as record, _):
            owner = f"{record.state.value} of {record.nonce[:3].hex()}, attempt {record.attempts}"
            return f"{type(answer).__name__} {owner}, lease until {at(record.lease_until)}, updated {at(record.updated)}"
        case _:
            return repr(answer)


def is_linearizable(calls: Sequence[Call]) -> bool:
    """Whether the calls on one key have an order; a history that is too long to tell is an error."""
    explained = judged(calls)
    if explained is None:
        raise ValueError(f"{len(calls)} calls are too many: the search for their order was given up")
    return explained


def judged(calls: Sequence[Call], *, most: int = _MOST_CONFIGURATIONS) -> bool | None:
    """Whether some order explains the calls on one key; None when the search was given up as too long."""
    return _searched(calls, most)[0]


def _searched(calls: Sequence[Call], most: int) -> tuple[bool | None, list[Call]]:
    """The verdict, and the calls that the longest order leaves unexplained."""
    alone = [call for call in calls if call.is_locked_out and not _has_company(call, calls)]
    if alone:
        return False, alone
    moves = _moves(calls)
    must = frozenset(number for number, move in enumerate(moves) if move.must)
    seen: dict[Any, list[frozenset[int]]] = {}
    count = 0
    longest: frozenset[int] = frozenset()
    stack: list[tuple[frozenset[int], Record | None, float]] = [(frozenset(), None, -inf)]
    while stack:
        taken, record, clock = stack.pop()
        explained = taken & must
        if len(explained) == len(must):
            return True, []
        here = (explained, clock, None if record is None else _standing(record))
        # Whoever got here with fewer assumptions can do whatever this one can.
        assumed = taken - must
        before = seen.setdefault(here, [])
        if any(each <= assumed for each in before):
            continue
        before.append(assumed)
        longest = max(longest, explained, key=len)
        count += 1
        if count > most:
            return None, []
        stack.extend(_next(moves, taken, record, clock))
    return False, [moves[number].call for number in must - longest]


def _has_company(locked_out: Call, calls: Iterable[Call]) -> bool:
    """Whether somebody else may have been writing while this call waited."""
    return any(
        call.verb != "peek" and call.invoked <= locked_out.done and call.done >= locked_out.invoked
        for call in calls
        if call is not locked_out
    )


def _moves(calls: Sequence[Call]) -> list[_Move]:
    # At these times some lease was over: what set it was decided a lease before, at the latest.
    granted = [call.applied[0] for call in calls if isinstance(call.answer, Won) and call.applied]
    end = max((call.done for call in calls if call.answer is not None), default=0.0)
    moves: list[_Move] = []
    for call in calls:
        if call.is_locked_out:
            continue  # nothing was decided
        extra = call.applied
        if call.answer is not None:
            # The first delivery is the one that was answered; a second one may or may not count.
            times = call.applied[:1] or _times(call, call.done, granted)
            moves.append(_Move(call, times, must=True))
            extra = call.applied[1:]
            if call.resent:
                moves.append(_Move(call, _times(call, call.done, granted), must=False))
        elif not extra and not call.witnessed:
            moves += [_Move(call, _times(call, end, granted), must=False)] * (2 if call.resent else 1)
        moves += [_Move(call, (time,), must=False) for time in extra]
    return moves


def _times(call: Call, end: float, granted: Iterable[float]) -> tuple[float, ...]:
    """When a call may have been decided, if nobody noted it: as early or as late as can be, and in between where that matters.

    A lease counts from the decision. Whoever was granted the key afterwards needs it to be over by then, whoever was refused
    meanwhile needs it to last as long as possible: so the latest times that leave it over for somebody are enough.
    """
    first, item, lost = call.invoked, call.item, call.answer is None
    leases = isinstance(item, Renewal) or (isinstance(item, Ask) and (lost or isinstance(call.answer, Won)))
    if not leases:
        return (first,) if lost else (first, end)
    if lost and first + item.lease > end:
        return (first,)  # it outlasts the history: all times are the same
    ends = (at - item.lease - _GRAIN for at in granted)
    return (first, *sorted({time for time in ends if first < time < end}), max(first, end))


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


def _standing(record: Record) -> Any:
    """All that a later decision may depend on.

    When it was changed last does not tell that: a note or renewal before, which may never have happened, moves the time at
    which the record or its lease is over (R14, R18).
    """
    return (
        *_run_of(record), record.state, record.updated, record.lease_until, record.expires, record.tombstone,
        record.not_before, record.noted, record.resolved, record.fingerprint, record.result,
    )  # fmt: skip


@lru_cache(maxsize=4_096)
def _steps_of(text: bytes) -> Any:
    """What steps mean: a note that was sent again is appended again, and of one name the last counts."""
    return tuple(
        sorted((step.name, step.phase, step.value, step.fingerprint) for step in decode(text).values())
    )
