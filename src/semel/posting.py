"""One claim or one settle in two halves: sent by a plain call, its answer awaited by whoever asks, read by a plain call.

A verb of `Store` is a coroutine, and each layer's is a coroutine around it: made, entered at every wake-up, and thrown away,
for every call. Where a store can put one question on its way without waiting (Redis: one join of bytes into the queue of
its connection), the flow awaits the reply itself, and its layers are plain functions before and after. It is a quicker
way to the same verbs and decides nothing of its own: whatever is out of the ordinary goes the way of `Store`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

import msgspec

from semel.errors import StoreUnavailable
from semel.model import Answer, Ask, Settle, Verdict
from semel.store import Store

__all__ = ["Brief", "Poster", "interrupted", "poster_of"]


class Brief(msgspec.Struct, gc=False):
    """A replay that was read no further than its caller needs: done by its owner, with no ref, marker, error or steps."""

    attempts: int
    expires: float
    """Until when it is replayed, by the store's clock."""
    reply: bytes
    at: int
    """Where the result begins."""

    @property
    def result(self) -> bytes:
        return self.reply[self.at :]


class Poster(Protocol):
    """A store's quick way on one event loop. What `claim` and `settle` give is awaited at once, and what the wait gave or
    raised (an `Exception`, as a value) is handed on; a wait that was broken off is told to `unclaimed`.
    """

    def claim(self, ask: Ask, now: float) -> Awaitable[Any] | None:
        """Send it. None: nothing was sent, and only `Store.claim` can do it. `now` is the loop's clock."""
        ...

    def claimed(self, ask: Ask, reply: Any, *, whole: bool = True) -> Verdict | Brief | None:
        """What the reply says; None: it says nothing yet, `reclaim`. Only without `whole` a `Brief` stands for a replay."""
        ...

    async def reclaim(self, ask: Ask, reply: Any, asked: float) -> Verdict:
        """The verdict in spite of a first try at `asked` that ended in `reply`, within the store's timeout from then on."""
        ...

    def unclaimed(self, ask: Ask) -> None:
        """Nobody waits for this claim any more, or its reply could not be read."""
        ...

    def settle(self, end: Settle, now: float) -> Awaitable[Any] | None:
        """As `claim`."""
        ...

    def settled(self, end: Settle, reply: Any, asked: float) -> Answer | None:
        """As `claimed`; None: `resettle`."""
        ...

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        """As `reclaim`."""
        ...


def poster_of(store: Store) -> Poster | None:
    """The quick way of a store with its layers, if all of them have one."""
    make = getattr(store, "poster", None)
    poster: Poster | None = None if make is None else make()
    return poster


def interrupted(error: BaseException) -> StoreUnavailable:
    """What those are told who travelled along with a call that a signal's handler struck."""
    told = StoreUnavailable(f"{type(error).__name__} struck while this call was on its way")
    told.__cause__ = error
    return told
