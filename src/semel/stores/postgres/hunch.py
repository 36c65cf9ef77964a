"""Whether the next key is new. Most are, and come one after the other: then it is inserted without a look at what is there.

A hunch that is right saves the search for what is not there; one that is wrong costs a statement more, which writes
nothing, and is much dearer. So it takes many new keys in a row, and after each mistake more. It decides which statement is
sent first, and never what a key is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final

from semel.errors import SemelError
from semel.stores.postgres.errors import Late, Trouble
from semel.stores.postgres.link import Row

__all__ = ["ENOUGH", "Hunch"]

ENOUGH: Final = 16
_MOST: Final = 1024


class Hunch:
    """Shared by the threads of a store: one that is a call behind is as good."""

    __slots__ = ("_enough", "_in_a_row", "new")

    def __init__(self) -> None:
        self.new = False
        self._in_a_row = 0
        self._enough = ENOUGH

    def learn(self, *, new: int) -> None:
        """So many new keys came together; 0: not all of them were."""
        if self.new and not new:
            self._enough = min(self._enough * 2, _MOST)
        self._in_a_row = self._in_a_row + new if new else 0
        self.new = self._in_a_row >= self._enough
        if self._in_a_row >= _MOST:
            self._enough = ENOUGH

    async def follow(self, inserting: Awaitable[Sequence[Row]]) -> Sequence[Row]:
        """The answer of claim_new or claim_new_many; nothing if the hunch was wrong.

        It was wrong, too, where nothing can be inserted at all (a server that is read-only, a table that somebody has
        locked): outcomes can be read there, and the statement that looks says what else is the matter. Not where no
        answer came in time: then there is no time to look either.
        """
        try:
            rows = await inserting
            if rows[0][1]:
                return rows
        except (Trouble, SemelError) as error:
            if isinstance(error.__cause__, Late):
                raise
        self.learn(new=0)
        return ()
