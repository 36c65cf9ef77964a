"""A batch that a sink has is never rejected, whatever has happened to its rows since: its number would be given to others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from semel.messaging import Message, Outbox, Relay, Row
from semel.messaging.bodies import HEADER
from semel.messaging.bodies.files import FileBodies
from semel.messaging.events import Alarm, RelayEvent
from semel.messaging.sink import Guarantee, Rejected, SinkUnavailable
from semel.messaging.sinks.outbox import OutboxSink
from semel.testing.sinks import rows
from tests.messaging.conftest import Home, RedisPlace, awaited

Place = Home | RedisPlace


@awaited
async def test_another_outbox_when_a_body_is_over(place: Place, tmp_path: Path) -> None:
    """The answer got lost, the body was swept, and the batch is sent again."""
    (tmp_path / "bodies").mkdir()
    store, there = FileBodies(tmp_path / "bodies"), place.outbox()
    sender = Outbox(f"sqlite:///{tmp_path}/sender.db", claim_check=store, claim_over=10)
    sender.create()
    engine, told = create_engine(f"sqlite:///{tmp_path}/sender.db"), list[RelayEvent]()
    with Session(engine) as session, session.begin():
        sender.add(session, Message("t", {"text": "x" * 100}, key="k", id="m1"))
    sink = Forgetful(sender, OutboxSink(there), store)
    first = Relay(sender, {"t": sink}, hooks=(told.append,), max_attempts=1)
    await first.drain()
    assert sink.swept
    report = await first.drain()
    assert (report.pending, report.parked, place.count()) == ({}, 0, 1)
    assert not [event for event in told if isinstance(event, Alarm)]
    with pytest.raises(Rejected, match=r"m2|missing|no body"):  # one that is not in is rejected, as before
        missing = msgspec.structs.replace(rows(1)[0], id="m2", headers=sink.headers)
        await sink.publish(60, 9, 1, [missing])
    sender.close()
    there.close()
    engine.dispose()


class Forgetful:
    """The other outbox behind a network that loses the first answer; and then the body is swept."""

    guarantee: Guarantee = "exact"

    def __init__(self, sender: Outbox, inner: OutboxSink, store: FileBodies) -> None:
        self._inner, self._store, self._sender = inner, store, sender
        self.swept = False
        self.headers: dict[str, str] = {}

    def bind(self, source: str) -> None:
        self._inner.bind(source)

    def attach(self, bodies: Any) -> None:
        self._inner.attach(bodies)

    async def publish(self, part: int, epoch: int, batch: int, given: Sequence[Row]) -> int | None:
        found = await self._inner.publish(part, epoch, batch, given)
        if not self.swept:
            self.swept = True
            self.headers = {HEADER: given[0].headers[HEADER]}
            for body in await asyncio.to_thread(
                lambda: list(self._store.stored(self._sender.home.identity[:16]))
            ):
                self._store.delete(body.name)
            raise SinkUnavailable("the answer got lost")
        return found
