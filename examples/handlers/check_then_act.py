"""Wrong: looks whether it is done, does it, notes it. Two workers look at once, or one dies before it notes."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from examples.handlers import bank


def handle(order: str) -> None:
    if not is_finished(order):
        bank.charge(order)
        finish(order)


def is_finished(order: str) -> bool:
    with closing(sqlite3.connect(bank.SHOP, timeout=30)) as shop:
        return bool(shop.execute("SELECT 1 FROM finished WHERE id = ?", (order,)).fetchall())


def finish(order: str) -> None:
    with closing(sqlite3.connect(bank.SHOP, timeout=30)) as shop, shop:
        shop.execute("INSERT OR IGNORE INTO finished VALUES (?)", (order,))
