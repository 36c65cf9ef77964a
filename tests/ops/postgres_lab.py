"""A store on a real PostgreSQL, driven in either colour by the same test body."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from semel.keys import Scope, make_scope
from semel.model import Answer, Ask, Kind, Policy, Renewal, Settle, Verdict, Won
from semel.runtime import run_sync
from semel.store import Settings
from semel.stores import postgres
from semel.stores.postgres import PostgresStore
from semel.testing import services

T = TypeVar("T")

KINDS: tuple[tuple[str, Literal["sync", "async"]], ...] = (
    ("asyncpg", "async"),
    ("psycopg", "async"),
    ("psycopg", "sync"),
)
IDS = [f"{driver}-{colour}" for driver, colour in KINDS]


def scope_of(key: str) -> Scope:
    return make_scope("semel", "tenant", "operation", key)


def ask_for(key: str, **options: Any) -> Ask:
    return Ask(
        **{"scope": scope_of(key), "nonce": os.urandom(16), "lease": 10.0, "retention": 100.0, **options}
    )


def end_of(ask: Ask, kind: Kind = Kind.DONE, **options: Any) -> Settle:
    return Settle(**{"scope": ask.scope, "nonce": ask.nonce, "kind": kind, "retention": 100.0, **options})


def beat_of(ask: Ask, lease: float = 10.0) -> Renewal:
    return Renewal(ask.scope, ask.nonce, lease, ask.retention)


@dataclass
class Lab:
    """One database, one way to it."""

    url: str
    colour: Literal["sync", "async"]
    runner: asyncio.Runner | None = None
    stores: list[PostgresStore] = field(default_factory=list)

    def open(self, settings: Settings | None = None, *, options: str = "", url: str = "") -> PostgresStore:
        given = settings or Settings(timeout=20)  # a busy machine is no broken store
        store = postgres.open_url((url or self.url) + options, given, self.colour)
        self.stores.append(store)
        return store

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self.colour == "sync":
            return run_sync(work)
        if self.runner is None:
            self.runner = asyncio.Runner()
        return self.runner.run(work)

    def claim(self, store: PostgresStore, *asks: Ask) -> list[Verdict | Exception]:
        return self.run(store.claim(asks))

    def settle(self, store: PostgresStore, *ends: Settle) -> list[Answer | Exception]:
        return self.run(store.settle(ends))

    def begin(self, store: PostgresStore, key: str, **options: Any) -> Ask:
        ask = ask_for(key, **options)
        (verdict,) = self.claim(store, ask)
        assert isinstance(verdict, Won), verdict
        return ask

    def finish(self, store: PostgresStore, key: str, **options: Any) -> Ask:
        ask = self.begin(store, key)
        assert self.settle(store, end_of(ask, **options)) == [Answer.OK]
        return ask

    def close(self) -> None:
        for store in self.stores:
            self.run(store.aclose())
        if self.runner is not None:
            self.runner.close()


@contextmanager
def hurried(store: PostgresStore, seconds: float) -> Iterator[None]:
    """For the block the store has little time. Before and after it it has plenty, however busy the machine is."""
    kept = store._talk._settings
    store._talk._settings = msgspec.structs.replace(kept, timeout=seconds)
    try:
        yield
    finally:
        store._talk._settings = kept


_databases: dict[tuple[str, str], str] = {}  # by the server's folder, which is never used again, and driver


@contextmanager
def lab(server: services.PostgresServer, kind: tuple[str, Literal["sync", "async"]]) -> Iterator[Lab]:
    """An empty database. One per server and driver, emptied after each use: making one costs eight megabytes."""
    driver, colour = kind
    url = _databases.get((str(server.folder), driver)) or server.database(driver=driver)
    _databases[str(server.folder), driver] = url
    made = Lab(url, colour)
    try:
        yield made
    finally:
        made.close()
        server.start()
        _empty(server, database_of(url))


def _empty(server: services.PostgresServer, database: str) -> None:
    # From outside, because its settings may forbid writing; and in few connections: this follows every test.
    server.execute(
        f"alter database {database} reset all;"
        f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{database}'"
    )
    server.execute(
        "drop schema if exists app cascade; drop schema if exists public cascade;"
        "create schema public; grant usage on schema public to public",
        database=database,
    )


def database_of(url: str) -> str:
    return url.rpartition("/")[2].partition("?")[0]


def rows(server: services.PostgresServer, url: str, sql: str) -> Sequence[tuple[Any, ...]]:
    """What a stranger sees in the database."""
    return server.execute(sql, database=database_of(url))


HOLD = Policy.HOLD


def claim_in_child(url: str, colour: Literal["sync", "async"], key: str) -> str:
    """Here rather than in a test's module, which takes a process five times as long to import."""

    async def claim() -> str:
        store = postgres.open_url(url, Settings(timeout=20), colour)
        (verdict,) = await store.claim([ask_for(key)])
        await store.aclose()
        return type(verdict).__name__

    return run_sync(claim()) if colour == "sync" else asyncio.run(claim())
