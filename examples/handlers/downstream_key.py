"""Right: the bank gets a key that is the same on every attempt (row `keyed`). An async handler."""

from __future__ import annotations

from examples.handlers import bank
from semel import AsyncSemel, current_run


async def handle(order: str) -> None:
    async with AsyncSemel(f"sqlite:///{bank.SHOP}", operation="charge") as once:
        await once.execute(order, charge, order)


async def charge(order: str) -> str:
    return bank.charge(order, key=current_run().downstream_key("bank"))
