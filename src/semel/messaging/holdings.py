"""The parts that a relay owns now: what is in memory of them, and how it is written, under their epochs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from semel.messaging.away import Away
from semel.messaging.pages import Page
from semel.messaging.parts import Part
from semel.messaging.sending import Sending
from semel.messaging.tally import Tally

__all__ = ["Holdings"]


class Holdings:
    """`parts` by number. What is in memory of a part counts as long as it is in here.

    The loop takes parts; the threads that write pages drop those that turn out to be somebody else's.
    """

    def __init__(self, sending: Sending, away: Away, tally: Tally) -> None:
        self.parts: dict[int, Part] = {}
        self._sending = sending
        self._away = away
        self._tally = tally
        self._changing = threading.Lock()

    @property
    def held(self) -> list[Part]:
        """The parts, as they are now: a copy, made in one step."""
        return list(self.parts.values())

    def take(self, parts: Iterable[Part]) -> None:
        """Owned from now on."""
        with self._changing:
            self.parts.update((part.number, part) for part in parts)

    def has(self, part: Part) -> bool:
        """Whether it is this part, as it is in memory, that is owned; not one that was taken anew since."""
        return self.parts.get(part.number) is part

    def overtaken(self, part: Part) -> None:
        """Somebody else owns the part since."""
        if self.drop(part):
            self._tally.overtaken(part)

    def drop(self, part: Part) -> bool:
        """Forget what is in memory of a part."""
        self._sending.forget(part)
        self._away.ended(part.number)
        with self._changing:  # between the look and the removal nobody takes it anew
            return self.has(part) and self.parts.pop(part.number, None) is not None

    # ------------------------------------------------------------------------------------- on a page
    def settle(self, page: Page, parts: Sequence[Part], *, save: bool = True) -> list[Part]:
        """Write what came of the last batches, for the parts that are still ours; those are returned, and locked."""
        held = page.hold({part.number: part.epoch for part in parts})
        for part in parts:
            if part.number not in held:
                self.overtaken(part)
        ours = [part for part in parts if part.number in held]
        self.write(page, ours)
        if save:
            self.save(page, ours)
        return ours

    def write(self, page: Page, parts: Sequence[Part]) -> None:
        """What came of the parts' batches since the last time."""
        outcomes = {part.number: part.taken() for part in parts if part.outcome}
        if gone := {number: outcome.gone for number, outcome in outcomes.items() if outcome.gone}:
            page.remove(gone)
        for number, outcome in outcomes.items():
            for lane, batch, rows in outcome.kept:
                page.keep(number, lane, batch, rows)
            for line, after in outcome.held:
                page.hold_back(line, after)
            page.let_go(number, outcome.free)

    def save(self, page: Page, parts: Sequence[Part]) -> None:
        """The states of parts, as they are sent from now on."""
        page.save({(part.number, part.epoch): part.state for part in parts})
