"""The statements that put messages into the outbox, on whichever connection the caller's transaction has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigurationError, KeyMismatch
from semel.messaging.bodies.reference import HEADER, Reference
from semel.messaging.message import Message, content_hash, part_of
from semel.messaging.tables import NOW
from semel.points import reach
from semel.within.ports import Port
from semel.within.records import query

if TYPE_CHECKING:
    from semel.messaging.bodies.keeping import Keeper

__all__ = ["Prepared", "TooLarge", "conflict", "prepare", "prepared", "write"]

_COLUMNS: Final = (
    "part", "id", "tenant", "topic", "key", "type", "schema", "headers", "body", "raw", "due_after", "due_at",
)  # fmt: skip
_POSTGRES: Final = """
WITH given AS (
    SELECT * FROM unnest(
        $1::bytea[], $2::smallint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
        $10::bytea[], $11::smallint[], $12::float8[], $13::float8[]
    ) WITH ORDINALITY AS g (hash, part, id, tenant, topic, key, type, schema, headers, body, raw, after, at, n)
), known AS (
    INSERT INTO {table}_outbox_ids (id, tenant, part, hash, at)
    SELECT id, tenant, part, hash, {now} FROM given ORDER BY n
    ON CONFLICT (id, tenant) DO NOTHING
    RETURNING id, tenant, seq
)
INSERT INTO {table}_outbox (part, id, tenant, topic, key, type, schema, headers, body, raw, created, due, seq)
SELECT part, id, tenant, topic, key, type, schema, headers, body, raw, {now}, coalesce({now} + after, at), seq
FROM given JOIN known USING (id, tenant)
RETURNING id, tenant, seq
"""
_TOLD: Final = ", pg_notify($14::text, '')::text"
# INSERT IGNORE is the one statement of MariaDB whose row count tells a new row from a known one, found rows or not.
_MYSQL_ID: Final = (
    "INSERT IGNORE INTO {table}_outbox_ids (id, tenant, part, hash, at) VALUES ($1, $2, $3, $4, {now})"
)
_MYSQL_ROW: Final = """
INSERT INTO {table}_outbox (part, id, tenant, topic, `key`, type, `schema`, headers, body, raw, created, due, seq)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, {now}, coalesce({now} + $11, $12), last_insert_id())
"""
_SQLITE_ID: Final = """
INSERT INTO {table}_outbox_ids (id, tenant, part, hash, at) VALUES ($1, $2, $3, $4, {now})
ON CONFLICT (id, tenant) DO NOTHING RETURNING seq
"""
_SQLITE_ROW: Final = """
INSERT INTO {table}_outbox (part, id, tenant, topic, "key", type, "schema", headers, body, raw, created, due, seq)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, {now}, coalesce({now} + $11, $12), $13)
"""
_HASH: Final = "SELECT hash FROM {table}_outbox_ids WHERE id = $1 AND tenant = $2"


class TooLarge(ConfigurationError):
    """A body has more bytes than the outbox takes."""


class Prepared:
    """A message made ready: part, hash and columns are worked out before the transaction is asked for anything."""

    __slots__ = ("apart", "columns", "data", "hash", "identity", "part", "reference")

    def __init__(self, message: Message, data: bytes, *, apart: bool = False) -> None:
        self.identity = (message.id, message.tenant)
        self.data = data
        self.apart = apart  # its body is kept elsewhere
        self.reference: Reference | None = None
        self.part = -1
        self.hash = content_hash(message.topic, message.type, message.schema, data)
        after, at = _due(message.due)
        self.columns: dict[str, Any] = {
            "id": message.id,
            "tenant": message.tenant,
            "topic": message.topic,
            "key": message.key,
            "type": message.type,
            "schema": message.schema,
            "headers": json.dumps(dict(message.headers), separators=(",", ":"), ensure_ascii=False),
            "body": data,
            "raw": int(message.raw),
            "due_after": after,
            "due_at": at,
        }

    def divide(self, parts: int) -> None:
        """Find its part, now that the number of parts is known."""
        columns = self.columns
        self.part = columns["part"] = part_of(columns["tenant"], columns["key"], columns["id"], parts)

    def refer(self, home: str, mark: str = "") -> None:
        """Put the reference into the body's place, now that the outbox's identity is known. The hash stays the body's."""
        known, columns = self.reference, self.columns
        if known is not None and known.mark == mark:
            return
        raw = bool(columns["raw"]) if known is None else known.content == "raw"
        reference = self.reference = Reference.to(self.data, home=home, raw=raw, mark=mark)
        headers = json.loads(columns["headers"]) | {HEADER: reference.header}
        columns["headers"] = json.dumps(headers, separators=(",", ":"), ensure_ascii=False)
        columns["body"], columns["raw"] = reference.body, 0


