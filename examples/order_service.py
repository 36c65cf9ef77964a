"""An order service and a shipping service: rows and messages commit together, travel once, and are admitted once.

    orders (SQLite) ── outbox ──▶ relay ──▶ Redis stream ──▶ inbox ── shipping (SQLite)

The relay is run twice with the same batch, as after a crash, and a message is delivered twice: one parcel per order.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import redis
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from semel.messaging import Inbox, Message, Outbox, Relay
from semel.testing import services


def place(engine: Engine, outbox: Outbox, order: str, item: str) -> None:
    """The order and the message about it, or neither."""
    with Session(engine) as session, session.begin():
        session.execute(text("INSERT INTO orders VALUES (:id, :item)"), {"id": order, "item": item})
        outbox.add(session, Message("orders.placed", {"id": order, "item": item}, key=order))


def shipping(url: str) -> Inbox:
    inbox = Inbox(url, consumer="shipping")

    @inbox.handler("orders.placed")
    def ship(session: Session, message: Message) -> None:
        session.execute(text("INSERT INTO parcels VALUES (:id, :item)"), message.body)

    return inbox


async def consume(inbox: Inbox, source: str, count: int) -> None:
    consumer = inbox.consuming(source)
    running = asyncio.create_task(consumer.run())
    while consumer.counts.handled + consumer.counts.duplicates < count:  # noqa: ASYNC110 - an example, not a service
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await consumer.source.aclose()
    print(f"shipping: {consumer.counts.handled} handled, {consumer.counts.duplicates} duplicate left out")


async def main(folder: Path, broker: str) -> None:
    shop, ship = f"sqlite:///{folder}/shop.db", f"sqlite:///{folder}/ship.db"
    orders, parcels = create_engine(shop), create_engine(ship)
    with orders.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id text, item text)"))
    with parcels.begin() as connection:
        connection.execute(text("CREATE TABLE parcels (id text, item text)"))
    stream = f"{broker}?stream=orders"
    with Outbox(shop) as outbox, shipping(ship) as inbox:
        outbox.create()
        for number in range(5):
            place(orders, outbox, f"ord-{number}", "book")
        async with Relay(outbox, {"orders.*": stream}) as relay:
            report = await relay.drain()
        print(f"relay: {report.sent} sent, {sum(report.pending.values())} waiting")
        client: Any = redis.Redis.from_url(broker)
        client.xadd("orders", client.xrange("orders", count=1)[0][1])  # a copy, as a broker may make
        client.close()
        await consume(inbox, stream, count=6)
    with parcels.connect() as connection:
        print(f"5 orders, {connection.execute(text('SELECT count(*) FROM parcels')).scalar()} parcels")
    orders.dispose()
    parcels.dispose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place_, services.redis() as server:
        asyncio.run(main(Path(place_), server.url))
