"""Messages that a handler could not do: attempts that survive every rollback, back-off, and dead letters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, delete, insert, select, update

from semel.messaging.message import Message
from semel.messaging.pages import told
from semel.messaging.tables import Tables, now

__all__ = [
    "Admitted",
    "DeadLetter",
    "Turn",
    "claim",
    "dead",
    "due",
    "failed",
    "forget",
    "hold",
    "log",
    "purge",
    "remove",
    "revive",
    "turn_of",
]


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that its handler could not do, with why and how often it was tried."""

    consumer: str
    message: Message
    attempts: int
    reason: str
    until: float | None
    at: float

    @property
    def id(self) -> str:
        return self.message.id


class Admitted(msgspec.Struct, frozen=True):
    """A line of the consume log."""

    consumer: str
    message: str
    tenant: str
    topic: str
    at: float
    business_key: str | None
    result: str | None


def _where(t: Tables, consumer: str, message: Message) -> Any:
    d = t.dead.c
    return (d.consumer == consumer) & (d.message == message.id) & (d.tenant == message.tenant)


class Turn(msgspec.Struct, frozen=True):
    """Whose turn it is to try a message: how often it failed, whether it is dead, in how many seconds it may be tried again. Where
    no letter is `known` that is anybody's."""

    known: bool = False
    attempts: int = 0
    dead: bool = False
    left: float = 0.0
    claimed: bool = False

    @property
    def is_ours(self) -> bool:
        return self.claimed or not self.known

    @property
    def has_come(self) -> bool:
        return self.known and not self.dead and self.left <= 0


def turn_of(c: Connection, t: Tables, consumer: str, message: Message) -> Turn:
    """How a message stands."""
    d = t.dead.c
    query = select(d.attempts, d.until, d.until - now(c.dialect.name)).where(_where(t, consumer, message))
    row = c.execute(query).first()
    return Turn() if row is None else Turn(True, row[0], row[1] is None, row[2] or 0.0)


def claim(c: Connection, t: Tables, consumer: str, message: Message, turn: Turn, seconds: float) -> Turn:
    """Take a turn that has come, for so many seconds at first; how it stands now if another consumer was first."""
    clock = now(c.dialect.name)
    here = _where(t, consumer, message) & (t.dead.c.attempts == turn.attempts) & (t.dead.c.until <= clock)
    done = c.execute(update(t.dead).where(here).values(until=clock + seconds))
    return Turn(True, turn.attempts, claimed=True) if done.rowcount else turn_of(c, t, consumer, message)


def hold(c: Connection, t: Tables, consumer: str, message: Message, attempts: int, seconds: float) -> None:
    """Still at it."""
    here = _where(t, consumer, message) & (t.dead.c.attempts == attempts) & t.dead.c.until.is_not(None)
    c.execute(update(t.dead).where(here).values(until=now(c.dialect.name) + seconds))


def failed(
    c: Connection, t: Tables, consumer: str, message: Message, reason: str, after: float | None
) -> int:
    """Count a failure; the next attempt is `after` seconds from now, None means dead. Returns the count."""
    clock = now(c.dialect.name)
    until = None if after is None else clock + after
    here = _where(t, consumer, message)
    done = c.execute(
        update(t.dead)
        .where(here)
        .values(attempts=t.dead.c.attempts + 1, reason=told(reason), until=until, at=clock)
    )
    if not done.rowcount:
        c.execute(
            insert(t.dead).values(
                consumer=consumer,
                message=message.id,
                tenant=message.tenant,
                topic=message.topic,
                key=message.key,
                type=message.type,
                schema=message.schema,
                headers=json.dumps(dict(message.headers)),
                body=message.data,
                raw=int(message.raw),
                attempts=1,
                reason=told(reason),
                until=until,
                at=clock,
            )
        )
    return int(c.execute(select(t.dead.c.attempts).where(here)).scalar_one())


def forget(c: Connection, t: Tables, consumer: str, message: Message) -> None:
    """It was done after all."""
    c.execute(delete(t.dead).where(_where(t, consumer, message)))


def dead(c: Connection, t: Tables, consumer: str, limit: int = 1000) -> list[DeadLetter]:
    """Dead letters, oldest first."""
    query = select(t.dead).where(t.dead.c.consumer == consumer, t.dead.c.until.is_(None))
    return [_letter(row) for row in c.execute(query.order_by(t.dead.c.at).limit(limit))]


def due(c: Connection, t: Tables, consumer: str, limit: int = 100) -> list[DeadLetter]:
    """Messages whose next attempt is due."""
    clock = now(c.dialect.name)
    query = select(t.dead).where(t.dead.c.consumer == consumer, t.dead.c.until <= clock)
    return [_letter(row) for row in c.execute(query.order_by(t.dead.c.until).limit(limit))]


def revive(
    c: Connection, t: Tables, consumer: str, ids: Sequence[str] | None, tenant: str | None = None
) -> int:
    """Dead letters are tried again; attempts start anew."""
    query = update(t.dead).where(t.dead.c.consumer == consumer, t.dead.c.until.is_(None))
    if ids is not None:
        query = query.where(t.dead.c.message.in_(list(ids)))
    if tenant is not None:
        query = query.where(t.dead.c.tenant == tenant)
    return c.execute(query.values(until=now(c.dialect.name), attempts=0)).rowcount


def remove(
    c: Connection, t: Tables, consumer: str, ids: Sequence[str] | None, tenant: str | None = None
) -> int:
    """Dead letters go for good."""
    query = delete(t.dead).where(t.dead.c.consumer == consumer, t.dead.c.until.is_(None))
    if ids is not None:
        query = query.where(t.dead.c.message.in_(list(ids)))
    if tenant is not None:
        query = query.where(t.dead.c.tenant == tenant)
    return c.execute(query).rowcount


def log(
    c: Connection, t: Tables, consumer: str, *, message: str | None, business_key: str | None, limit: int
) -> list[Admitted]:
    """Lines of the consume log, newest first."""
    i = t.inbox.c
    query = select(i.consumer, i.message, i.tenant, i.topic, i.at, i.business_key, i.result).where(
        i.consumer == consumer
    )
    if message is not None:
        query = query.where(i.message == message)
    if business_key is not None:
        query = query.where(i.business_key == business_key)
    return [Admitted(*row) for row in c.execute(query.order_by(i.at.desc()).limit(limit))]


def purge(c: Connection, t: Tables, consumer: str, retention: float, limit: int) -> int:
    """Forget admissions that are older than the retention, a bounded number."""
    i, clock = t.inbox.c, now(c.dialect.name)
    old = select(i.message, i.tenant).where(i.consumer == consumer, i.at < clock - retention).limit(limit)
    rows = c.execute(old).all()
    if rows:
        where = (i.consumer == consumer) & (i.message == bindparam("m")) & (i.tenant == bindparam("n"))
        c.execute(delete(t.inbox).where(where), [{"m": row.message, "n": row.tenant} for row in rows])
    return len(rows)


def _letter(row: Any) -> DeadLetter:
    body = bytes(row.body)
    message = Message(
        topic=row.topic,
        body=body if row.raw else msgspec.json.decode(body),
        key=row.key,
        id=row.message,
        type=row.type,
        schema=row.schema,
        headers=json.loads(row.headers),
        tenant=row.tenant,
        delivery=row.attempts + 1,
    )
    return DeadLetter(row.consumer, message, row.attempts, row.reason, row.until, row.at)
