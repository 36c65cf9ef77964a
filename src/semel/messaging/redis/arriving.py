"""Batches of another outbox's relay, taken into an outbox in Redis: rows, number and epoch in one script.

In a Cluster a script has one slot: the batches are divided by the parts of this outbox (`lane`), and each part has numbers of
its own beside its messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from semel.errors import ConfigurationError
from semel.messaging.message import Message, part_of
from semel.messaging.redis.keys import ARRIVE
from semel.messaging.sink import Fenced, Rejected, Row, SinkUnavailable
from semel.messaging.writing import Prepared, conflict
from semel.stores.redis.calls import Lane

if TYPE_CHECKING:
    from semel.messaging.redis.bodies import RedisKeeper
    from semel.messaging.redis.home import RedisHome

__all__ = ["Arrivals"]

_TRIES: Final = 3
_encode: Final = msgspec.msgpack.Encoder().encode


class Arrivals:
    """Where batches arrive. `prepare` is the outbox's own."""

    def __init__(
        self,
        home: RedisHome,
        *,
        retention: int,
        keeper: RedisKeeper | None,
        prepare: Callable[[Message], Prepared],
        told: Callable[[], None],
    ) -> None:
        self._home = home
        self._retention = retention
        self._keeper = keeper
        self._prepare = prepare
        self._told = told

    @property
    def where(self) -> str:
        """The server for people."""
        return self._home.where

    @property
    def is_divided(self) -> bool:
        """Whether its parts are in several slots. ConfigurationError if how many there are is not known without asking."""
        if self._home.names.cluster and not self._home.parts_known:
            raise ConfigurationError(
                "an outbox in a Redis Cluster that other outboxes are relayed into must be told how it is divided: "
                "Outbox(…, parts=N), best with as many parts as the outbox that the messages come from"
            )
        return self._home.names.cluster

    def lane(self, row: Row) -> str:
        """The part of this outbox that a row belongs to."""
        return str(part_of(row.tenant, row.key, row.id, self._home.parts))

    async def publish(
        self, source: str, part: int, epoch: int, batch: int, messages: Sequence[Message]
    ) -> int:
        """Add the messages under their number; the number that was there. Raises what sinks raise; StoreUnavailable if Redis
        did not answer: then it is not known whether they are in, and the number tells."""
        return await self._home.aside(lambda: self._publish(source, part, epoch, batch, messages))

    async def number(self, source: str, part: int, row: Row) -> int:
        """The last batch that is in, of those that go where this row goes."""
        return await self._home.aside(lambda: self._number(f"{source}:{part}", row))

    def _number(self, sender: str, row: Row) -> int:
        self._home.look()
        key = self._home.names.arrivals(part_of(row.tenant, row.key, row.id, self._home.parts), sender)
        return int(self._home.command("HGET", key, "batch", key=key) or 0)

    def _publish(self, source: str, part: int, epoch: int, batch: int, messages: Sequence[Message]) -> int:
        self._home.look()
        items = [self._prepare(message) for message in messages]
        for item in items:
            item.divide(self._home.parts)
        for _ in range(_TRIES):
            self._store(items)
            said, *more = self._call(f"{source}:{part}", epoch, batch, items)
            match said:
                case -1:
                    (known,) = more
                    raise Fenced(
                        f"part {part} has epoch {known} at the other outbox, this relay {epoch}",
                        epoch=int(known),
                    )
                case -2:
                    wrong = [items[place - 1] for place in more]
                    reasons = {item.identity[0]: str(conflict(item)) for item in wrong}
                    raise Rejected(reasons, final=reasons.keys())
                case -3:  # a body was swept before its message was in: stored again, under another name
                    continue
            self._told()
            return int(said)
        raise SinkUnavailable(
            f"bodies in the store of the outbox in {self.where} are swept while they are stored"
        )

    def _store(self, items: Sequence[Prepared]) -> None:
        """Large bodies, each under a name that is reserved first: a sweep that takes the body ends the reservation."""
        if self._keeper is None:
            return
        apart = self._keeper.name(items)
        self._keeper.reserve(apart)
        self._keeper.put(apart)

    def _call(self, sender: str, epoch: int, batch: int, items: Sequence[Prepared]) -> list[Any]:
        names = self._home.names
        first = items[0].part
        keys = [
            names.arrivals(first, sender), names.meta(first), names.seq(first), names.counts(first), names.bodies_over(first),
        ]  # fmt: skip
        for item in items:
            digest = "" if item.reference is None else item.reference.digest
            keys += (
                names.stream(item.part),
                names.tenants(item.part),
                names.id(item.part, *reversed(item.identity)),
                names.body(item.part, digest),
            )
        told = _encode([self._fields(item) for item in items])
        args: list[bytes | int] = [os.urandom(16), epoch, batch, self._home.parts, self._retention, told]
        args += [item.columns["body"] for item in items]
        found: list[Any] = self._home.call(ARRIVE, keys, args, lane=Lane.BULK)
        return found

    def _fields(self, item: Prepared) -> list[str]:
        columns = item.columns
        kept = "" if item.reference is None or self._keeper is None else str(self._keeper.kept)
        names = ("id", "tenant", "topic", "key", "type", "schema", "headers", "raw")
        return [
            item.hash.hex(),
            *("" if columns[name] is None else str(columns[name]) for name in names),
            kept,
        ]
