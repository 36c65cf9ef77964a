"""Idempotent create: the id is minted before the row is written, so that every attempt writes the same row."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

from semel import KeyMismatch, Semel, current_run, parse_id


def main() -> None:
    folder = tempfile.TemporaryDirectory()
    with folder:
        shop = sqlite3.connect(Path(folder.name) / "shop.db", isolation_level=None)
        shop.execute("CREATE TABLE orders (id TEXT PRIMARY KEY, item TEXT, cents INTEGER)")
        with Semel(f"sqlite:///{Path(folder.name) / 'semel.db'}", operation="orders.create") as once:
            create_and_retry(once, shop)
        (count,) = shop.execute("SELECT count(*) FROM orders").fetchone()
        print(f"{count} row in the shop's table")
        shop.close()


def create_and_retry(once: Semel, shop: sqlite3.Connection) -> None:
    tries = 0

    def create(item: str, cents: int) -> str:
        nonlocal tries
        tries += 1
        order: str = current_run().new_id("ord")  # durable when it returns, and the outcome's ref
        shop.execute("INSERT INTO orders VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (order, item, cents))
        if tries == 1:
            raise ConnectionError("lost after the row was written")
        return order

    request = {"item": "book", "cents": 500}
    for _ in range(3):
        try:
            outcome = once.execute("client-key-1", create, "book", 500, request=request, ref_type="ord")
        except ConnectionError as error:
            print("failed:", error)
        else:
            assert outcome.ref is not None
            print(outcome.ref, f"replayed={outcome.replayed}", parse_id(outcome.ref).uuid)
    try:
        once.execute("client-key-1", create, "book", 900, request=request | {"cents": 900})
    except KeyMismatch:
        print("the same key for another request is refused")


if __name__ == "__main__":
    main()
