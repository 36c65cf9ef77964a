"""One name, one step at a time: whoever comes second waits for the first, and nobody waits in a circle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from semel.calls import name_of
from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.run import Run
    from semel.runtime import Parker, Runtime

__all__ = ["Turn", "inside", "quiet"]


class Turn:
    """A step under way: who waits for its end, and the ends that it waits for itself.

    It does not hold its run: a context that nobody leaves any more must not keep the run's lease alive.
    """

    __slots__ = ("alone", "awaited", "call", "in_flight", "left", "name", "over", "parkers")

    def __init__(self, run: Run, name: str) -> None:
        self.call = run.call
        self.in_flight = run.in_flight
        self.name = name
        self.over = False
        self.left = False
        """Whoever asked for it has gone."""
        self.alone = False
        """It goes on without whoever asked for it, and ends by itself."""
        self.parkers: list[Parker] = []
        self.awaited: list[Turn] = []

    def __str__(self) -> str:
        return f"step {self.name!r} of {name_of(self.call)}"

    async def take(self, runtime: Runtime) -> None:
        """Wait until it is its turn."""
        while (other := self.in_flight.setdefault(self.name, self)) is not self:
            await other.wait(runtime)

    def leave(self) -> None:
        """Whoever asked for it goes."""
        self.left = True
        if not self.alone:
            self.end()

    def end(self) -> None:
        self.over = True
        if self.in_flight.get(self.name) is self:
            self.in_flight.pop(self.name, None)
        for parker in tuple(self.parkers):
            parker.wake()

    async def wait(self, runtime: Runtime) -> None:
        """Until it has ended, or for a moment: ask again. Raises ConfigurationError where nobody would ever be woken."""
        mine = [turn for turn in _inside.get() if not turn.over]
        for turn in mine:
            turn.awaited.append(self)
        try:
            self._refuse_a_circle(mine)  # told first: of two who begin to wait at once, one sees the other
            await self.rest(runtime)
        finally:
            for turn in mine:
                turn.awaited.remove(self)

    async def rest(self, runtime: Runtime) -> None:
        """As `wait`, for whoever holds nobody up meanwhile."""
        parker = runtime.parker()
        self.parkers.append(parker)
        try:
            if not self.over:
                await parker.park(1.0)
        finally:
            self.parkers.remove(parker)

    def _refuse_a_circle(self, mine: Sequence[Turn]) -> None:
        if self in mine:
            raise ConfigurationError(
                f"{self} is used inside of itself, and cannot wait for its own end: give the inner one another name"
            )
        met, left = set[Turn](), [self]
        while left:
            turn = left.pop()
            if turn in mine:
                raise ConfigurationError(
                    f"{self} is asked for inside of {turn}, which it waits for itself: neither would ever end. Make one of them "
                    "before the other, not inside of it"
                )
            if turn not in met:
                met.add(turn)
                left += turn.awaited


_inside: ContextVar[tuple[Turn, ...]] = ContextVar("semel_steps", default=())
"""The steps that this code is a part of."""


@contextmanager
def inside(turn: Turn) -> Iterator[None]:
    """What is done in the block is a part of this step."""
    outer = _inside.set((*_inside.get(), turn))
    try:
        yield
    finally:
        _inside.reset(outer)


async def quiet(run: Run, runtime: Runtime) -> None:
    """Wait until no step of the run is under way, and no thread that was left by its caller."""
    while run.busy:
        await runtime.join(run.threads)
        for turn in tuple(run.in_flight.values()):
            await turn.rest(runtime)
