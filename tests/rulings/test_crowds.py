"""Many callers of one key in one process, when its leader's claim brings nothing that all could share (R31): nobody waits for
the others' turns, and no caller stands on another one's stack."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, Semel
from semel.stores.memory import MemoryStore

CROWD = 500  # more than Python's stack has room for, two frames each
SILENCE = 0.5


def work() -> int:
    return 1


async def told(once: AsyncSemel, crowd: int, **options: Any) -> Counter[str]:
    async def one(number: int) -> str:
        try:
            await once.execute(
                "key", work, inline=True, **{name: give(number) for name, give in options.items()}
            )
        except Exception as error:  # what they were told is what is asked
            return type(error).__name__
        return "ran"

    async with asyncio.timeout(60):  # each in its turn would be minutes
        return Counter(await asyncio.gather(*map(one, range(crowd))))


CROWDS: dict[str, tuple[dict[str, Callable[[int], Any]], str]] = {
    "the-same-request": ({}, "InProgress"),
    "requests-of-their-own": ({"request": lambda number: {"number": number}}, "KeyMismatch"),
}


@pytest.mark.parametrize(("options", "end"), CROWDS.values(), ids=CROWDS)
async def test_R31_a_crowd_that_asks_for_a_key_that_runs_elsewhere_is_told_so_at_once(
    tmp_path: Path, options: dict[str, Any], end: str
) -> None:
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    async with (
        AsyncSemel(url) as elsewhere,
        AsyncSemel(url, timeout=20) as once,
        elsewhere.claim("key", request={"number": -1}) as owner,
    ):
        assert await told(once, CROWD, **options) == {end: CROWD}
        await owner.complete(1)


async def test_R31_a_crowd_in_front_of_an_unknown_key_is_told_so_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'semel.db'}"
    async with AsyncSemel(url, timeout=20, settle_timeout=0.2) as once:
        claim = once.claim("key", on_unknown="hold", lease=0.05)
        await claim.__aenter__()
        once._engine().heart.stop()
        await asyncio.sleep(0.2)
        assert await told(once, CROWD) == {"OutcomeUnknown": CROWD}


async def test_R31_a_crowd_whose_store_is_silent_waits_about_as_long_as_one_caller() -> None:
    crowd = 40
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        async with AsyncSemel(url, timeout=SILENCE, settle_timeout=SILENCE) as once:
            began = time.monotonic()
            assert await told(once, crowd) == {"StoreUnavailable": crowd}
            assert time.monotonic() - began < crowd * SILENCE * 0.75  # each in its turn: all of it


def test_R31_a_crowd_of_threads_that_asks_for_a_key_that_runs_elsewhere_is_told_so_at_once(
    tmp_path: Path,
) -> None:
    url, crowd = f"sqlite:///{tmp_path / 'semel.db'}", 60
    start = threading.Barrier(crowd)

    def one(once: Semel) -> str:
        start.wait()
        try:
            once.execute("key", work)
        except Exception as error:  # what they were told is what is asked
            return type(error).__name__
        return "ran"

    with Semel(url) as elsewhere, elsewhere.claim("key") as owner, Semel(url, timeout=20) as once:
        with ThreadPoolExecutor(crowd) as threads:
            answers = Counter(threads.map(one, [once] * crowd))
        owner.complete(1)
        assert answers == {"InProgress": crowd}


async def test_R31_a_crowd_in_which_one_asks_for_something_else_costs_few_claims() -> None:
    crowd, claims = 200, 0

    class Counted(MemoryStore):
        async def claim(self, asks: Any) -> Any:
            nonlocal claims
            claims += len(asks)
            await asyncio.sleep(0.01)  # a way there and back
            return await super().claim(asks)

    store = Counted()
    async with AsyncSemel(store) as elsewhere, AsyncSemel(store) as once, elsewhere.claim("key") as owner:
        claims = 0
        ends = await told(once, crowd, request=lambda number: {"other": number == 7} if number == 7 else None)
        assert ends["InProgress"] >= crowd - 1
        assert claims < 10
        await owner.complete(1)
