"""What the tests of the MariaDB/MySQL store share: both colours from one body, messages, a rival transaction."""

from __future__ import annotations

import asyncio
import multiprocessing.queues
import multiprocessing.synchronize
import secrets
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import msgspec
import pymysql

from semel.keys import Scope, make_scope
from semel.model import Ask, Kind, Renewal, Settle, Won
from semel.runtime import run_sync
from semel.store import Settings
from semel.stores import mysql
from semel.stores.mysql import MysqlStore
from semel.testing import services

T = TypeVar("T")
Colour = Literal["sync", "async"]
COLOURS: tuple[Colour, ...] = ("sync", "async")
DRIVER = {"sync": "pymysql", "async": "asyncmy"}


def drive(colour: Colour, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return run_sync(main()) if colour == "sync" else asyncio.run(main())


def using(
    colour: Colour, url: str, body: Callable[[MysqlStore], Coroutine[Any, Any, T]], **settings: Any
) -> T:
    """Open a store, run `body` with it in its colour, close it."""

    async def main() -> T:
        given = {"timeout": 20.0} | settings  # a busy machine is no broken store
        store = mysql.open_url(url, Settings(**given), colour)
        try:
            return await body(store)
        finally:
            await store.aclose()

    return drive(colour, main)


def scope(key: str = "key", tenant: str = "acme") -> Scope:
    return make_scope("test", tenant, "op", key)


def ask(key: str = "key", **options: Any) -> Ask:
    given: dict[str, Any] = {"nonce": secrets.token_bytes(16), "lease": 10.0, "retention": 60.0, **options}
    return Ask(scope=scope(key), **given)


def end(of: Ask, kind: Kind = Kind.DONE, **options: Any) -> Settle:
    given: dict[str, Any] = {"nonce": of.nonce, "retention": 60.0, **options}
    return Settle(scope=of.scope, kind=kind, **given)


def beat(of: Ask) -> Renewal:
    return Renewal(of.scope, of.nonce, 10.0, 60.0)


async def win(store: MysqlStore, key: str = "key", **options: Any) -> Ask:
    mine = ask(key, **options)
    (verdict,) = await store.claim([mine])
    assert isinstance(verdict, Won), verdict
    return mine


@contextmanager
def hurried(store: MysqlStore, seconds: float) -> Iterator[None]:
    """For the block the store has little time. Before and after it it has plenty, however busy the machine is."""
    kept = store._settings
    store._settings = msgspec.structs.replace(kept, timeout=seconds)
    try:
        yield
    finally:
        store._settings = kept


@contextmanager
def rival(server: services.MariaServer, url: str) -> Iterator[Callable[..., Any]]:
    """A transaction of somebody else on the same database, open until the block ends, then rolled back."""
    connection = pymysql.connect(
        host=server.host, port=server.port, user="root", database=url.rpartition("/")[2], autocommit=False
    )
    with connection, connection.cursor() as cursor:
        # As `within` does it. At REPEATABLE READ the gaps between keys would be locked too, and strangers' keys with them.
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.begin()
        yield cursor.execute
        connection.rollback()


def race(
    url: str, gate: multiprocessing.synchronize.Barrier, won: multiprocessing.queues.Queue[list[str]]
) -> None:
    """A process's part. Here rather than in a test's module, which takes a process three times as long to import."""
    store = mysql.open_url(url, Settings(timeout=20), "sync")
    keys = [f"key-{n}" for n in range(60)]
    gate.wait(20)
    mine = [key for key in keys if isinstance(run_sync(store.claim([ask(key)]))[0], Won)]
    batch = [ask(f"batch-{n}") for n in range(60)]
    verdicts = run_sync(store.claim(batch))
    mine += [one.scope.key for one, verdict in zip(batch, verdicts, strict=True) if isinstance(verdict, Won)]
    won.put(mine)
    run_sync(store.aclose())
