"""A function that forks, and a child that comes back out of it: `python -m tests.processes.forking URL COLOUR LEAVING`.

Prints how the child was told to end, and what the parent got for its call and for the same one again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from typing import Any, NoReturn

from semel import AsyncSemel, ConfigurationError, Semel, current_run

URL, COLOUR, LEAVING = sys.argv[1:4]
PARENT = os.getpid()
SETTINGS: dict[str, Any] = {"tenant": uuid.uuid4().hex, "lease": 30, "timeout": 15, "settle_timeout": 20}


class Failed(Exception):
    pass


ENDS = {SystemExit: 3, Failed: 4, ConfigurationError: 5}
OTHERWISE = 6


def forks() -> str:
    """Two processes come out of it: the child at once, the parent when the child has ended."""
    child = os.fork()
    if child:
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        return "of the parent"
    if LEAVING == "exits":
        sys.exit(0)
    if LEAVING == "raises":
        raise Failed
    return "of the child"


def plain() -> Any:
    value = forks()
    return value if LEAVING != "steps" else current_run().step("charge", lambda: value)


async def coroutine() -> Any:
    value = forks()
    run: Any = current_run()
    return value if LEAVING != "steps" else await run.step("charge", lambda: value)


def leave(told: type[BaseException] | None) -> NoReturn:
    os._exit(OTHERWISE if told is None else ENDS.get(told, OTHERWISE))


async def in_a_loop() -> None:
    once = AsyncSemel(URL, **SETTINGS)
    try:
        outcome = await once.execute("k", coroutine)
    except BaseException as error:
        if os.getpid() != PARENT:
            leave(type(error))
        raise
    if os.getpid() != PARENT:
        leave(None)
    print(outcome.value, outcome.attempt, (await once.execute("k", coroutine)).value, flush=True)
    await once.aclose()


def without_a_loop() -> None:
    once = Semel(URL, **SETTINGS)
    try:
        outcome = once.execute("k", plain)
    except BaseException as error:
        if os.getpid() != PARENT:
            leave(type(error))
        raise
    if os.getpid() != PARENT:
        leave(None)
    print(outcome.value, outcome.attempt, once.execute("k", plain).value, flush=True)
    once.close()


if __name__ == "__main__":
    if COLOUR == "async":
        asyncio.run(in_a_loop())
    else:
        without_a_loop()
