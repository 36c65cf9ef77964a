"""Counts of what waits, and the cleaning of what is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, literal_column, or_, select, update

from semel.messaging.pages import Waiting
from semel.messaging.tables import Tables, now

__all__ = ["clean", "listed", "oldest", "pending", "strays", "topics"]


def pending(c: Connection, t: Tables) -> dict[str, int]:
    """Messages that wait, by topic."""
    rows = c.execute(select(t.outbox.c.topic, func.count()).group_by(t.outbox.c.topic))
    return {row[0]: row[1] for row in rows}


def topics(c: Connection, t: Tables) -> set[str]:
    """The topics of messages that wait."""
    return set(c.execute(select(t.outbox.c.topic).distinct()).scalars())


def strays(c: Connection, t: Tables, parts: int) -> int:
    """Messages in parts that there are not: an outbox that believed in more of them wrote here."""
    query = select(func.count()).select_from(t.outbox).where(t.outbox.c.part >= parts)
    return int(c.execute(query).scalar_one())


def oldest(c: Connection, t: Tables) -> float:
    """The age of the oldest message that is due, in seconds."""
    clock, outbox = now(c.dialect.name), t.outbox
    due = or_(outbox.c.due.is_(None), outbox.c.due <= clock)
    age = c.execute(
        select(clock - func.min(func.coalesce(outbox.c.due, outbox.c.created))).where(due)
    ).scalar()
    return float(age or 0.0)


def listed(c: Connection, t: Tables, limit: int, where: Mapping[str, str]) -> list[Waiting]:
    """Messages that wait, oldest first."""
    o = t.outbox.c
    query = select(o.id, o.tenant, o.topic, o.key, o.created, o.due, func.length(o.body))
    for name, value in where.items():
        query = query.where(o[name] == value)
    rows: list[tuple[Any, ...]] = [tuple(row) for row in c.execute(query.order_by(o.seq).limit(limit))]
    return [Waiting(*row) for row in rows]


def clean(
    c: Connection, t: Tables, team: str, retention: float, sink_safety: float, limit: int = 5_000
) -> int:
    """Forget ids whose message was delivered a retention ago, and kept batches; a bounded number at a time."""
    clock, ids, sent = now(c.dialect.name), t.ids, t.sent
    waiting_too = (
        select(literal_column("1")).where(t.outbox.c.part == ids.c.part, t.outbox.c.seq == ids.c.seq).exists()
    )
    old = select(ids.c.seq).where(ids.c.at < clock - retention, ~waiting_too).order_by(ids.c.seq).limit(limit)
    seqs = list(c.execute(old).scalars())
    if seqs:
        c.execute(delete(ids).where(ids.c.seq == bindparam("s")), [{"s": seq} for seq in seqs])
        _bodies_over(c, t, seqs)
    c.execute(delete(sent).where(sent.c.team == team, sent.c.at < clock - sink_safety))
    return len(seqs)


def _bodies_over(c: Connection, t: Tables, seqs: Sequence[int]) -> None:
    """Bodies of messages that are forgotten: from now on they are only kept for late readers."""
    bodies = t.bodies.c.seq
    apart = set(c.execute(select(bodies).where(bodies >= min(seqs), bodies <= max(seqs))).scalars())
    if over := apart.intersection(seqs):
        statement = update(t.bodies).where(bodies == bindparam("s")).values(over=now(c.dialect.name))
        c.execute(statement, [{"s": seq} for seq in sorted(over)])
