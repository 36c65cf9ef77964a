"""What must hold of the fence, whatever came of the effects: who was overtaken changes nothing, and is told so. Pure.

The verdict counts effects. A mode that promises less may show two of them, and a lost outcome may be told as unknown: neither
says that a late owner's write was refused. So this is asked apart, of what callers were told and of the record itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from semel.testing.chaos.cells import Cell, Verdict
from semel.testing.chaos.expectations import kind_of
from semel.testing.chaos.ledger import Answer, Story

__all__ = ["OVERTAKEN", "breach", "certain"]

OVERTAKEN: Final = ("zombie", "overlap", "overruled", "clock-forward", "redialled")
"""Faults after which a live owner finds somebody else's nonce in its record."""
_EDGES: Final = frozenset({"http", "grpc"})
# Past these a woken owner has made its effects: nothing but a write is left to do.
_MADE: Final = {"effect.made", "run.returned", "settle.sent", "renew.sent"}


def breach(cell: Cell, story: Story, verdict: Verdict) -> str:
    """How the fence did not hold; empty when it did."""
    if kind_of(cell) == "loss":
        return ""  # a store that forgets a record forgets its fence: whoever comes next is the first
    return next(filter(None, (rule(cell, story) for rule in _RULES)), "") or _unknown(story, verdict)


def certain(cell: Cell, story: Story) -> str:
    """How it did not hold though somebody did not end, or was starved: nothing that could still have come would make it right.

    What was to be heard and was not is no such thing: a heartbeat that had no time, an owner whose store was away.
    """
    if kind_of(cell) == "loss":
        return ""
    return next(filter(None, (rule(cell, story) for rule in _CERTAIN)), "")


def _told(story: Story) -> list[Answer]:
    return [each for each in story.answers if not each.error]


def _one_result(_: Cell, story: Story) -> str:
    told = _told(story)
    other = next((each for each in told if each.value != told[0].value), None)
    if other is None:
        return ""
    return f"torn: the {told[0].by} was told {told[0].value!r}, the {other.by} {other.value!r}"


def _one_owner(_: Cell, story: Story) -> str:
    ran = [each.by for each in _told(story) if not each.replayed]
    return f"the {' and the '.join(ran)} were told that they have run it" if len(ran) > 1 else ""


def _own_nonces(_: Cell, story: Story) -> str:
    """Claims of different callers are never granted with one nonce."""
    seen: dict[str, str] = {}
    for each in story.owners:
        if seen.setdefault(each.nonce, each.by) != each.by:
            return f"the {seen[each.nonce]} and the {each.by} have entered with the same nonce"
    return ""


def _record(_: Cell, story: Story) -> str:
    """The record is that of the caller who was told that it ran, in state, attempt and nonce."""
    told = _told(story)
    if not story.records or not told:
        return ""
    last = story.records[-1]
    if last.state != "done":
        return f"the {told[0].by} was told a result, and the record is {last.state}"
    wrong = next((each for each in told if each.attempt and each.attempt != last.attempts), None)
    if wrong is not None:
        return (
            f"the {wrong.by} was told attempt {wrong.attempt}, and the record is of attempt {last.attempts}"
        )
    ran = next((each for each in told if not each.replayed), None)
    mine = [each.nonce for each in story.owners if ran is not None and each.by == ran.by]
    return (
        f"the {ran.by} has run it, and the record has another's nonce"
        if ran and mine and last.nonce not in mine
        else ""
    )


def _overtaken(cell: Cell, story: Story) -> str:
    """Who entered and does not own the record in the end was told so, and nothing else."""
    return _not_told(
        cell, next((each for each in _late(cell, story) if each.error not in _words(cell)), None)
    )


def _overtaken_for_certain(cell: Cell, story: Story) -> str:
    """The same, when it was told something that no store that was away explains."""
    excused = {*_words(cell), "StoreUnavailable", "NotRecorded"}
    return _not_told(cell, next((each for each in _late(cell, story) if each.error not in excused), None))


def _words(cell: Cell) -> frozenset[str]:
    """The client of an edge is told that somebody else owns its key, as whoever comes meanwhile: it may ask again. A response
    that has begun is broken off."""
    if cell.mode == "http-stream":
        return frozenset({"InProgress", "IncompleteRead"})
    return frozenset({"InProgress" if cell.part in _EDGES else "LeaseLost"})


def _late(cell: Cell, story: Story) -> list[Answer]:
    """What those were told who have entered and do not own the record in the end."""
    if not story.records or cell.fault not in OVERTAKEN:
        return []
    late = {each.by for each in story.owners if each.nonce != story.records[-1].nonce}
    return [each for each in story.answers if each.by in late]


def _not_told(cell: Cell, told: Answer | None) -> str:
    if told is None:
        return ""
    due = " or ".join(sorted(_words(cell)))
    return f"the {told.by} was overtaken and was told {told.error or told.value}, not {due}"


def _no_more(cell: Cell, story: Story) -> str:
    """A woken owner makes the effect that it was about to make; its next write is refused, and that is the end."""
    if not story.woken or not story.records:
        return ""
    late = {each.by for each in story.owners if each.nonce != story.records[-1].nonce}
    if any(each.by in late for each in story.noted):
        return "an overtaken owner went on after its write was due: its step's note was taken"
    if cell.mode == "http-tx":
        return ""  # its rows are looked at in the end, and are fenced by a record of their own
    more = [each.what for each in story.effects if each.by in late and each.at > story.woken[0].at]
    most = 0 if cell.point.partition("#")[0] in {*_MADE, "step.returned"} else 1
    return (
        f"an overtaken owner went on after its write was due: {', '.join(more)}" if len(more) > most else ""
    )


def _warned(cell: Cell, story: Story) -> str:
    """The heartbeat of an overtaken owner is refused, and tells it inside of its function."""
    if cell.point != "renew.sent" or cell.fault not in OVERTAKEN:
        return ""
    if cell.mode == "hold" and cell.fault == "zombie":
        return ""  # nobody has overtaken it
    return (
        "" if any(each.by == "victim" for each in story.warned) else "its heartbeat has not told the victim"
    )


_RULES: Final[tuple[Callable[[Cell, Story], str], ...]] = (
    _one_result,
    _one_owner,
    _own_nonces,
    _record,
    _overtaken,
    _no_more,
    _warned,
)
_CERTAIN: Final[tuple[Callable[[Cell, Story], str], ...]] = (
    _one_result,
    _one_owner,
    _own_nonces,
    _record,
    _overtaken_for_certain,
    _no_more,
)


def _unknown(story: Story, verdict: Verdict) -> str:
    """Unknown does not end by time; once somebody was told a result, everybody is."""
    last = next((each for each in reversed(story.answers) if each.by == "judge"), None)
    if verdict is not Verdict.UNKNOWN or last is None:
        return ""
    if _told(story):
        return "" if last.replayed else f"a result was told, and the last caller was told {last.error}"
    return "" if last.error == "OutcomeUnknown" else f"unknown has become {last.error or last.value}"
