"""For operators: messages that are given up so that their keys flow on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from semel.messaging.pages import Ledger, Line, Member, Page, Superseded
from semel.messaging.sink import Row

__all__ = ["GiveUp", "give_up"]

_TRIES = 5


@dataclass(frozen=True, slots=True)
class GiveUp:
    """What came of it: messages that are gone from the outbox, and why others are not."""

    rows: list[Row]
    left: dict[str, str]


async def give_up(ledger: Ledger, ids: Collection[str]) -> GiveUp:
    """Take parked messages out of the outbox, for good: what follows them under their keys flows on.

    Only the message at the head of a parked key can be given up. Its part changes hands for that, so a relay that has it in
    memory takes it anew, as after a crash; nothing else that is under way is touched.
    """
    wanted = set(ids)
    lines = [line for line in await ledger.read(_lines) if line.id in wanted and line.until is None]
    left = dict.fromkeys(wanted - {line.id for line in lines}, "no parked key has it at its head")
    rows: list[Row] = []
    for line in lines:
        row = await _one(ledger, line)
        if isinstance(row, str):
            left[line.id] = row
        else:
            rows.append(row)
    return GiveUp(rows, left)


async def _one(ledger: Ledger, line: Line) -> Row | str:
    for _ in range(_TRIES):
        try:
            members = await ledger.read(_members)
            found = await ledger.run(_taken_out, line, next(m for m in members if m.part == line.part))
        except Superseded:
            continue
        if found is not None:
            return found
    return "its part changes hands all the time: try again"


def _taken_out(page: Page, line: Line, member: Member) -> Row | str | None:
    """None: somebody else took the part meanwhile."""
    taken = page.take("operator", [member])
    if not taken:
        return None
    _, state = taken[0]
    epoch = member.epoch + 1
    page.hold({line.part: epoch})
    page.release(line.part, epoch)
    if any(line.seq in lane.open for lane in state.lanes.values()):
        return "it is on its way to another sink: try again"
    row = page.fetch(line.part, [line.seq]).get(line.seq)
    state.owed.pop(line.seq, None)
    page.save({(line.part, epoch): state})
    page.let_go(line.part, [line.name])
    if row is None:
        return "it is gone already"
    page.remove({line.part: [row]})
    return row


def _lines(page: Page) -> list[Line]:
    return page.lines()


def _members(page: Page) -> list[Member]:
    return page.members()
