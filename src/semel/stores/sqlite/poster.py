# ruff: noqa: SLF001 - the other half of SqliteStore
"""The quick way to an SQLite file: a claim or settle is put on the desk of its event loop by a plain call.

See `semel.posting`. A file that is not open yet, or not any more, is opened by the verbs of `SqliteStore`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.model import Answer, Ask, Settle, Verdict
from semel.stores.posted import Posted

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from semel.stores.sqlite.desk import Desk
    from semel.stores.sqlite.store import SqliteStore

__all__ = ["SqlitePoster"]


class SqlitePoster:
    """See `Poster`. Belongs to one event loop, as its desk does."""

    __slots__ = ("_at", "_store")

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._at: tuple[Desk, AbstractEventLoop] | None = None

    def _seated(self) -> tuple[Desk, AbstractEventLoop]:
        self._at = at = self._store._desk()
        return at

    def claim(self, ask: Ask, now: float) -> Posted | None:
        del now
        store = self._store
        if store._epoch is not store._file.epoch:
            return None
        desk, loop = self._at or self._seated()
        return desk.claim(ask, loop)

    def claimed(self, ask: Ask, reply: Any, *, whole: bool = True) -> Verdict | None:
        del ask, whole
        return None if isinstance(reply, Exception) else reply

    async def reclaim(self, ask: Ask, reply: Any, asked: float) -> Verdict:
        del ask, asked
        raise reply  # a file has no lost replies: whether to try again is the next layer's to say

    def unclaimed(self, ask: Ask) -> None:
        """What is on its way is written all the same."""

    def settle(self, end: Settle, now: float) -> Posted | None:
        del now
        store = self._store
        if store._epoch is not store._file.epoch:
            return None
        desk, loop = self._at or self._seated()
        return desk.settle(end, loop)

    def settled(self, end: Settle, reply: Any, asked: float) -> Answer | None:
        del end, asked
        return None if isinstance(reply, Exception) else reply

    async def resettle(self, end: Settle, reply: Any, asked: float) -> Answer:
        del end, asked
        raise reply
