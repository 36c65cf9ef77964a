"""What each process of the messaging cells does: write, carry, repair, and look at the end; clients are in their own module."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.orm import Session

from semel.messaging import Message
from semel.runtime import run_sync
from semel.testing.chaos import messaging_redis, traps
from semel.testing.chaos.cells import Plan
from semel.testing.chaos.messaging_clients import consume, order
from semel.testing.chaos.messaging_scene import INSERT, Scene
from semel.testing.chaos.messaging_sinks import ARRIVED, BROKERS, arrived, body_of, make
from semel.testing.chaos.places import TABLES
from semel.testing.chaos.transactions import TABLE

__all__ = ["attempt"]

_ROWS: Final = text(f"SELECT k FROM {TABLE} WHERE k LIKE :k ORDER BY id")
_WAITING: Final = text(f"SELECT id FROM {TABLES}_outbox WHERE tenant = :t ORDER BY seq")

_CLEAR: Final = text(f"DELETE FROM {TABLES}_outbox WHERE tenant = :t")


def attempt(plan: Plan) -> None:
    """In a forked worker, or as an errand."""
    logging.disable(logging.CRITICAL)  # relays and drivers speak of the faults
    scene = Scene(plan)
    match plan.role, scene.mode:
        case "writer", _:
            asyncio.run(_fill(scene, scene.said["messages"]))
        case "judge", _:
            asyncio.run(_judge(scene))
        case "person", _:
            asyncio.run(_unpark(scene))
        case ("relay", _) | (_, "relay"):
            asyncio.run(_carry(scene))
        case _, "outbox":
            _order(scene)
        case _:
            asyncio.run(consume(scene))


def _order(scene: Scene) -> None:
    if not scene.in_redis:
        order(scene)
    elif scene.cell.colour == "sync":
        run_sync(messaging_redis.order(scene))
    else:
        asyncio.run(messaging_redis.order(scene))


async def _fill(scene: Scene, names: Sequence[str]) -> None:
    """A row and a message of each key in a transaction; under `inbox` they are carried to the broker as well."""
    if scene.in_redis:
        with scene.outbox() as outbox:
            messaging_redis.fill(scene, outbox, names)
        return
    with scene.outbox() as outbox, scene.engine() as engine:
        for _, some in groupby(names, key=lambda name: name[1:]):
            with Session(engine) as session, session.begin():
                for name in some:
                    session.execute(INSERT, scene.row(f"row {name}"))
                    outbox.add(session, scene.message(name))
        if scene.mode != "outbox":
            await make(scene.kind, scene.said["broker"], scene.place)
        if scene.mode == "inbox":
            async with scene.relay(outbox) as relay:
                await relay.drain()


async def _carry(scene: Scene) -> None:
    """A relay, until nothing is left that it could send."""
    if also := scene.said.get("also", ()):
        await _fill(scene, also)
    try:
        with scene.outbox() as outbox:
            async with scene.relay(outbox) as relay:
                if scene.in_redis:
                    await messaging_redis.known(outbox)
                else:
                    await outbox.database.run(lambda _: None)
                if scene.role == "victim":
                    traps.arm(scene.plan, scene.ledger)
                report = await relay.drain()
                while scene.said.get("poison") and not await relay.parked():
                    report = await relay.drain()
            if scene.wire is not None:
                await scene.wire.aclose()
        scene.answer(report)
    except Exception as error:  # noqa: BLE001 - whatever it is, the ledger has it
        scene.ledger.error(scene.role, type(error).__name__, str(error))
    finally:
        traps.disarm()


async def _unpark(scene: Scene) -> None:
    """What was wrong is repaired: the parked key is tried again, from its first message."""
    with scene.outbox() as outbox:
        async with scene.relay(outbox) as relay:
            await relay.replay()
            scene.answer(await relay.drain())


# ------------------------------------------------------------------------------------------------ the end


async def _judge(scene: Scene) -> None:
    """Everything that has come of it goes into the ledger; `replayed` says that nothing is left to do."""
    held: list[Any] = []
    with scene.outbox() as outbox:
        async with scene.relay(outbox) as relay:
            if scene.mode == "outbox":
                await relay.drain()
            if scene.mode == "relay":
                held = [*await relay.parked(), *await relay.backing_off()]
    if scene.mode != "inbox" and scene.kind in BROKERS:
        for name, body in await arrived(scene.kind, scene.said["read"], scene.place):
            if body != body_of(int(name[1:])):
                raise ValueError(f"{name} has arrived with {body!r}")
            scene.ledger.effect(name, ARRIVED)
    waiting = await messaging_redis.look(scene) if scene.in_redis else _look(scene)
    if held or (waiting and scene.mode != "inbox"):
        scene.ledger.error("judge", "Left", f"held back: {held}, in the outbox: {waiting}")
    else:
        scene.ledger.answer("judge", "all is over", replayed=True)


def _look(scene: Scene) -> list[str]:
    """What the database has; the messages that are left in the outbox."""
    with scene.engine() as engine:
        if scene.mode == "relay":
            _admit(scene, engine)
        with engine.begin() as connection:
            rows = connection.execute(_ROWS, {"k": f"{scene.plan.key} %"}).scalars().all()
            waiting = [str(name) for name in connection.execute(_WAITING, {"t": scene.plan.key}).scalars()]
            connection.execute(_CLEAR, {"t": scene.plan.key})  # nobody carries what a handler has sent
    for row in rows:
        scene.ledger.effect(str(row).partition(" ")[2], "database")
    for name in waiting:
        scene.ledger.effect(name, "outbox")
    return waiting


def _admit(scene: Scene, engine: Any) -> None:
    """What has arrived, as often as it did, goes through an inbox: what is doubled there is handled once."""
    came = [each.what for each in scene.ledger.effects() if each.by == ARRIVED]

    def handle(session: Any, message: Message) -> None:
        session.execute(INSERT, scene.row(str(message.id)))

    inbox = scene.inbox(engine)
    with Session(engine) as session:
        for name in came:
            inbox.process(session, scene.message(name), handle)
        session.commit()
