"""What a consumer has begun with its database when it is told to end is not torn: some drivers complain about that later."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel.messaging import Inbox, Message, letters
from semel.messaging import consumer as consumers
from tests.messaging.conftest import Home


class Silence:
    """A source that has nothing, and waits."""

    extends_every = 10.0

    async def receive(self, limit: int) -> list[Any]:
        del limit
        await asyncio.Event().wait()
        return []

    async def aclose(self) -> None:
        """It has opened nothing."""


def test_a_look_at_the_letters_that_has_begun_ends_by_itself(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "_RETRY_POLL", 0.01)
    monkeypatch.setattr(consumers, "_LAST_LOOK", 30.0)
    with Inbox(sqlite_home.url, consumer="shipping") as inbox:
        inbox.handler("orders")(handle)
        assert asyncio.run(ended_looks(inbox, monkeypatch)) == ["by itself"]


def test_what_is_handled_ends_meanwhile(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends a consumer has said how long that may take: `grace`."""
    monkeypatch.setattr(consumers, "_RETRY_POLL", 0.01)
    monkeypatch.setattr(consumers, "_LAST_LOOK", 30.0)
    with Inbox(sqlite_home.url, consumer="shipping") as inbox:
        inbox.handler("orders")(handle)
        assert asyncio.run(ended_looks(inbox, monkeypatch, until_drained=True)) == ["by itself"]


def handle(message: Message) -> None:
    """Nothing comes."""


async def ended_looks(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, *, until_drained: bool = False
) -> list[str]:
    looks, go = asyncio.Event(), asyncio.Event()
    ended: list[str] = []
    read: Any = inbox.database.read

    async def slow(fn: Any, /, *args: Any) -> Any:
        if fn is letters.due:
            looks.set()
            await go.wait()
            ended.append("by itself")
        return await read(fn, *args)

    monkeypatch.setattr(inbox.database, "read", slow)
    consumer = inbox.consuming(Silence())
    drain = consumer._drain

    async def drained() -> None:
        await drain()
        go.set()

    monkeypatch.setattr(consumer, "_drain", drained)
    running = asyncio.create_task(consumer.run())
    await looks.wait()
    running.cancel()
    await asyncio.sleep(0)
    if not until_drained:
        go.set()
    await asyncio.gather(running, return_exceptions=True)
    return ended
