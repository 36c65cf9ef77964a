"""The messaging cells whose outbox is in Redis: business entries and messages are one EXEC, and so is the record.

The application's rows are entries of a list of the schedule's own. There is no inbox here: its admissions are rows of an SQL
database.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from typing import Any

import redis

from semel import AsyncSemel, Semel, points
from semel.messaging import Outbox
from semel.testing.chaos import traps
from semel.testing.chaos.messaging_scene import Scene
from semel.testing.chaos.messaging_verdicts import GHOST
from semel.testing.chaos.transactions import TABLE, Transaction, open_transaction, wait

__all__ = ["fill", "known", "look", "order"]


def _rows(scene: Scene) -> str:
    return f"{TABLE}:messages:{scene.plan.key}"


async def known(outbox: Outbox) -> None:
    """What is looked up once is not part of the story."""
    await outbox.acreate()


def fill(scene: Scene, outbox: Outbox, names: Sequence[str]) -> None:
    """An entry and a message of each key in one EXEC."""
    with closing(redis.Redis.from_url(scene.plan.url)) as client:
        for _, some in groupby(names, key=lambda name: name[1:]):
            with client.pipeline() as pipe:
                for name in some:
                    pipe.rpush(_rows(scene), f"row {name}")
                    outbox.add(pipe, scene.message(name))
                pipe.execute()


async def look(scene: Scene) -> list[str]:
    """What Redis has; the messages that are left in the outbox."""
    with closing(redis.Redis.from_url(scene.plan.url, decode_responses=True)) as client:
        found: Any = client.lrange(_rows(scene), 0, -1)
    for row in found:
        scene.ledger.effect(str(row), "database")
    with scene.outbox() as outbox:
        waiting = [each.id for each in await outbox.waiting(tenant=scene.plan.key)]
    for name in waiting:
        scene.ledger.effect(name, "outbox")
    return waiting


async def order(scene: Scene) -> None:
    """Record, entry and message are one EXEC, or nothing is: `within` on a pipeline, and `outbox.add`."""
    url, is_sync = scene.plan.url, scene.cell.colour == "sync"
    once: Any = (Semel if is_sync else AsyncSemel)(url, tenant="chaos", lease=scene.plan.lease)
    transaction = await open_transaction(url, scene.cell.colour, "")
    with scene.outbox() as outbox:
        await wait(once.peek(scene.plan.key))
        outbox.create()
        if scene.role == "victim":
            traps.arm(scene.plan, scene.ledger)
        try:
            if scene.cell.fault == "rollback":
                await _thrown_away(scene, transaction, outbox)
            else:
                await _within(scene, once, transaction, outbox)
        except Exception as error:  # noqa: BLE001 - a broken connection is the caller's own error
            scene.ledger.error(scene.role, type(error).__name__, str(error))
        finally:
            traps.disarm()
    await transaction.close()
    await wait(once.close())


async def _within(scene: Scene, once: Any, transaction: Transaction, outbox: Outbox) -> None:
    pipe = transaction.target

    def work() -> str:
        pipe.rpush(_rows(scene), "row a1")
        outbox.add(pipe, scene.message("a1"))
        return scene.role

    async def work_async() -> str:
        return work()

    bound = once.within(pipe)
    fn = work if scene.cell.colour == "sync" else work_async
    outcome = await wait(bound.execute(scene.plan.key, fn, wait=scene.plan.wait))
    points.reach("commit.done")
    scene.ledger.answer(scene.role, outcome.value, replayed=outcome.replayed)


async def _thrown_away(scene: Scene, transaction: Transaction, outbox: Outbox) -> None:
    """A pipeline is emptied instead of executed; then there is one that is not."""
    pipe = transaction.target
    for name, executed in ((GHOST, False), ("a1", True)):
        pipe.rpush(_rows(scene), f"row {name}")
        outbox.add(pipe, scene.message(name))
        if not executed:
            await wait(pipe.reset())
            scene.ledger.struck(scene.role)
    await wait(pipe.execute())
    scene.ledger.answer(scene.role, scene.role, replayed=False)
