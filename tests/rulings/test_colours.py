"""One body, two colours: what is handed out where, and what the wrong colour is told."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from semel import AsyncSemel, ConfigurationError, Semel, current_async_run, current_run
from semel.errors import SemelWarning


def test_R8_current_async_run_is_the_run_of_a_coroutine() -> None:
    async def work() -> bool:
        same: object = current_async_run()
        return same is current_run()

    async def main() -> None:
        async with AsyncSemel("memory://") as once:
            assert (await once.execute("k", work)).value is True

    asyncio.run(main())


def test_R8_current_async_run_is_refused_where_nothing_would_be_awaited() -> None:
    def work() -> None:
        with pytest.raises(ConfigurationError, match=r"use current_run\(\)"):
            current_async_run()

    async def main() -> None:
        async with AsyncSemel("memory://") as once:
            await once.execute("in a thread", work)
        with Semel("memory://") as plain, pytest.warns(SemelWarning, match="blocks the running event loop"):
            plain.execute("under a loop", work)

    asyncio.run(main())
    with pytest.raises(ConfigurationError, match="only inside a function"):
        contextvars.Context().run(current_async_run)
    with Semel("memory://") as once:
        once.execute("plain", work)


def test_R6_a_claim_of_the_other_colour_says_how_to_write_it() -> None:
    async def main() -> None:
        other: Any = AsyncSemel("memory://")
        with pytest.raises(ConfigurationError, match="write `async with"), other.claim("k"):
            pytest.fail("entered")

    asyncio.run(main())
    plain: Any = Semel("memory://")

    async def wrong() -> None:
        with pytest.warns(SemelWarning, match="blocks the running event loop"):
            claim = plain.claim("k")
        with pytest.raises(ConfigurationError, match="write `with"):
            async with claim:
                pytest.fail("entered")

    asyncio.run(wrong())


def test_R6_the_warning_about_an_unanswered_claim_points_at_its_block() -> None:
    def plain() -> None:
        with Semel("memory://") as once, once.claim("k"):
            pass

    async def coloured() -> None:
        async with AsyncSemel("memory://") as once, once.claim("k"):
            pass

    with pytest.warns(SemelWarning, match="ended without complete") as of_plain:
        plain()
    with pytest.warns(SemelWarning, match="ended without complete") as of_coloured:
        asyncio.run(coloured())
    assert [warning.filename for warning in (*of_plain, *of_coloured)] == [__file__, __file__]
