"""The two hot commands, ready but for what differs from call to call: a claim or a settle is one join of bytes.

`pack_command` would format all keys anew for every call; here each shard's part is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from semel.stores.redis.calls import Script
from semel.stores.redis.index import Shard

__all__ = ["Phrase"]

_Parts: TypeAlias = tuple[bytes, bytes, bytes, bytes]


class Phrase:
    """EVALSHA of one script with the keys of a scope; `rest` names the shard's own keys after record and tombstone."""

    __slots__ = ("_arguments", "_rest", "_script", "_shards", "known")

    def __init__(self, script: Script, shards: Sequence[Shard], rest: Sequence[str], arguments: int) -> None:
        self._script: Final = script
        self._shards: Final = shards
        self._rest: Final = tuple(rest)
        self._arguments: Final = arguments
        self.known: Final[dict[int, _Parts]] = {}
        """By shard, what `of` has made so far: whoever looks here first spares the call."""

    def of(self, hashed: bytes) -> _Parts:
        """The bytes before the record's hash, between the two hashes, and up to the first argument's length; then a
        name in the shard's slot."""
        number = (hashed[0] & 3) << 8 | hashed[1]
        return self.known.get(number) or self._make(number, len(hashed))

    def _make(self, number: int, size: int) -> _Parts:
        shard = self._shards[number]
        keys = 2 + len(self._rest)
        words = 3 + keys + self._arguments
        start = b"*%d\r\n$7\r\nEVALSHA\r\n%b%b" % (words, _bulk(self._script.sha1), _bulk(b"%d" % keys))
        first = b"$%d\r\n%b" % (len(shard.record) + size, shard.record)
        second = b"\r\n$%d\r\n%b" % (len(shard.tombstone) + size, shard.tombstone)
        others = b"\r\n%b$" % b"".join(_bulk(getattr(shard, name)) for name in self._rest)
        made = self.known[number] = (start + first, second, others, shard.record)
        return made


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)
