"""Wrong: marked as done before it is done. A worker that dies in between has lost the charge."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from examples.handlers import bank


def handle(order: str) -> None:
    with closing(sqlite3.connect(bank.SHOP, timeout=30)) as shop:
        marked = shop.execute("INSERT OR IGNORE INTO finished VALUES (?)", (order,)).rowcount
        shop.commit()
    if marked:
        bank.charge(order)
