"""A run that asks for its own key: told so at once, where it would wait for itself (R3)."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from typing import Any

import pytest

from semel import ConfigurationError, InProgress
from semel.run import _current

from .conftest import Lab
from .tools import enter, meanwhile, owned


def _asking(lab: Lab, once: Any, key: str, inner: Any, **options: Any) -> Any:
    """A function that asks for a key."""

    def plain() -> Any:
        return once.execute(key, inner, **options).value

    async def coroutine() -> Any:
        return (await once.execute(key, inner, **options)).value

    return plain if lab.colour == "sync" else coroutine


@pytest.mark.timeout(60)
async def test_R3_a_run_that_would_wait_for_its_own_key_for_ever_is_told_so_at_once(lab: Lab) -> None:
    once = lab.face()
    own = _asking(lab, once, "k", lab.effect(), wait=math.inf)
    between = _asking(lab, once, "between", own)
    began = time.monotonic()
    for function in (own, between):
        with pytest.raises(
            ConfigurationError, match=r"inside of its own run.*wait for itself for ever.*wait="
        ):
            await lab.do(once.execute("k", function))
    async with owned(lab, once, "k") as claim:
        with pytest.raises(ConfigurationError, match="inside of its own run"):
            await lab.do(own())
        await lab.do(claim.complete(1))
    assert time.monotonic() - began < 25
    assert lab.effects == []


@pytest.mark.parametrize("wait", [0, 0.1])
async def test_R3_a_run_whose_wait_for_its_own_key_ends_is_told_in_progress(lab: Lab, wait: float) -> None:
    once = lab.face()
    with pytest.raises(InProgress):
        await lab.do(once.execute("k", _asking(lab, once, "k", lab.effect(), wait=wait)))
    assert lab.effects == []


async def test_R3_a_run_may_wait_for_another_one_of_the_same_name(light_lab: Lab, tmp_path: Any) -> None:
    """The same key of another store, or of another operation, is another key."""
    lab = light_lab
    once, elsewhere = lab.face(), Lab(lab.colour, f"sqlite:///{tmp_path / 'semel.db'}")
    elsewhere.tenant = lab.tenant
    other = elsewhere.face()
    cases: list[tuple[Any, str, dict[str, str]]] = [(other, "k", {}), (once, "k2", {"operation": "another"})]
    for busy, key, options in cases:
        claim = await enter(lab, busy.claim(key, **options))
        _current.set(None)  # it is somebody else's
        ended = meanwhile(lab, 0.1, functools.partial(claim.complete, "waited for"))
        asking = _asking(lab, busy, key, lab.effect(), wait=30, **options)
        assert (await lab.do(once.execute(key, asking))).value == "waited for"
        await ended()
    await elsewhere.close()


def test_R3_another_task_may_wait_for_the_run_that_started_it() -> None:
    from semel import AsyncSemel

    async def main() -> None:
        once = AsyncSemel("memory://")
        started: list[asyncio.Task[Any]] = []

        async def inner() -> str:
            return "never"

        async def outer() -> str:
            started.append(asyncio.create_task(once.execute("k", inner, wait=30)))
            await asyncio.sleep(0.05)
            return "outer"

        await once.execute("k", outer)
        assert (await started[0]).value == "outer"
        await once.aclose()

    asyncio.run(main())
