"""An async service: many requests at once, several with the same key; each order is made once and everybody gets it."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from semel import AsyncSemel, KeyMismatch


@dataclass
class Order:
    item: str
    cents: int


made: list[Order] = []


async def make_order(item: str, cents: int) -> Order:
    await asyncio.sleep(0.02)  # the database, a service, …
    order = Order(item, cents)
    made.append(order)
    return order


async def handle(once: AsyncSemel, key: str, body: dict[str, int]) -> tuple[int, object]:
    """What a route would do: an answer and its status."""
    try:
        outcome = await once.execute(key, make_order, "book", body["cents"], request=body, wait=5)
    except KeyMismatch as error:
        return 422, str(error)
    return (200 if outcome.replayed else 201), outcome.value


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'semel.db'}"
        async with AsyncSemel(url, operation="orders", tenant="acme") as once:
            requests = [
                handle(once, f"key-{number % 5}", {"cents": 100 * (number % 5)}) for number in range(50)
            ]
            answers = await asyncio.gather(*requests)
            statuses = [status for status, _ in answers]
            print(f"{len(answers)} requests, {len(made)} orders made, {statuses.count(200)} replayed")
            print(answers[0])
            print(await handle(once, "key-1", {"cents": 999}))


if __name__ == "__main__":
    asyncio.run(main())
