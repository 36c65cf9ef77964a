"""A caller in a process of its own: crashes at a named moment, or races with others. Run by the tests."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from typing import Any

from semel import InProgress
from semel.runtime import run_sync
from semel.within.failures import is_retryable
from tests.within.lab import Lab, Tx, wait


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def crash(lab: Lab, when: str) -> None:
    once, tx = await lab.ready()
    work = lab.work(tx)

    async def dies(key: str) -> str:
        await tx.insert(key)
        if hasattr(tx.target, "flush"):
            await wait(tx.target.flush())
        if when == "inside":
            die()
        return "made"

    def dies_sync(key: str) -> Any:
        return run_sync(dies(key))

    work = dies_sync if lab.colour == "sync" else dies
    await wait(once.within(tx.target).execute("k1", work, "k1"))
    if when == "before-commit":
        die()
    await tx.commit()
    die()


async def race(lab: Lab, keys: int, seed: int) -> None:
    """Four callers of one face in this process, each with a connection of its own."""
    once = lab.face()
    await wait(once.peek("warm-up"))
    for racer in [lab.spawn(one(lab, once, keys, seed * 4 + seat)) for seat in range(4)]:
        await racer.result(90)  # who started us waits for 100 s
    await lab.close()


async def one(lab: Lab, once: Any, keys: int, seed: int) -> None:
    tx = await lab.tx()
    dice = random.Random(seed)
    order = list(range(keys))
    dice.shuffle(order)
    for number in order:
        while not await attempt(lab, once, tx, f"key-{number}", dice):
            pass
    await lab.done_with(tx)


async def attempt(lab: Lab, once: Any, tx: Tx, key: str, dice: random.Random) -> bool:
    """One transaction. A third of the winners give up before their commit."""
    await tx.begin()
    try:
        outcome = await wait(
            once.within(tx.target).execute(key, lab.work(tx), key, wait=dice.choice((0, 0.01, 5)))
        )
    except InProgress:
        await tx.rollback()
        return False
    except Exception as error:
        dialect: Any = lab.dialect
        if not is_retryable(error, dialect):
            raise
        await tx.rollback()  # a deadlock is the caller's to repeat
        return False
    if not outcome.replayed and dice.random() < 0.33:
        await tx.rollback()
        return False
    await tx.commit()
    assert outcome.value == "made"
    return True


def main() -> None:
    what, driver, place, detail, seed = sys.argv[1:]
    lab = Lab(driver, place)
    body = crash(lab, detail) if what == "crash" else race(lab, int(detail), int(seed))
    (run_sync if lab.colour == "sync" else asyncio.run)(body)


if __name__ == "__main__":
    main()
