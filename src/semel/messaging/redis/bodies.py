"""Large bodies of an outbox in Redis: who refers to them, and when one may go.

A body has a name of its own, which is used once: hash, part, and random digits. Its key in Redis is written by the EXEC that
commits its message. That key is watched before the body is stored:

    WATCH the key ──▶ store the body ──▶ MULTI … the message, the key … EXEC
                            └── somebody sweeps: writes the key, then removes the body ──▶ the EXEC applies nothing

So a body whose message may yet be committed is never removed, however long that takes and whatever a clock says; and one that
was found to be over stays so, however late it is removed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigurationError
from semel.messaging.bodies import BodyDamaged, BodyStore, Reference, open_bodies
from semel.messaging.bodies.keeping import older
from semel.messaging.redis.keys import BODIES
from semel.messaging.sink import Row
from semel.messaging.writing import Prepared

if TYPE_CHECKING:
    from semel.messaging.redis.home import RedisHome

__all__ = ["RedisKeeper", "body_of"]

_GROUP: Final = 20


class RedisKeeper:
    """The claim check of an outbox in Redis. `kept` is for how many seconds a body outlives its message's delivery."""

    def __init__(self, given: Any, home: RedisHome, *, over: int, kept: float) -> None:
        if over < 0:
            raise ConfigurationError(f"claim_over must be a number of bytes, not {over}")
        if given == "sql":
            raise ConfigurationError(
                'claim_check="sql" keeps bodies in a table beside the outbox, and this outbox is in Redis, which has no tables: '
                "give it a folder or a bucket, file:///folder or s3://bucket/prefix"
            )
        self.store: BodyStore = open_bodies(given)
        self.over = over
        self.kept = int(kept * 1000)
        self._home = home

    # ------------------------------------------------------------------------------ for whoever adds
    def name(self, items: Iterable[Prepared]) -> list[Prepared]:
        """Give those whose body is kept apart a new name each; returns them. Their keys are to be watched, then `put` is called."""
        apart = [item for item in items if item.apart]
        for item in apart:
            item.refer(self._home.identity[:16], f"{item.part:03x}{secrets.token_hex(7)[:13]}")
        return apart

    def reserve(self, items: Sequence[Prepared]) -> None:
        """For those who cannot watch: who sweeps ends the reservation, and whoever commits must find it."""
        by_part: dict[int, list[str]] = defaultdict(list)
        for item in items:
            if item.reference is not None:
                by_part[item.part].append(item.reference.digest)
        for part, digests in by_part.items():
            self._ask(part, digests, "reserve")

    def put(self, items: Iterable[Prepared]) -> None:
        """Store the bodies: durable when this returns, which is before the EXEC."""
        for item in items:
            if item.reference is not None:
                self.store.put(item.reference.name, item.data)

    # --------------------------------------------------------------------------------------- removal
    async def expire(self) -> int:
        """Remove bodies whose messages are over: delivered, and their time past. Returns how many."""
        return await self._home.aside(self._expire)

    def _expire(self) -> int:
        self._home.look()
        count = 0
        for part in range(self._home.parts) if self._home.names.cluster else (0,):
            while over := self._ask(part, (), "over", _GROUP):
                digests = [digest.decode() for digest in over]
                self._delete(digests)
                self._ask(part, digests, "forget", *digests)
                count += len(digests)
        return count

    async def sweep(self, grace: float) -> int:
        """Remove bodies older than `grace` seconds that no message refers to: what was stored and then not committed."""
        await self._home.aside(self._home.look)
        count = 0
        found = iter(self.store.stored(self._home.identity[:16]))
        while some := await asyncio.to_thread(older, found, grace):
            count += await self._home.aside(partial(self._sweep, sorted(some)))
        return count

    def _sweep(self, digests: Sequence[str]) -> int:
        by_part: dict[int, list[str]] = defaultdict(list)
        for digest in digests:
            if len(digest) == 80:
                by_part[int(digest[64:67], 16)].append(digest)
        count = 0
        for part, mine in by_part.items():
            for start in range(0, len(mine), _GROUP):
                group = mine[start : start + _GROUP]
                doomed = self._ask(part, group, "doom")
                gone = [digest for digest, said in zip(group, doomed, strict=True) if said]
                self._delete(gone)
                count += len(gone)
        return count

    def _delete(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self.store.delete(f"{self._home.identity[:16]}/{digest}")

    def _ask(self, part: int, digests: Sequence[str], *said: str | int) -> list[Any]:
        names = self._home.names
        keys = [names.bodies_over(part), *(names.body(part, digest) for digest in digests)]
        found: list[Any] = self._home.call(BODIES, keys, said)
        return found


def body_of(row: Row) -> str:
    """What the body is called that a row of this outbox refers to; empty if its body is in the row."""
    try:
        reference = Reference.of(row)
    except BodyDamaged:  # nothing that was written here
        return ""
    return "" if reference is None or not reference.mark else reference.digest
