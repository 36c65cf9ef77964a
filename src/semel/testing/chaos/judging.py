"""What the ledger of a schedule that is over says: a result, and whether it is one. Pure, but for the reading of the ledger.

A result is played again only if it says nothing: somebody did not end, or what must be seen was spared, or a full disk was full
no more when it mattered. What is worse than its
cell says, and a breach that is certain whoever did not end, stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from semel.testing.chaos.cells import Cell, Heir, Verdict, part_of
from semel.testing.chaos.fences import breach, certain
from semel.testing.chaos.ledger import Answer, Ledger, Story
from semel.testing.chaos.verdicts import Result, compare, counts, heir_of, judge, recovery, settled

__all__ = ["STARVED", "Job", "has_no_verdict", "is_unsaid", "judged", "starved"]

# SQLite has one lock for all: whoever is stopped while it holds it (a checkpoint, a clean-up) stops everybody.
_LOCKED: Final = "database is locked"
# Faults that leave the store and the way to it alone. A store that does not answer in time all the same was starved by the machine.
_ELSEWHERE: Final = {
    "kill", "zombie", "overlap", "overruled", "cancel", "interrupt", "slow", "poison", "rollback", "late-copy",
}  # fmt: skip
STARVED: Final = "the store did not answer in time, though nothing befell it"


class Job(msgspec.Struct, kw_only=True):
    """What the runner asks a driver for."""

    cell: Cell
    number: int
    lease: float
    timed: bool = False
    """Its time of recovery counts: it runs when the machine is not kept busy by other schedules."""


_ENDED_WELL: Final = {Heir.RAN, Heir.REPLAYED}
_WORSE: Final = {Verdict.DOUBLED, Verdict.TORN, Verdict.REORDERED, Verdict.LOST}
# Rows are read when all is over, and an application or a consumer may have been told nothing: there is no loss without that.
_READ_AT_THE_END: Final = ("tx", "http-tx", "outbox", "inbox-")
# A queue promises at least once: where a confirm is lost with its broker, a second copy is right, and not what the cell shows.
_ALLOWED: Final = {("relay-rabbit-queue", "broker-kill"): Verdict.DOUBLED}
# A server may undo it by itself, in the middle of it: a checkpoint gives back the room of old logs.
_UNDONE: Final = {"disk-full"}


def has_no_verdict(cell: Cell, result: Result) -> bool:
    if result.breach or (_is_worse(cell, result.verdict) and result.verdict is not cell.expected):
        return False
    better = result.verdict is Verdict.ONCE and cell.expected in {Verdict.DOUBLED, Verdict.LOST}
    beside = result.verdict is cell.expected and {result.heir, cell.heir} == _ENDED_WELL
    allowed = result.verdict is _ALLOWED.get((cell.mode, cell.fault))
    spared = result.verdict is Verdict.ONCE and cell.fault in _UNDONE
    only = compare(cell, result.verdict, result.heir, bit=result.bit)
    harmless = better or beside or allowed if result.bit else spared
    return (harmless and result.problem == only) or is_unsaid(result)


def _is_worse(cell: Cell, verdict: Verdict) -> bool:
    """Whatever else would have come."""
    excused = verdict is Verdict.LOST and cell.mode.startswith(_READ_AT_THE_END)
    return verdict in _WORSE and not excused and verdict is not _ALLOWED.get((cell.mode, cell.fault))


def is_unsaid(result: Result) -> bool:
    """Somebody did not end in time."""
    return result.problem.startswith(("TimeoutError", STARVED)) or _LOCKED in result.problem


def judged(job: Job, ledger: Ledger, *, bit: bool, problem: str, doubt: str) -> Result:
    cell = job.cell
    story = ledger.story()
    effects, answers = story.effects, story.answers
    wanted = part_of(cell).wanted(cell)
    verdict, breached = _found(cell, story)
    sure = _certain(cell, story)
    heir = heir_of(answers)
    odd = next((each for each in answers if each.error in {"Crashed", "Unexpected"}), None)
    problem = problem or (f"the {odd.by} ended with {odd.text}" if odd else "")
    unlike = compare(cell, verdict, heir, bit=bit)
    if problem:
        worse = unlike if _is_worse(cell, verdict) and verdict is not cell.expected else ""
        problem = "; ".join(filter(None, (problem, worse, sure)))
    else:
        problem = "; ".join(filter(None, (unlike, breached))) or doubt
    if problem and not sure and cell.fault in _ELSEWHERE and starved(verdict, answers):
        problem = f"{STARVED}: {problem}"
    after, well = settled(cell, answers)
    return Result(
        cell=cell.name,
        verdict=verdict,
        heir=heir,
        agrees=not problem,
        problem=problem,
        breach=sure,
        effects=sum(counts(cell, effects, wanted).values()),
        calls=len(effects),
        after=after,
        well=well,
        bit=bit,
        recovery=recovery(effects, ledger.faults()) if job.timed else None,
        lease=job.lease,
        store=cell.store,
        number=job.number,
        batch=cell.lane if cell.batch else "",
        story=_lines(story) if problem else [],
    )


def starved(verdict: Verdict, answers: Sequence[Answer]) -> bool:
    """Somebody was told that the store is away. What a caller was told, and is not there, is lost all the same."""
    callers = [each for each in answers if each.by != "judge"]
    away = any(each.error == "StoreUnavailable" for each in callers)
    return away and (verdict is not Verdict.LOST or all(each.error for each in callers))


def _found(cell: Cell, story: Story) -> tuple[Verdict, str]:
    """The verdict, and what is wrong besides."""
    part = part_of(cell)
    if part.judged is not None:
        return part.judged(cell, story)
    survived = story.survived[-1] if story.survived else None
    verdict = judge(cell, story.effects, story.answers, part.wanted(cell), survived=survived)
    return verdict, breach(cell, story, verdict)


def _certain(cell: Cell, story: Story) -> str:
    """Of what is wrong besides, that which a story without an end says, too."""
    part = part_of(cell)
    if part.judged is None:
        return certain(cell, story)
    return part.certain(cell, story) if part.certain is not None else ""


def _lines(story: Story) -> list[str]:
    """Everything in the order it happened, and the record as it was in the end."""
    lines = [(each.at, f"{each.by} makes {each.what} {each.peer[:8]}") for each in story.effects]
    lines += [(each.at, f"{each.by} meets the fault") for each in story.faults]
    lines += [
        (each.at, f"{each.by} enters: attempt {each.attempt}, nonce {each.nonce[:8]}")
        for each in story.owners
    ]
    lines += [(each.at, f"{each.by} goes on") for each in story.woken]
    lines += [(each.at, f"{each.by} hears from its heartbeat that it was overtaken") for each in story.warned]
    lines += [(each.at, f"{each.attempt} rows are left") for each in story.survived]
    lines += [
        (
            each.at,
            f"{each.by} is told {each.error + ': ' + each.text if each.error else str(each.value)[:200]} replayed={each.replayed}",
        )
        for each in story.answers
    ]
    first = min((at for at, _ in lines), default=0.0)
    return [f"{at - first:8.3f} s  {text}" for at, text in sorted(lines)] + [
        f"the record: {each.state}, attempt {each.attempts}, nonce {each.nonce[:8]}" for each in story.records
    ]
