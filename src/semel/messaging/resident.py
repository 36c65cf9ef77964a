"""What lives in a place of messages, a SQL database or Redis: both ways to make what it needs there, and to close."""

from __future__ import annotations

from semel.closing import Closeable
from semel.messaging.pages import Home

__all__ = ["Resident"]


class Resident(Closeable):
    """What lives in a database of messaging: makes its tables, and closes what it opened."""

    home: Home

    def create(self) -> None:
        """Make the tables, on a connection of our own. Not needed where first use may make them."""
        self.home.create()

    async def acreate(self) -> None:
        """As `create`, awaited."""
        await self.home.acreate()

    def close(self) -> None:
        """Close what was opened here."""
        self.home.close()

    async def aclose(self) -> None:
        """As `close`."""
        self.home.close()
