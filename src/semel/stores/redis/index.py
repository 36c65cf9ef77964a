"""Names of Redis keys, and finding what needs attention without SCAN.

Every key of a record shares a hash tag `{prefix:shard}`; 1,024 shards spread a prefix over a cluster, yet few enough are
there to be asked one by one. Per shard two sorted sets name what people ask for: open runs (running, unknown) and
failures, scored by the moment the record ends by itself, so that dead entries are dropped by score, without reading
a record. Two sets, because many failures must not slow the search for abandoned runs. Done records are in none:
they are found by their key, or by their ref where `index={"ref"}` asks for it.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from semel.errors import ConfigurationError, OutcomeUnknown
from semel.keys import Scope
from semel.model import Record, State
from semel.store import Page, Query
from semel.stores.queries import matches, page_start, states_of
from semel.stores.redis.calls import Call, Lane, Link
from semel.stores.redis.record import COUNT, PEEK, SHARD, SWEEP, Large, pack_peek, read_peek

__all__ = ["SHARDS", "Names", "Shard", "count", "purge", "scan"]

SHARDS: Final = 1024
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_OPEN: Final = frozenset({State.RUNNING, State.UNKNOWN})
_GROUP: Final = 64  # shards asked in one call where slots do not matter
_CHUNK: Final = 128  # records read in one write


class Shard(NamedTuple):
    """The names of one shard: beginnings of those per scope, and whole ones."""

    record: bytes
    tombstone: bytes
    audit: bytes
    open: bytes
    failed: bytes
    counters: bytes
    tag: bytes


class Names:
    """All key names of one prefix. The prefix is a setting, never a client's text."""

    def __init__(self, prefix: str) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ConfigurationError(
                f"prefix={prefix!r} cannot be part of a Redis key: use 1 to 64 letters, digits or any of _ . : -"
            )
        tags = [f"{{{prefix}:{number:03x}}}".encode() for number in range(SHARDS)]
        self.shards: Final = tuple(
            Shard(tag + b":r:", tag + b":t:", tag + b":a:", tag + b":o", tag + b":f", tag + b":c", tag)
            for tag in tags
        )

    def of(self, hashed: bytes) -> Shard:
        return self.shards[(hashed[0] & 3) << 8 | hashed[1]]


def _number(hashed: bytes) -> int:
    return (hashed[0] & 3) << 8 | hashed[1]


def _place(hashed: bytes) -> tuple[int, bytes]:
    """Scans go by shard, then by hash: an order that no write changes, so a page neither skips nor repeats."""
    return _number(hashed), hashed


