"""What the checkers accept also works: the typed file runs."""

from __future__ import annotations

import asyncio

from tests.typing import api


def test_the_typed_api_runs() -> None:
    api.sync_calls()
    api.inside_a_run()
    api.decorated()
    api.requests_and_ids()
    api.errors()
    api.stores_and_hooks()
    asyncio.run(api.async_calls())
    asyncio.run(api.async_decorated())