def prepare(message: Message, *, max_body: int, apart_over: int | None = None) -> Prepared:
    """Check and encode; what is wrong with a message is told where it is added, not at the commit."""
    data = message.data
    if HEADER in message.headers:
        raise ConfigurationError(
            f"the header {HEADER!r} says that a body is kept elsewhere; semel sets it. Message {message.id} must not have it"
        )
    if len(data) > max_body:
        raise TooLarge(
            f"the body of message {message.id} ({message.topic}) has {len(data)} bytes, more than max_body={max_body}: "
            "let large bodies be kept elsewhere (claim_check=…), or raise max_body"
        )
    return Prepared(message, data, apart=apart_over is not None and len(data) > apart_over)


def prepared(messages: Iterable[Prepared]) -> list[Prepared]:
    """One of each identity; the same identity with another content is refused."""
    known: dict[tuple[str, str], Prepared] = {}
    for item in messages:
        first = known.setdefault(item.identity, item)
        if first.hash != item.hash:
            raise conflict(item)
    return list(known.values())


async def write(
    port: Port,
    table: str,
    messages: Sequence[Prepared],
    parts: int,
    keeper: Keeper | None = None,
    channel: str | None = None,
) -> int:
    """Insert what is not known yet; returns how many. KeyMismatch for a known id with another content.

    A twin in another transaction is waited for: it commits, and this one is known, or it rolls back, and this one counts.
    """
    unique = prepared(messages)
    for item in unique:
        item.divide(parts)
    apart = [item for item in unique if item.apart]
    if keeper is not None and apart:
        for item in apart:
            item.refer(keeper.home)
        await keeper.lock(port, apart)
    if port.dialect == "postgresql":
        fresh = await _write_postgres(port, table, unique, channel)
    else:
        numbers = [(item.identity, await _write_one(port, table, item)) for item in unique]
        fresh = {identity: number for identity, number in numbers if number is not None}
    if len(fresh) < len(unique):
        await _compare(port, table, [item for item in unique if item.identity not in fresh])
    if keeper is not None and apart:  # only of those that are new: the others' are there
        await keeper.keep(port, [(fresh[item.identity], item) for item in apart if item.identity in fresh])
    reach("outbox.written")
    return len(fresh)


async def _write_postgres(
    port: Port, table: str, items: Sequence[Prepared], channel: str | None
) -> dict[tuple[str, str], int]:
    """All in one statement, in the order given. The numbers of those that are new.

    With a channel the same statement tells it; the server sends that once, with the commit.
    """
    arrays = [[item.columns[name] for item in items] for name in _COLUMNS]
    hashes = [item.hash for item in items]
    statement, more = (_POSTGRES, []) if channel is None else (_POSTGRES + _TOLD, [channel])
    rows = await query(port, statement.format(table=table, now=NOW["postgresql"]), [hashes, *arrays, *more])
    return {(row[0], row[1]): row[2] for row in rows}


async def _write_one(port: Port, table: str, item: Prepared) -> int | None:
    """Its number if it is new (asked of MariaDB only where it is needed)."""
    columns = item.columns
    names = {"table": table, "now": NOW[port.dialect]}
    identity = (*item.identity, item.part, item.hash)
    if port.dialect == "mysql":
        await query(port, _MYSQL_ID.format(**names), identity)
        if port.count != 1:
            return None
        await query(port, _MYSQL_ROW.format(**names), [columns[name] for name in _COLUMNS])
        return int((await query(port, "SELECT last_insert_id()", ()))[0][0]) if item.apart else 0
    found = await query(port, _SQLITE_ID.format(**names), identity)
    if not found:
        return None
    await query(port, _SQLITE_ROW.format(**names), [*(columns[name] for name in _COLUMNS), found[0][0]])
    return int(found[0][0])


async def _compare(port: Port, table: str, items: Sequence[Prepared]) -> None:
    # MariaDB: a locking read sees what is committed, whatever snapshot the caller's transaction has.
    lock = " LOCK IN SHARE MODE" if port.dialect == "mysql" else ""
    for item in items:
        rows = await query(port, _HASH.format(table=table) + lock, item.identity)
        if rows and bytes(rows[0][0]) != item.hash:
            raise conflict(item)


def _due(due: datetime | timedelta | float | None) -> tuple[float | None, float | None]:
    """(seconds from the commit, Unix time): one of the two, or neither."""
    if due is None:
        return None, None
    if isinstance(due, datetime):
        return None, due.timestamp()
    return (due.total_seconds() if isinstance(due, timedelta) else float(due)), None


def conflict(item: Prepared) -> KeyMismatch:
    """What is raised for an id that is known with another content."""
    return KeyMismatch(
        f"message id {item.identity[0]!r} was used before with another topic, type, schema or body: an id names one "
        "message; use a new id for a new one"
    )
