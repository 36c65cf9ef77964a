"""Right: a longer run of steps, each remembered, each safe to be done again (row `steps`)."""

from __future__ import annotations

from examples.handlers import bank
from semel import Semel, current_run

once = Semel(f"sqlite:///{bank.SHOP}", operation="checkout")


def handle(order: str) -> None:
    once.execute(order, checkout, order)


def checkout(order: str) -> None:
    run = current_run()
    price = run.step("price", quote, order)
    run.step("charge", charge, order, price)


def quote(order: str) -> int:
    return 100 * len(order)  # no effect: may run again


def charge(order: str, price: int) -> str:
    return f"{price}: {bank.charge(order, key=current_run().downstream_key('charge'))}"
