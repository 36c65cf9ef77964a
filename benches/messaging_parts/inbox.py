"""What the inbox adds to a handler, one message per transaction: to one that inserts a row, and to one that does a little work.

Each way opens a session, begins, handles and commits, on one engine and one server; only what is between differs. `bare` runs the
handler alone. `by hand` is what people write: an insert into a table of ids first, and the handler if it was new. It finds duplicates
and nothing else: no conflict of bodies, no tenants or consumers, no log, no attempts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

from sqlalchemy import (
    Column,
    CursorResult,
    DateTime,
    Engine,
    MetaData,
    Table,
    Text,
    create_engine,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from benches.core_parts.measure import Figure, Term
from semel.messaging import Inbox, Message
from semel.testing import services

__all__ = ["bench"]

Handler = Callable[[Session, Message], None]
_INSERT = text("INSERT INTO effects VALUES (:id, :body)")
_SELECT = text("SELECT stock FROM items WHERE id = :item")
_UPDATE = text("UPDATE items SET stock = stock - 1 WHERE id = :item")
_SEEN = Table(
    "seen",
    MetaData(),
    Column("id", Text, primary_key=True),
    Column("at", DateTime(timezone=True), server_default=func.now(), nullable=False),
)
# The cheapest that is right: made once, and the count asked for, which SQLAlchemy does not keep of an INSERT by itself (it is -1 then,
# which is true). With RETURNING or built for each message it would cost more.
_ONCE = insert(_SEEN).on_conflict_do_nothing().execution_options(preserve_rowcount=True)


def _insert(session: Session, message: Message) -> None:
    session.execute(_INSERT, {"id": message.id, "body": message.body["text"]})


def _order(session: Session, message: Message) -> None:
    """Read, change and write a row each: the least that a handler of an order does."""
    item = {"item": message.body["item"]}
    session.execute(_SELECT, item).scalar_one()
    session.execute(_UPDATE, item)
    _insert(session, message)


_FIGURES: dict[Handler, list[tuple[str, str, float]]] = {
    _insert: [
        ("inbox", "inbox, one message per transaction (as a consumer does)", 1.1),
        ("by hand", "insert(seen).on_conflict_do_nothing() in the same session, by hand", 0.0),
        ("savepoint", "inbox, in a savepoint of a larger transaction", 0.0),
    ],
    _order: [
        ("inbox", "inbox, handler of three statements (select, update, insert)", 1.1),
        ("by hand", "insert(seen).on_conflict_do_nothing(), handler of three statements, by hand", 0.0),
    ],
}


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

    def by_hand(message: Message) -> None:
        with Session(engine) as session, session.begin():
            done = cast("CursorResult[Any]", session.execute(_ONCE, {"id": message.id}))
            if done.rowcount == 1:
                handle(session, message)

    ways = [("bare", bare), ("inbox", admitted), ("by hand", by_hand), ("savepoint", saved)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in ways}
    for number in range(pairs + 1):
        first = number // 2 % len(ways)  # each way is in each place as often
        for name, work in (ways[first:] + ways[:first])[:: 1 if number % 2 else -1]:
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
            _SEEN.create(connection)
            connection.execute(text("INSERT INTO items SELECT n, 0 FROM generate_series(0, 99) n"))
        inbox = Inbox(url, consumer="bench")
        inbox.create()
        for handle, ways in _FIGURES.items():
            walls, cpus = _measured(engine, inbox, handle, pairs, count)
            for way, what, goal in ways:
                for unit, found in (("time", walls), ("client CPU", cpus)):
                    term = "by hand" if way == "by hand" else "with inbox"
                    terms = Term(term, found[way], "µs"), Term("bare handler", found["bare"], "µs")
                    figures.append(Figure(f"{what}: {unit}", *terms, "≤" if goal else "", goal))
        inbox.close()
        engine.dispose()
    return figures
