"""R8: a face that is switched off refuses no call, however many are under way, and keeps nothing of those that have ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel import AsyncSemel, Semel, SemelWarning
from semel.layers import sweep

CROWD = 10_001  # one more than a memory store holds unless it is told otherwise


async def test_R8_no_crowd_is_too_large() -> None:
    with pytest.warns(SemelWarning, match="switched off"):
        once = AsyncSemel("memory://", enabled=False)
    running, all_run = 0, asyncio.Event()

    async def wait_for_all() -> None:
        nonlocal running
        running += 1
        if running == CROWD:
            all_run.set()
        await all_run.wait()

    async with once:
        await asyncio.gather(*(once.execute(f"k{each}", wait_for_all) for each in range(CROWD)))
    assert running == CROWD


@pytest.mark.filterwarnings("ignore::semel.SemelWarning")
def test_R8_what_has_ended_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_EVERY", 100)
    with Semel("memory://", enabled=False) as once, once.claim("held") as held:
        for each in range(350):
            once.execute(f"k{each}", int)
            with pytest.raises(ZeroDivisionError):
                once.execute(f"k{each}", lambda: 1 / 0)
        store: Any = once._engine().store
        assert len(store.inner._records) <= 101, "only those since the last look, and the one that runs"
        held.complete("still there")


@pytest.mark.filterwarnings("ignore::semel.SemelWarning")
async def test_R8_there_is_nothing_to_purge() -> None:
    with Semel("memory://", enabled=False, retention=0) as once:
        once.execute("k", int)
        assert once.purge() == 0
        with pytest.warns(SemelWarning, match="keeps no records"):
            once.purge()
    async with AsyncSemel("memory://", enabled=False, retention=0) as awaited:
        await awaited.execute("k", int)
        assert await awaited.purge() == 0
