"""What the inbox adds to a handler, one message per transaction: one that inserts a row, and one that does a little work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from benches.core_parts.measure import Figure, Term
from semel.messaging import Inbox, Message
from semel.testing import services

__all__ = ["bench"]

Handler = Callable[[Session, Message], None]
_INSERT = text("INSERT INTO effects VALUES (:id, :body)")
_SELECT = text("SELECT stock FROM items WHERE id = :item")
_UPDATE = text("UPDATE items SET stock = stock - 1 WHERE id = :item")


def _insert(session: Session, message: Message) -> None:
    session.execute(_INSERT, {"id": message.id, "body": message.body["text"]})


def _order(session: Session, message: Message) -> None:
    """Read, change and write a row each: the least that a handler of an order does."""
    item = {"item": message.body["item"]}
    session.execute(_SELECT, item).scalar_one()
    session.execute(_UPDATE, item)
    _insert(session, message)


def _measured(
    engine: Engine, inbox: Inbox, handle: Handler, pairs: int, count: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of time and CPU of each way, in turns, in µs a message."""

    def bare(message: Message) -> None:
        with Session(engine) as session, session.begin():
            handle(session, message)

    def admitted(message: Message) -> None:
        with Session(engine) as session, session.begin():
            inbox.process(session, message, handle, own_transaction=True)

    def saved(message: Message) -> None:
        with Session(engine) as session, session.begin():
            inbox.process(session, message, handle)

    ways = [("bare", bare), ("inbox", admitted), ("savepoint", saved)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in ways}
    for number in range(pairs + 1):
        for name, work in ways[:: 1 if number % 2 else -1]:
            messages = [Message("t", {"text": "x" * 240, "item": n % 100}) for n in range(count)]
            cpu, start = time.process_time(), time.perf_counter()
            for message in messages:
                work(message)
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            if number:
                times[name].append((wall / count * 1e6, cpu / count * 1e6))
    walls = {name: statistics.median(w for w, _ in seen) for name, seen in times.items()}
    return walls, {name: statistics.median(c for _, c in seen) for name, seen in times.items()}


def bench(*, quick: bool) -> list[Figure]:
    """Medians of at least ten pairs, in turns."""
    # Short turns: what else the machine does then falls upon all ways alike.
    pairs, count = (2, 50) if quick else (120, 40)
    figures = []
    with services.postgres(fsync=True) as database:
        url = database.url.replace("postgresql://", "postgresql+psycopg://")
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (id text primary key, body text)"))
            connection.execute(text("CREATE TABLE items (id int primary key, stock int)"))
            connection.execute(text("INSERT INTO items SELECT n, 0 FROM generate_series(0, 99) n"))
        inbox = Inbox(url, consumer="bench")
        inbox.create()
        walls: dict[str, float] = {}
        cpus: dict[str, float] = {}
        for handle, way, what, goal in (
            (_insert, "inbox", "inbox, one message per transaction (as a consumer does)", 1.1),
            (_insert, "savepoint", "inbox, in a savepoint of a larger transaction", 0.0),
            (_order, "inbox", "inbox, handler of three statements (select, update, insert)", 1.1),
        ):
            if way == "inbox":
                walls, cpus = _measured(engine, inbox, handle, pairs, count)
            for unit, found in (("time", walls), ("client CPU", cpus)):
                terms = Term("with inbox", found[way], "µs"), Term("bare handler", found["bare"], "µs")
                figures.append(Figure(f"{what}: {unit}", *terms, "≤" if goal else "", goal))
        inbox.close()
        engine.dispose()
    return figures
