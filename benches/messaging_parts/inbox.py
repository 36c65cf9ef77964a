"""What the inbox adds to a handler that inserts one row and commits, one message per transaction."""

from __future__ import annotations

import statistics
import time

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from benches.core_parts.measure import Figure, Term
from semel.messaging import Inbox, Message
from semel.testing import services

__all__ = ["bench"]


def bench(*, quick: bool) -> list[Figure]:
    """Medians of at least ten pairs, in turns."""
    pairs, count = (2, 50) if quick else (15, 300)
    with services.postgres(fsync=True) as database:
        url = database.url.replace("postgresql://", "postgresql+psycopg://")
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (id text primary key, body text)"))
        inbox = Inbox(url, consumer="bench")
        inbox.create()
        statement = text("INSERT INTO effects VALUES (:id, :body)")

        def handle(session: Session, message: Message) -> None:
            session.execute(statement, {"id": message.id, "body": message.body["text"]})

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
                messages = [Message("t", {"text": "x" * 240}) for _ in range(count)]
                cpu, start = time.process_time(), time.perf_counter()
                for message in messages:
                    work(message)
                wall, cpu = time.perf_counter() - start, time.process_time() - cpu
                if number:
                    times[name].append((wall / count * 1e6, cpu / count * 1e6))
        inbox.close()
        engine.dispose()
    walls = {name: statistics.median(w for w, _ in seen) for name, seen in times.items()}
    cpus = {name: statistics.median(c for _, c in seen) for name, seen in times.items()}
    figures = []
    for name, what, goal in (
        ("inbox", "inbox, one message per transaction (as a consumer does)", 1.1),
        ("savepoint", "inbox, in a savepoint of a larger transaction", 0.0),
    ):
        for unit, found in (("time", walls), ("client CPU", cpus)):
            terms = Term("with inbox", found[name], "µs"), Term("bare handler", found["bare"], "µs")
            figures.append(Figure(f"{what}: {unit}", *terms, "≤" if goal else "", goal))
    return figures
