"""Wrong: an outside effect that knows no key. It is charged again when the worker dies before it was recorded."""

from __future__ import annotations

from examples.handlers import bank
from semel import Semel

once = Semel(f"sqlite:///{bank.SHOP}", operation="charge")


def handle(order: str) -> None:
    once.execute(order, charge, order)


def charge(order: str) -> str:
    return bank.charge(order)