class _Search:
    """One page of a scan, on its way."""

    def __init__(self, link: Link, names: Names, query: Query, skew: float) -> None:
        self.link = link
        self.names = names
        self.query = query
        self.states = states_of(query)
        self.peek = pack_peek(skew, large=False)
        self.peek_large = pack_peek(skew, large=True)
        self.found: list[Record] = []
        self.now = 0.0

    def sets(self, shard: Shard) -> list[bytes]:
        query = self.query
        if query.ref is not None:
            # SHA-1 spreads and shortens; a ref that met another one would be told apart by its record.
            return [
                shard.tag
                + b":i:"
                + hashlib.sha1(query.ref.encode(), usedforsecurity=False).hexdigest().encode()
            ]
        if query.abandoned:
            return [shard.open] if self.states & _OPEN else []
        return [shard.open] * bool(self.states & _OPEN) + [shard.failed] * (State.FAILED in self.states)

    async def hashes(self, first: int, last: int) -> list[bytes]:
        """What the shards from `first` to before `last` list, in the order of a scan."""
        shards = self.names.shards[first:last]
        group = 1 if self.link.topology == "cluster" else _GROUP
        asked = [
            [key for shard in shards[at : at + group] for key in self.sets(shard)]
            for at in range(0, len(shards), group)
        ]
        replies = await self.link.call_many([Call(SHARD, keys) for keys in asked if keys])
        return sorted({hashed for reply in map(_or_raise, replies) for hashed in reply}, key=_place)

    async def read(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Look at records; returns the hashes that have none."""
        gone: list[bytes] = []
        keys = [
            (self.names.of(hashed).record + hashed, self.names.of(hashed).tombstone + hashed)
            for hashed in hashes
        ]
        replies = await self.link.call_many([Call(PEEK, pair, (self.peek,)) for pair in keys])
        for hashed, pair, first in zip(hashes, keys, replies, strict=True):
            scope = Scope(hashed, "", "", "")
            try:
                seen = read_peek(scope, _or_raise(first))
                if isinstance(seen, Large):
                    seen = read_peek(
                        scope, await self.link.call(PEEK, pair, (self.peek_large,), lane=Lane.BULK)
                    )
            except OutcomeUnknown:
                continue  # unreadable: told to whoever asks for its key; a list can say nothing about it
            record, self.now = seen  # type: ignore[misc]  # a large one was asked for again
            if record is None:
                gone.append(hashed)
            elif matches(record, self.query, self.now):
                self.found.append(record)
        return gone


def _or_raise(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


async def scan(link: Link, names: Names, query: Query, skew: float) -> Page:
    """One page. It may be short, with a cursor, when the search has used half of its time."""
    after = page_start(query)
    search = _Search(link, names, query, skew)
    patience = time.monotonic() + link.timeout / 2
    seconds, micros = await link.command("TIME")
    search.now = int(seconds) + int(micros) / 1e6 + skew
    span = _GROUP if link.topology == "cluster" else SHARDS
    for begin in range(_number(after) if after else 0, SHARDS, span):
        hashes = [
            hashed
            for hashed in await search.hashes(begin, begin + span)
            if not after or _place(hashed) > _place(after)
        ]
        for at in range(0, len(hashes), _CHUNK):
            part = hashes[at : at + _CHUNK]
            await _drop(link, names, await search.read(part))
            if len(search.found) > query.limit:
                found = search.found[: query.limit]
                return Page(found, cursor=_hash(found[-1]).hex(), now=search.now)
            if time.monotonic() > patience:
                return Page(search.found, cursor=part[-1].hex(), now=search.now)
    return Page(search.found, now=search.now)


def _hash(record: Record) -> bytes:
    return record.scope.hash if record.scope is not None else b""


async def _drop(link: Link, names: Names, gone: Sequence[bytes]) -> None:
    """Take entries out of the index whose records somebody removed by hand; the script looks once more."""
    calls = []
    for number, group in groupby(sorted(gone, key=_place), key=_number):
        shard = names.shards[number]
        records = [shard.record + hashed for hashed in group]
        calls.append(Call(SWEEP, [shard.open, shard.failed, *records], (2, len(records) * 2 + _CHUNK)))
    for reply in await link.call_many(calls) if calls else ():
        _or_raise(reply)


async def purge(link: Link, names: Names, limit: int) -> int:
    """Drop up to `limit` index entries whose records have ended by time (Redis dropped the records itself)."""
    dropped = 0
    group = 1 if link.topology == "cluster" else _GROUP
    sets = [(shard.open, shard.failed) for shard in names.shards]
    keys = [[key for pair in sets[at : at + group] for key in pair] for at in range(0, SHARDS, group)]
    while keys and dropped < limit:
        # The limit holds for the whole: with little room left, few may be asked at once.
        room = limit - dropped
        part, keys = keys[: min(_GROUP, room)], keys[min(_GROUP, room) :]
        share = room // len(part)
        replies = await link.call_many([Call(SWEEP, some, (len(some), share)) for some in part])
        dropped += sum(map(_or_raise, replies))
    return dropped


async def count(link: Link, names: Names) -> dict[str, int]:
    """How often keys were won, taken over, done, failed, released, unknown, forgotten, since the counters began."""
    group = 1 if link.topology == "cluster" else _GROUP
    keys = [shard.counters for shard in names.shards]
    replies = await link.call_many([Call(COUNT, keys[at : at + group]) for at in range(0, SHARDS, group)])
    sums: dict[str, int] = {}
    for reply in map(_or_raise, replies):
        for name, value in zip(reply[::2], reply[1::2], strict=True):
            sums[name.decode()] = sums.get(name.decode(), 0) + int(value)
    return sums
