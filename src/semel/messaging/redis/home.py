"""The place of an outbox in Redis: a way to the server of our own, and what the outbox says of itself there.

A client that is handed in is only read: for its servers and its login. Everything here is asked over a connection of our own,
in a thread; messages travel on the caller's pipeline.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec

from semel.errors import ConfigurationError, StoreUnavailable
from semel.messaging.message import PARTS
from semel.messaging.redis.keys import META, Names
from semel.messaging.redis.ledger import RedisLedger
from semel.runtime import run_sync
from semel.stores.redis import facts
from semel.stores.redis.address import Target, read_target
from semel.stores.redis.calls import Call, Lane, Link, Script, Unwatch
from semel.stores.redis.errors import ServerError
from semel.stores.redis.threads import ThreadLink

__all__ = ["RedisHome"]

T = TypeVar("T")
_VERSION: Final = 1
_TIMEOUT: Final = 5.0
_CHANNELS: Final = 64

_forked: weakref.WeakSet[RedisHome] = weakref.WeakSet()


class _Meta(msgspec.Struct):
    """What stands in the outbox's `meta` key, in JSON."""

    version: int
    identity: str
    parts: int


class RedisHome:
    """See `Home`. `given` is a URL (redis://, rediss://, valkey://, redis+sentinel://, redis+cluster://), or a client."""

    def __init__(self, given: Any, *, prefix: str, create: bool, parts: int | None) -> None:
        target = _target(given)
        self.names = Names(prefix, cluster=target.kind == "cluster")
        self.identity = ""
        self.parts = parts or PARTS
        self._parts_given = parts is not None
        self._may_create = create
        self._where = f"{target.kind} Redis at {', '.join(map(str, target.seeds))}"
        self._prefix = prefix
        self._target = target
        self._link = self._new_link()
        self._ready = False
        self._reset()
        _forked.add(self)

    def _new_link(self) -> Link:
        """Nothing connects before first use."""
        return ThreadLink(
            self._target,
            timeout=_TIMEOUT,
            connect_timeout=float(self._target.settings.get("socket_connect_timeout") or _TIMEOUT / 2),
            max_connections=32,
            ping_every=5.0,
        )

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    @property
    def where(self) -> str:
        """The server for people; never with a password."""
        return self._where

    @property
    def parts_known(self) -> bool:
        """Whether the number of parts was given, or read."""
        return self._parts_given or self._ready

    @property
    def ready(self) -> bool:
        """Whether it is known how the outbox is divided."""
        return self._ready

    def ledger(self, team: str) -> RedisLedger:
        """What the relays of a team read and write here."""
        return RedisLedger(self, team)

    async def listen(self, wake: Callable[[], None]) -> Callable[[], Awaitable[None]] | None:
        """Subscribed to what the script that adds tells, one channel for each hash tag; None if these are many."""
        tags = self.parts if self.names.cluster else 1
        if tags > _CHANNELS:
            return None
        channels = [self.names.meta(part) for part in range(tags)]

        async def begin() -> list[Unwatch]:
            return [await self._link.watch(channel, wake) for channel in channels]

        async def end(watching: Sequence[Unwatch]) -> None:
            for unwatch in watching:
                await unwatch()

        watching = await self.aside(lambda: run_sync(begin()))
        return lambda: self.aside(lambda: run_sync(end(watching)))

    async def cautions(self) -> list[str]:
        """What in the live settings of the server lets it lose messages that it confirmed, with the remedy."""
        found = await self.aside(lambda: run_sync(facts.facts(self._link, acks=0)))
        return [
            warning.partition("; set acks")[0] for warning in found.warnings
        ]  # an EXEC cannot wait for replicas

    # ------------------------------------------------------------------------------------------- calls
    def call(
        self,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[bytes | str | int] = (),
        *,
        lane: Lane = Lane.MAIN,
    ) -> Any:
        """Run a script; it may be sent twice, and knows. StoreUnavailable when Redis does not answer."""
        try:
            return run_sync(self._link.call(script, keys, args, lane=lane))
        except ServerError as error:
            raise self._refused(error) from error

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one write per node. The first error is raised when all of them have run."""
        replies = run_sync(self._link.call_many(calls))
        for reply in replies:
            if isinstance(reply, ServerError):
                raise self._refused(reply) from reply
            if isinstance(reply, BaseException):
                raise reply
        return replies

    def command(self, *words: bytes | str | int, key: bytes) -> Any:
        """One plain command that only reads, sent to where `key` is."""
        try:
            return run_sync(self._link.command(*words, key=key))
        except ServerError as error:
            raise self._refused(error) from error

    def _refused(self, error: ServerError) -> StoreUnavailable:
        return StoreUnavailable(f"{self.where} refused what the outbox asked: {error}")

    async def aside(self, work: Callable[[], T]) -> T:
        """Do it in a thread of our own."""
        return await asyncio.get_running_loop().run_in_executor(self._pool(), work)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(8, thread_name_prefix="semel-messaging")
            return self._threads

    # -------------------------------------------------------------------------------------------- meta
    def look(self) -> None:
        """Before the first use: is the outbox there, and how is it divided? What is missing is made."""
        if self._ready:
            return
        run_sync(facts.check(self._link, accept_eviction=False))
        self._adopt(self._may_create)

    def create(self) -> None:
        """Make what is missing, now."""
        run_sync(facts.check(self._link, accept_eviction=False))
        self._adopt(True)

    async def acreate(self) -> None:
        """As `create`, awaited."""
        await self.aside(self.create)

    def _adopt(self, make: bool) -> None:
        fresh = msgspec.json.encode(_Meta(_VERSION, uuid.uuid4().hex, self.parts)) if make else b""
        # In a Cluster every part counts its own messages: whether one was ever added, no single script could tell.
        wanted = str(self.parts) if self._parts_given and not self.names.cluster else ""
        found = self.call(META, (self.names.home, self.names.home_seq), (fresh, wanted))
        if not found:
            raise ConfigurationError(
                f"there is no outbox {self._prefix!r} in {self.where}, and it is not made here (create=False). Call create() "
                "once at start-up"
            )
        meta = msgspec.json.decode(found, type=_Meta)
        if meta.version > _VERSION:
            raise ConfigurationError(
                f"the outbox {self._prefix!r} in {self.where} has version {meta.version}, this semel knows {_VERSION}: update "
                "semel here before it writes there"
            )
        if self._parts_given and meta.parts != self.parts:
            raise ConfigurationError(
                f"this outbox is divided into {meta.parts} parts, and parts={self.parts} was given: messages of one key would "
                f"go two ways. Leave parts= out, or give {meta.parts}"
            )
        if self.names.cluster and make:
            copy = msgspec.json.encode(meta)
            keys = ((self.names.meta(part), self.names.seq(part)) for part in range(meta.parts))
            self.call_many([Call(META, pair, (copy, "")) for pair in keys])
        self.identity, self.parts = meta.identity, meta.parts
        self._ready = True

    # ------------------------------------------------------------------------------------------- close
    def close(self) -> None:
        """Close what was opened here; a client that was handed in is left alone. What is asked later connects anew."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)
        link, self._link = self._link, self._new_link()
        link.close()


def _target(given: Any) -> Target:
    if isinstance(given, str):
        for theirs, ours in (("valkeys", "rediss"), ("valkey", "redis")):  # the protocol is Redis's
            if given.startswith((f"{theirs}:", f"{theirs}+")):
                given = ours + given.removeprefix(theirs)
        return read_target(given, "sync")
    if any(".asyncio." in f"{kind.__module__}." for kind in type(given).__mro__):
        # Its servers and its login are what counts; its kind of connection is of no use in a thread.
        return replace(read_target(given, "async"), custom=None)
    return read_target(given, "sync")


def _after_fork() -> None:
    for home in list(_forked):
        home._reset()  # noqa: SLF001 - our own; its link looks after itself


os.register_at_fork(after_in_child=_after_fork)
