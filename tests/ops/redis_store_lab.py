"""What the tests of the Redis store share: asks and ends, both colours, a look at the server's own keys."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import msgspec
import pytest
import redis

from semel.keys import Scope, make_scope
from semel.model import Answer, Ask, Kind, Settle, Won
from semel.runtime import run_sync
from semel.store import Settings
from semel.stores.redis import RedisStore, open_url
from semel.testing import services

T = TypeVar("T")
Colour = Literal["sync", "async"]
BOTH = pytest.mark.parametrize("colour", ["sync", "async"])


def scope(key: str = "key", *, tenant: str = "acme", operation: str = "op") -> Scope:
    return make_scope("semel", tenant, operation, key)


def ask(key: str = "key", **more: Any) -> Ask:
    where = more.pop("scope", None) or scope(key)
    return Ask(where, os.urandom(16), more.pop("lease", 10.0), more.pop("retention", 60.0), **more)


def end(owner: Ask, kind: Kind = Kind.DONE, **more: Any) -> Settle:
    return Settle(owner.scope, more.pop("nonce", owner.nonce), kind, more.pop("retention", 60.0), **more)


def word(owner: Ask, kind: Kind = Kind.DONE, **more: Any) -> Settle:
    """A person's word about a key."""
    return end(owner, kind, nonce=b"", new_nonce=os.urandom(16), actor="ada", reason="looked", **more)


def run(colour: Colour, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return run_sync(main()) if colour == "sync" else asyncio.run(main())


async def win(store: RedisStore, key: str = "key", **more: Any) -> Ask:
    owner = ask(key, **more)
    (verdict,) = await store.claim([owner])
    assert isinstance(verdict, Won), verdict
    return owner


async def finish(store: RedisStore, owner: Ask, kind: Kind = Kind.DONE, **more: Any) -> None:
    assert await store.settle([end(owner, kind, **more)]) == [Answer.OK]


def opened(server: services.RedisServer | str, colour: Colour = "sync", **settings: Any) -> RedisStore:
    url = server if isinstance(server, str) else server.url
    given = {"timeout": 20.0} | settings  # a busy machine is no broken store
    return open_url(url, Settings(**given), colour)


@contextmanager
def sync_store(server: services.RedisServer | str, **settings: Any) -> Iterator[RedisStore]:
    store = opened(server, **settings)
    try:
        yield store
    finally:
        run_sync(store.aclose())


@contextmanager
def hurried(store: RedisStore, seconds: float) -> Iterator[None]:
    """For the block the store has little time. Before and after it it has plenty, however busy the machine is."""
    kept = store._settings
    _give(store, msgspec.structs.replace(kept, timeout=seconds))
    try:
        yield
    finally:
        _give(store, kept)


def _give(store: RedisStore, settings: Settings) -> None:
    link: Any = store._link
    store._settings, link._timeout = settings, settings.timeout
    if store.colour == "async":
        link._patience = settings.timeout / 2


@contextmanager
def client(server: services.RedisServer) -> Iterator[redis.Redis]:
    """A stranger's client, bytes in and out."""
    with redis.Redis(host=server.host, port=server.port) as found:
        yield found


def all_keys(stranger: redis.Redis, pattern: bytes = b"*") -> list[bytes]:
    return [key for key in stranger.scan_iter(pattern) if isinstance(key, bytes)]


def drive(waiting: Awaitable[None]) -> None:
    """Await what never suspends."""

    async def main() -> None:
        await waiting

    run_sync(main())


def record_key(store: RedisStore, where: Scope) -> bytes:
    return store.tag(where).encode() + b":r:" + where.hash


def tombstone_key(store: RedisStore, where: Scope) -> bytes:
    return store.tag(where).encode() + b":t:" + where.hash
