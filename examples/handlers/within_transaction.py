"""Right: the row and the record are committed together (row `tx` of the guarantee table)."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from examples.handlers.bank import SHOP
from semel import Semel

once = Semel(f"sqlite:///{SHOP}", operation="orders")


def handle(order: str) -> None:
    with closing(sqlite3.connect(SHOP)) as shop:
        once.within(shop).execute(order, insert, shop, order)
        shop.commit()


def insert(shop: sqlite3.Connection, order: str) -> None:
    shop.execute("INSERT INTO orders VALUES (?)", (order,))


def orders(order: str) -> int:
    with closing(sqlite3.connect(SHOP)) as shop:
        return int(shop.execute("SELECT count(*) FROM orders WHERE id = ?", (order,)).fetchone()[0])
