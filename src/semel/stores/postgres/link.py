"""What the PostgreSQL store needs from a driver: links that carry one statement, ears that hear notifications.

The two drivers' adapters (`postgres_asyncpg`, `postgres_psycopg`) implement this, the sync ones without ever
suspending. A link is used by one caller at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from semel.stores.places import Place

__all__ = ["SYNC_WAIT", "Ear", "Lender", "Link", "NotReached", "Row", "Source"]

Row: TypeAlias = Sequence[Any]

# The function of the server that warns when a commit stopped waiting for its synchronous standby.
SYNC_WAIT = "SyncRepWaitForLSN"


class NotReached(Exception):
    """No connection could be made; the driver's error is the cause."""


class Link(Protocol):
    """One connection. A signal's handler that raises may take it out of a thread's hands: psycopg's, if it is our own, is
    closed as soon as nobody has it any more. On a loop nobody is struck between two lines."""

    place: Place
    """In the pool, which gives it; free again when nobody has the link any more."""

    @property
    def greeted(self) -> int:
        """The server process that the greeting named. A pooler names one of its own invention."""
        ...

    @property
    def dead(self) -> bool:
        """Known to be closed. A link that is not may still turn out to be."""
        ...

    async def fetch(self, sql: str, args: Sequence[Any], timeout: float) -> Sequence[Row]:
        """Run one statement in its own transaction. Raises `Trouble`, or what the caller is to hear."""
        ...

    async def script(self, sql: str, timeout: float) -> None:
        """Run several statements in one transaction."""
        ...

    def cut(self) -> None:
        """Close at once, without a word to the server: the only way out after an unanswered statement."""
        ...

    async def quit(self) -> None:
        """Close politely."""
        ...


class Ear(Protocol):
    """A connection that listens on the channel."""

    async def hear(self, timeout: float) -> list[str]:
        """The payloads that came, as soon as one did; none after `timeout` seconds. Raises `Lost`."""
        ...

    def stop(self) -> None:
        """End `hear`, from any thread."""
        ...

    async def quit(self) -> None:
        """Close the connection; by whoever was hearing."""
        ...


class Lender(Protocol):
    """A pool that somebody else owns, of connections of one driver."""

    where: str
    errors: tuple[type[BaseException], ...]
    """What `lend` raises when there is no connection to be had."""

    @property
    def size(self) -> int:
        """How many connections it has at most."""
        ...

    async def lend(self, timeout: float) -> Any: ...

    async def take_back(self, connection: Any) -> None: ...

    async def spare(self, timeout: float) -> Any:
        """A connection like its own, but ours from now on: the pool's owner need not wait for it. None: not possible."""
        ...


class Source(Protocol):
    """Where links come from: connections of our own, or a pool that somebody handed in."""

    @property
    def colour(self) -> Literal["sync", "async"]: ...

    @property
    def where(self) -> str:
        """Host and database, for people; never a password."""
        ...

    @property
    def owned(self) -> bool:
        """Whether links are ours to keep and close; otherwise they go back after each statement."""
        ...

    @property
    def spares(self) -> int:
        """How many dead links one may meet in a row before the server itself is to blame."""
        ...

    @property
    def prepares(self) -> bool | None:
        """Whether statements stay prepared in a connection. None: not known before the first look."""
        ...

    @prepares.setter
    def prepares(self, value: bool) -> None: ...

    async def open(self, timeout: float) -> Link:
        """A new or borrowed link. Raises NotReached."""
        ...

    async def back(self, link: Any) -> None:
        """Give a borrowed link back."""
        ...

    async def rest(self) -> None:
        """Wait, for a second or two at most, until no connection is on its way on this loop whose caller has left."""
        ...

    async def listen(self, channel: str, timeout: float) -> Ear | None:
        """An ear; None when this source has no way to make one. Raises NotReached or Trouble."""
        ...
