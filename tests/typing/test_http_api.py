"""What the checkers accept also works: the typed file runs."""

from __future__ import annotations

import asyncio

from semel import AsyncSemel, Semel
from tests.typing import http_api


def test_the_typed_http_api_runs() -> None:
    once = AsyncSemel("memory://")
    http_api.asgi_middleware(once)
    with Semel("memory://") as plain:
        http_api.decorators(once, plain)
    asyncio.run(once.aclose())
