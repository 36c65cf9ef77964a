"""A function of a relay that raises SystemExit, or cancels itself, has failed for its message; the relay goes on (as consumers do)."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from sqlalchemy.orm import Session

from semel.messaging import Message, Relay
from semel.messaging.routes import Route
from tests.messaging.conftest import Home, awaited


def _leave(message: Message) -> Any:
    if message.id == "bad":
        sys.exit(3)
    return message


async def _aleave(message: Message) -> None:
    _leave(message)


async def _cancel(message: Message) -> None:
    if message.id == "bad":
        raise asyncio.CancelledError


WAYS: dict[str, Any] = {
    "a function": _leave,
    "a coroutine function": _aleave,
    "one that cancels itself": _cancel,
    "a condition": Route(print, when=_leave),
    "a transform": Route(print, transform=_leave),
}


@pytest.mark.parametrize("way", WAYS)
@awaited
async def test_its_message_is_parked_and_the_others_are_sent(sqlite_home: Home, way: str) -> None:
    outbox = sqlite_home.outbox()
    with Session(sqlite_home.engine) as session, session.begin():
        outbox.add(session, Message("o", 1, key="x", id="bad"))
        outbox.add(session, *(Message("o", n, key=f"k{n}", id=f"m{n}") for n in range(3)))
    relay = Relay(outbox, {"o": WAYS[way]}, max_attempts=1, hooks=())
    report = await relay.drain()
    assert (report.sent, report.parked) == (3, 1)
    (line,) = await relay.parked()
    assert line.id == "bad"
    assert "would have ended more than its message" in line.reason
    outbox.close()


def test_a_keyboard_interrupt_is_for_the_process(sqlite_home: Home) -> None:
    outbox = sqlite_home.outbox()
    with Session(sqlite_home.engine) as session, session.begin():
        outbox.add(session, Message("o", 1, id="m1"))

    def interrupted(message: Message) -> bool:
        raise KeyboardInterrupt(message.id)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(Relay(outbox, {"o": Route(print, when=interrupted)}, hooks=()).drain())
    outbox.close()
