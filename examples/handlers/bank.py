"""Stands for a payment service: another process's books, which no transaction of ours reaches."""

from __future__ import annotations

import sqlite3
import tempfile
import uuid
from contextlib import closing
from pathlib import Path

_folder = tempfile.TemporaryDirectory(prefix="handlers-")
SHOP = str(Path(_folder.name) / "shop.db")  # our own database
BOOKS = str(Path(_folder.name) / "bank.db")  # the bank's

with closing(sqlite3.connect(BOOKS)) as books, books:
    books.execute("CREATE TABLE charges (key TEXT PRIMARY KEY, customer TEXT)")
with closing(sqlite3.connect(SHOP)) as shop, shop:
    shop.execute("CREATE TABLE orders (id TEXT)")
    shop.execute("CREATE TABLE finished (id TEXT PRIMARY KEY)")


def charge(customer: str, *, key: str | None = None) -> str:
    """Charge a card. A key that the bank knows is not charged again; without one, every call is a charge."""
    with closing(sqlite3.connect(BOOKS, timeout=30)) as books, books:
        books.execute("INSERT OR IGNORE INTO charges VALUES (?, ?)", (key or uuid.uuid4().hex, customer))
    return f"charged {customer}"


def charges(customer: str) -> int:
    """How often this customer was charged."""
    with closing(sqlite3.connect(BOOKS)) as books:
        return int(
            books.execute("SELECT count(*) FROM charges WHERE customer = ?", (customer,)).fetchone()[0]
        )
