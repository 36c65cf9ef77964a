"""What the ledger says of a schedule's messages: lost, doubled, reordered, or each once. Pure.

Arrivals at the sink are judged; under `inbox` the rows of its handlers, and the messages that they sent in the same
transaction. Apart from the verdict it is asked what must hold whatever the sink promises: an inbox handles once what has
arrived twice, nothing that was rolled back is ever seen, who was overtaken is told, and what a sink has lost is an alarm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from semel.testing.chaos.cells import Cell, Verdict
from semel.testing.chaos.ledger import Answer, Story
from semel.testing.chaos.messaging_sinks import ARRIVED

__all__ = ["FOLLOWED", "GHOST", "OVERTAKEN", "PAUSED", "certain", "ids_of", "judged", "wanted"]

GHOST: Final = "a9"
"""The id of a message whose transaction or savepoint was rolled back."""
FOLLOWED: Final = "next-"
"""In front of the id of a message that a handler sends in its transaction."""

OVERTAKEN: Final = "acked.overtaken"
"""A sink's tail is lost and sent again while a relay sleeps, which then wakes."""
PAUSED: Final = "pause"
"""By whom the ledger says that a relay has paused."""


def ids_of(*, keys: str = "ab", count: int = 3) -> list[str]:
    """`a1` is the first message of key `a`."""
    return [f"{key}{number}" for number in range(1, count + 1) for key in keys]


def wanted(cell: Cell) -> tuple[str, ...]:
    """The messages of a cell, each of which must be there once."""
    if cell.mode == "outbox":
        return ("a1", "b1") if cell.fault == "late-commit" else ("a1",)
    if cell.mode.startswith("inbox"):
        return tuple(ids_of(keys="a"))
    return tuple(ids_of(count=4 if cell.point.startswith("acked.") else 3))


def judged(cell: Cell, story: Story) -> tuple[Verdict, str]:
    """The verdict, and what is wrong besides; empty when nothing is."""
    found, rows = _seen(cell, story)
    problem = next(filter(None, (rule(cell, story, found, rows) for rule in _RULES)), "")
    return _verdict(cell, story, found, rows), problem


def certain(cell: Cell, story: Story) -> str:
    """What is wrong though somebody did not end, or was starved: nothing that could still have come would make it right."""
    found, rows = _seen(cell, story)
    return next(filter(None, (rule(cell, story, found, rows) for rule in _CERTAIN)), "")


def _seen(cell: Cell, story: Story) -> tuple[list[str], list[str]]:
    """What has arrived, or was handled under `inbox`; and what the database has."""
    rows = [each.what for each in story.effects if each.by == "database"]
    if cell.mode.startswith("inbox"):
        return [name for name in rows if not name.startswith("row ")], rows
    return [each.what for each in story.effects if each.by == ARRIVED], rows


def _is_over(story: Story) -> bool:
    """Somebody has looked at the end, and found nothing left to do."""
    last = next((each for each in reversed(story.answers) if each.by == "judge"), None)
    return last is not None and not last.error


def _due(cell: Cell, rows: Sequence[str]) -> list[str]:
    """What must have arrived. The heir writes the last one of each key itself, with its row: without that there is no message."""
    mine = set() if cell.mode.startswith("inbox") else {*wanted(cell)} - {*ids_of()}
    return [name for name in wanted(cell) if name not in mine or f"row {name}" in rows]


def _verdict(cell: Cell, story: Story, found: Sequence[str], rows: Sequence[str]) -> Verdict:
    if not _is_over(story):
        return Verdict.STUCK
    times = Counter(found)
    # First: who loses may do so where that is expected, and double nowhere. What is lost besides is a rule's affair.
    if any(times[name] > 1 for name in times):
        return Verdict.DOUBLED
    if any(not times[name] for name in _due(cell, rows)):
        return Verdict.LOST
    # What a dead consumer had is handed out again in the broker's own order.
    return Verdict.ONCE if cell.mode.startswith("inbox") or _ordered(found) else Verdict.REORDERED


def _ordered(names: Sequence[str]) -> bool:
    """Per key: each number is above the last one."""
    latest: dict[str, int] = {}
    for name in names:
        if int(name[1:]) <= latest.get(name[0], 0):
            return False
        latest[name[0]] = int(name[1:])
    return True


