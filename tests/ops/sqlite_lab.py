"""What the tests of the SQLite store share: asks and ends, a stranger's connection, child processes."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from semel.keys import Scope, make_scope
from semel.model import Answer, Ask, Kind, Settle, Won
from semel.runtime import run_sync
from semel.store import Settings, open_store
from semel.stores.sqlite import SqliteStore

T = TypeVar("T")
Colour = Literal["sync", "async"]
BOTH = pytest.mark.parametrize("colour", ["sync", "async"])


def scope(key: str = "key", *, operation: str = "op") -> Scope:
    return make_scope("semel", "acme", operation, key)


def ask(key: str = "key", **more: Any) -> Ask:
    return Ask(scope(key), os.urandom(16), more.pop("lease", 10.0), more.pop("retention", 60.0), **more)


def end(owner: Ask, kind: Kind = Kind.DONE, **more: Any) -> Settle:
    return Settle(owner.scope, more.pop("nonce", owner.nonce), kind, more.pop("retention", 60.0), **more)


def run(colour: Colour, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return run_sync(main()) if colour == "sync" else asyncio.run(main())


async def win(store: SqliteStore, key: str = "key", **more: Any) -> Ask:
    owner = ask(key, **more)
    verdict = (await store.claim([owner]))[0]
    assert isinstance(verdict, Won), verdict
    return owner


async def finish(store: SqliteStore, owner: Ask, **more: Any) -> None:
    assert await store.settle([end(owner, **more)]) == [Answer.OK]


def opened(path: Path, colour: Colour = "sync", **settings: Any) -> SqliteStore:
    given = {"timeout": 20.0} | settings  # a busy machine is no broken store
    store = open_store(f"sqlite:///{path}", Settings(**given), colour)
    assert isinstance(store, SqliteStore)
    return store


@contextmanager
def hurried(store: SqliteStore, seconds: float) -> Iterator[None]:
    """For the block the store has little time. Before and after it it has plenty, however busy the machine is."""
    kept = store._timeout
    _give(store, seconds)
    try:
        yield
    finally:
        _give(store, kept)


def _give(store: SqliteStore, seconds: float) -> None:
    store._timeout = seconds
    for desk in store._desks.values():
        desk._timeout = seconds


def raw(path: Path, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
    """By a connection of somebody else's."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        return db.execute(sql, values).fetchall()


@contextmanager
def write_lock(path: Path) -> Iterator[sqlite3.Connection]:
    """Somebody else's transaction, open on the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield db


def python(code: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", code, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def outcome_of(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, ""), err
    return out


def beside(path: Path) -> set[str]:
    return {entry.name for entry in path.parent.iterdir()}


def wait_until(true: Callable[[], bool], limit: float = 10.0) -> None:
    until = time.monotonic() + limit
    while not true():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.001)
