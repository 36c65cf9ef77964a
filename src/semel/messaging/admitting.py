"""The statements of an inbox, on whichever connection the caller's transaction has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from semel.errors import ConfigurationError, KeyMismatch
from semel.messaging.message import Message
from semel.messaging.sameness import hash_as_written, hash_of
from semel.messaging.tables import NOW
from semel.within.ports import Port
from semel.within.records import query

__all__ = ["admit", "admit_many", "check_business_key", "compare", "is_known", "remember"]

_POSTGRES: Final = """
INSERT INTO {table}_inbox (consumer, message, tenant, hash, topic, at, business_key)
VALUES ($1, $2, $3, $4, $5, {now}, $6) ON CONFLICT DO NOTHING RETURNING 1
"""
_POSTGRES_MANY: Final = """
INSERT INTO {table}_inbox (consumer, message, tenant, hash, topic, at)
SELECT $1, g.message, g.tenant, g.hash, g.topic, {now}
FROM unnest($2::text[], $3::text[], $4::bytea[], $5::text[]) AS g (message, tenant, hash, topic)
ORDER BY g.message, g.tenant ON CONFLICT DO NOTHING RETURNING message, tenant
"""
_MYSQL: Final = """
INSERT IGNORE INTO {table}_inbox (consumer, message, tenant, hash, topic, at, business_key)
VALUES ($1, $2, $3, $4, $5, {now}, $6)
"""
_KEY: Final = 255
_HASH: Final = "SELECT hash FROM {table}_inbox WHERE consumer = $1 AND message = $2 AND tenant = $3"
_RESULT: Final = "UPDATE {table}_inbox SET result = $4, business_key = $5 WHERE consumer = $1 AND message = $2 AND tenant = $3"


def check_business_key(key: str | None) -> None:
    """ConfigurationError for one that a column has no room for: MariaDB would cut it silently."""
    if key is not None and len(key) > _KEY:
        raise ConfigurationError(
            f"business_key is a text of at most {_KEY} characters, not {len(key)}: {key[:60]!r}…"
        )


async def admit(
    port: Port, table: str, consumer: str, message: Message, business_key: str | None = None
) -> bool:
    """Write the message down first: False if it was there. A twin that is being handled is waited for.

    KeyMismatch for a known id with another content: that is another message, and its sender must give it an id of its own.
    """
    digest = hash_of(message)
    args = (consumer, message.id, message.tenant, digest, message.topic, business_key)
    if port.dialect == "mysql":
        await query(port, _MYSQL.format(table=table, now=NOW["mysql"]), args)
        fresh = port.count == 1
    else:
        fresh = bool(await query(port, _POSTGRES.format(table=table, now=NOW[port.dialect]), args))
    if not fresh:
        await compare(port, table, consumer, message, digest)
    return fresh


async def admit_many(port: Port, table: str, consumer: str, messages: Sequence[Message]) -> list[Message]:
    """As `admit` for a batch; those that are new, in their order, each once."""
    unique: dict[tuple[str, str], Message] = {}
    for message in messages:
        first = unique.setdefault((message.id, message.tenant), message)
        if first is not message and hash_of(first) != hash_of(message):
            raise _conflict(consumer, message)
    ordered = list(unique.values())
    if port.dialect != "postgresql":
        # In the order of the key, not of arrival: two batches with the same messages wait for each other's rows in one direction.
        by_key = sorted(ordered, key=lambda m: (m.id, m.tenant))
        new = {(m.id, m.tenant) for m in by_key if await admit(port, table, consumer, m)}
        return [message for message in ordered if (message.id, message.tenant) in new]
    hashes = {(m.id, m.tenant): hash_of(m) for m in ordered}
    args: list[Any] = [consumer, [m.id for m in ordered], [m.tenant for m in ordered]]
    args += [[hashes[m.id, m.tenant] for m in ordered], [m.topic for m in ordered]]
    rows = await query(port, _POSTGRES_MANY.format(table=table, now=NOW["postgresql"]), args)
    fresh = {(row[0], row[1]) for row in rows}
    for message in ordered:
        if (message.id, message.tenant) not in fresh:
            await compare(port, table, consumer, message, hashes[message.id, message.tenant])
    return [message for message in ordered if (message.id, message.tenant) in fresh]


async def is_known(port: Port, table: str, consumer: str, message: Message) -> bool:
    """Whether the message was admitted; whatever its content is."""
    return bool(await query(port, _HASH.format(table=table), (consumer, message.id, message.tenant)))


async def remember(
    port: Port, table: str, consumer: str, message: Message, result: str | None, business_key: str | None
) -> None:
    """Write beside the admission what came of it, for those who look later."""
    await query(
        port, _RESULT.format(table=table), (consumer, message.id, message.tenant, result, business_key)
    )


async def compare(port: Port, table: str, consumer: str, message: Message, digest: bytes) -> None:
    """KeyMismatch if the message was admitted with another content."""
    # MariaDB: a locking read sees what is committed, whatever snapshot the caller's transaction has.
    lock = " LOCK IN SHARE MODE" if port.dialect == "mysql" else ""
    rows = await query(port, _HASH.format(table=table) + lock, (consumer, message.id, message.tenant))
    if rows and (known := bytes(rows[0][0])) != digest and known != hash_as_written(message):
        raise _conflict(consumer, message)


def _conflict(consumer: str, message: Message) -> KeyMismatch:
    return KeyMismatch(
        f"consumer {consumer!r} admitted a message {message.id!r} with another topic, type, schema or body before: an id "
        "names one message; its sender must give a new one a new id"
    )