def _in_order(cell: Cell, story: Story, found: Sequence[str], rows: Sequence[str]) -> str:
    """What comes twice may come late; for the first time everything comes in order, and no key waits for another's poison."""
    stuck = cell.fault == "poison" and bool(found) and list(dict.fromkeys(found))[-1][0] != "a"
    late = f"a poisoned key has held up another one: {' '.join(found)}" if stuck else ""
    return _first_in_order(cell, story, found, rows) or late


def _first_in_order(cell: Cell, _: Story, found: Sequence[str], __: Sequence[str]) -> str:
    ordered = cell.mode.startswith("inbox") or _ordered(list(dict.fromkeys(found)))
    return "" if ordered else f"reordered: {' '.join(found)}"


def _none_lost(cell: Cell, story: Story, found: Sequence[str], rows: Sequence[str]) -> str:
    """Who may double loses nothing: a verdict has one word, and a message that is there twice hides none that is missing."""
    if cell.expected is Verdict.LOST or not _is_over(story):
        return ""
    missing = [name for name in _due(cell, rows) if name not in found]
    return f"lost: {' '.join(missing)}" if missing else ""


def _told_and_lost(cell: Cell, story: Story, found: Sequence[str], rows: Sequence[str]) -> str:
    """A relay's messages are written before it begins; an application's or a consumer's may be nobody's, while nobody is told."""
    told = any(not each.error for each in story.answers if each.by != "judge")
    return _none_lost(cell, story, found, rows) if told or cell.mode.startswith("relay") else ""


def _no_ghost(_: Cell, __: Story, found: Sequence[str], rows: Sequence[str]) -> str:
    seen = GHOST in found or f"row {GHOST}" in rows
    return "what was rolled back has been sent or kept" if seen else ""


def _together(cell: Cell, story: Story, found: Sequence[str], rows: Sequence[str]) -> str:
    """A message's row is there when it is, once; under `inbox` the message that its handler sent is."""
    times = Counter(rows)
    if cell.mode.startswith("inbox"):
        if cell.fault == "late-copy":
            return ""
        sent = Counter(each.what for each in story.effects if each.by == "outbox")
        odd = [name for name in wanted(cell) if sent[FOLLOWED + name] != times[name]]
        return f"row and message of {' '.join(odd)} did not commit together" if odd else ""
    odd = [name for name in {*found, *wanted(cell)} if times[f"row {name}"] != 1]
    return (
        f"the application's rows of {' '.join(sorted(odd))} are there more or less than once" if odd else ""
    )


def _handled_once(cell: Cell, _: Story, found: Sequence[str], rows: Sequence[str]) -> str:
    """Behind any sink: the inbox admits a copy once."""
    if not cell.mode.startswith("relay") or cell.store == "redis":
        return ""  # an inbox is in an SQL database
    handled = Counter(name for name in rows if not name.startswith("row "))
    due = {*found} if cell.expected is Verdict.LOST else {*found, *wanted(cell)}
    odd = sorted(name for name in due if handled[name] != 1)
    return f"the inbox has admitted {' '.join(odd)} more or less than once" if odd else ""


def _overtaken(cell: Cell, story: Story, found: Sequence[str], rows: Sequence[str]) -> str:
    """A relay that slept through its lease hears that its parts are somebody else's."""
    del found, rows
    locks = (
        cell.point == "relay.chosen" and cell.store != "redis"
    )  # nobody can overtake one that has its part's lock
    sleeps = cell.fault == "zombie" or cell.point == OVERTAKEN
    if not sleeps or not cell.mode.startswith("relay") or locks:
        return ""
    return "" if any(each.by == "victim" for each in story.warned) else "the overtaken relay was not told"


def _told(cell: Cell, story: Story, found: Sequence[str], rows: Sequence[str]) -> str:
    """A broker that is away pauses, and burns no attempt; one that has lost its tail is an alarm."""
    del found, rows
    if cell.fault == "broker-kill" and cell.mode.startswith("relay"):
        paused = any(each.by == PAUSED for each in story.answers)
        return "" if paused else "a broker was away, and nobody has paused"
    if cell.fault == "torn-log" and cell.point.startswith("acked."):
        return "" if "lost-tail" in _alarms(story, "heir") else "the sink has lost its tail without an alarm"
    return ""


def _alarms(story: Story, by: str) -> list[str]:
    answers: list[Answer] = [each for each in story.answers if each.by == by and isinstance(each.value, dict)]
    return [alarm for each in answers for alarm in each.value["alarms"]]


_RULES: Final = (_no_ghost, _in_order, _none_lost, _together, _handled_once, _overtaken, _told)
_CERTAIN: Final = (_no_ghost, _first_in_order, _told_and_lost)
