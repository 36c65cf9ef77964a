"""An error that cannot even be printed costs its message an attempt, as any other; the rest goes on."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.orm import Session

from semel import SemelWarning
from semel.messaging import Inbox, Message, Relay
from semel.messaging.routes import Route
from tests.messaging.conftest import Home, awaited
from tests.messaging.test_handlers import consumed


class Silent(Exception):
    """As an error of a client whose `response` is set later."""

    def __repr__(self) -> str:
        raise RuntimeError("no response yet")

    __str__ = __repr__


def _fail(message: Message) -> Any:
    if message.id == "bad":
        raise Silent
    return message


@awaited
async def test_a_handler_that_fails_without_words_ends_in_a_dead_letter(sqlite_home: Home) -> None:
    inbox = Inbox(sqlite_home.engine, consumer="c", hooks=())

    def handle(session: Session, message: Message) -> None:
        _fail(message)

    inbox.handler("t", max_attempts=2, backoff=(0.01, 0.01))(handle)
    messages = [Message("t", 1, id="bad"), Message("t", 2, id="good")]
    states, counts = await consumed(inbox, *messages)
    assert states == ["ack", "ack"]
    assert (counts.handled, counts.failed, counts.dead) == (1, 2, 1)
    inbox.close()


@pytest.mark.parametrize("way", [_fail, Route(print, when=_fail), Route(print, transform=_fail)])
@awaited
async def test_a_function_of_a_relay_that_fails_without_words_parks_its_message(
    sqlite_home: Home, way: Any
) -> None:
    outbox = sqlite_home.outbox()
    with Session(sqlite_home.engine) as session, session.begin():
        outbox.add(session, Message("o", 1, key="x", id="bad"), Message("o", 2, key="y", id="good"))
    report = await (relay := Relay(outbox, {"o": way}, max_attempts=1, hooks=())).drain()
    assert (report.sent, report.parked) == (1, 1)
    (line,) = await relay.parked()
    assert "Silent" in line.reason
    outbox.close()


@awaited
async def test_a_hook_that_fails_without_words_stops_no_message(sqlite_home: Home) -> None:
    def hook(event: object) -> None:
        raise Silent

    outbox = sqlite_home.outbox()
    with Session(sqlite_home.engine) as session, session.begin():
        outbox.add(session, Message("o", 1, id="m1"))
    with pytest.warns(SemelWarning, match="a messaging hook failed: <Silent>"):
        report = await Relay(outbox, {"o": print}, hooks=(hook,)).drain()
    assert report.sent == 1
    outbox.close()
