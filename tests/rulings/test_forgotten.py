"""Calls and faces that nobody holds any more: the collector ends them, and what they leave says so."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from typing import Any

import pytest

from semel import AsyncSemel, Semel, heart, runtime


@pytest.mark.parametrize(("policy", "state"), [("retry", "released"), ("hold", "unknown")])
def test_R10_a_task_that_is_collected_is_recorded_as_left(
    policy: Any, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coroutine is closed in another context than the one that it ran in."""
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: said.append(told.exc_value))

    async def forever() -> None:
        await asyncio.get_running_loop().create_future()  # which nobody else holds

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda *_: None
        )  # that it was destroyed: asyncio's own word
        async with AsyncSemel("memory://", lease=30, on_unknown=policy) as once:
            task = asyncio.ensure_future(once.execute("k", forever))
            await asyncio.sleep(0.05)
            del task
            gc.collect()
            await asyncio.sleep(0.05)
            record = await once.peek("k")
            assert record is not None
            assert record.state == state
            assert record.error is None or record.error.type == "GeneratorExit"

    asyncio.run(main())
    assert said == []


def test_a_face_that_is_forgotten_keeps_no_thread_however_long_its_lease_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heart, "_LOOK", 0.2)
    monkeypatch.setattr(runtime, "_IDLE", 0.1)

    def hearts() -> int:
        return sum(each.name == "semel-heart" for each in threading.enumerate())

    before = hearts()
    Semel("memory://", lease=600).execute("k", int)
    assert hearts() == before + 1
    deadline = time.monotonic() + 20
    while hearts() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert hearts() == before


def test_R17_a_long_lease_is_renewed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it is looked at more often than it is due."""
    monkeypatch.setattr(heart, "_LOOK", 0.05)
    with Semel("memory://", lease=0.9) as once:

        def work() -> float:
            time.sleep(1.2)
            record = once.peek("k")
            assert record is not None
            return record.lease_until - time.time()

        assert once.execute("k", work).value > 0
