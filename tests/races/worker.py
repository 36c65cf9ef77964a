"""A worker process: runs keys through a face, writes each effect and each answer with one append.

plan: url, colour, tenant, keys, rounds, lease, wait, effects, answers; `point` names a fault point at which the process
kills or stops itself (`fault`), at the `at`-th time it gets there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from typing import Any

from semel import AsyncSemel, Semel, SemelError, current_run, points

PLAN: dict[str, Any] = {}


def append(path: str, line: str) -> None:
    handle = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.write(handle, (line + "\n").encode())
    finally:
        os.close(handle)


def effect() -> dict[str, Any]:
    run = current_run()
    append(PLAN["effects"], run.key)
    return {"key": run.key, "attempt": run.attempt, "pid": os.getpid()}


def slow_effect() -> dict[str, Any]:
    made = effect()
    time.sleep(PLAN.get("work", 0))
    return made


async def async_effect() -> dict[str, Any]:
    made = effect()
    await asyncio.sleep(PLAN.get("work", 0))
    return made


def answered(key: str, outcome: Any) -> None:
    line = {"key": key, "replayed": outcome.replayed, "value": outcome.value, "attempt": outcome.attempt}
    append(PLAN["answers"], json.dumps(line | {"pid": os.getpid(), "at": time.time()}))


def failed(key: str, error: SemelError) -> None:
    append(PLAN["answers"], json.dumps({"key": key, "error": type(error).__name__, "pid": os.getpid()}))


def set_traps() -> None:
    count = 0

    def listener(name: str) -> None:
        nonlocal count
        if name != PLAN.get("point"):
            return
        count += 1
        if count == PLAN.get("at", 1):
            os.kill(os.getpid(), signal.SIGKILL if PLAN["fault"] == "kill" else signal.SIGSTOP)

    if "point" in PLAN:
        points.listen(listener)


def keys() -> list[str]:
    order = [key for key in PLAN["keys"] for _ in range(PLAN.get("rounds", 1))]
    random.Random(os.getpid()).shuffle(order)
    return order


def run_sync(settings: dict[str, Any]) -> None:
    with Semel(PLAN["url"], **settings) as once:
        for key in keys():
            try:
                answered(key, once.execute(key, slow_effect, wait=PLAN.get("wait", 30)))
            except SemelError as error:
                failed(key, error)


async def run_async(settings: dict[str, Any]) -> None:
    async with AsyncSemel(PLAN["url"], **settings) as once:

        async def one(key: str) -> None:
            try:
                answered(key, await once.execute(key, async_effect, wait=PLAN.get("wait", 30)))
            except SemelError as error:
                failed(key, error)

        await asyncio.gather(*(one(key) for key in keys()))


def work(plan: dict[str, Any]) -> None:
    """In a process of its own."""
    PLAN.update(plan)
    # Times beyond which even a busy machine is broken.
    patient = {"tenant": PLAN["tenant"], "lease": PLAN.get("lease", 30), "timeout": 15, "settle_timeout": 20}
    settings = patient | PLAN.get("settings", {})
    set_traps()
    if PLAN["colour"] == "sync":
        run_sync(settings)
    else:
        asyncio.run(run_async(settings))
