"""Wrong: an async handler that charges without a key and then waits for a receipt. Whoever hangs up meanwhile is charged again."""

from __future__ import annotations

import asyncio

from examples.handlers import bank
from semel import AsyncSemel


async def handle(order: str) -> None:
    async with AsyncSemel(f"sqlite:///{bank.SHOP}", operation="receipt") as once:
        await once.execute(order, charge, order)


async def charge(order: str) -> str:
    charged = bank.charge(order)
    await asyncio.sleep(0.05)  # the receipt is on its way
    return charged
